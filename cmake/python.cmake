# SPDX-License-Identifier: Apache-2.0
# The compiled files of the Python package, where it looks for them: the component that pyproject.toml installs. A wheel has no symbolic
# links: the library has one name.
if(TARGET libballast_shared)
  install(PROGRAMS $<TARGET_FILE:libballast_shared> DESTINATION ballast/lib RENAME libballast.so.${BALLAST_SOVERSION}
    COMPONENT python EXCLUDE_FROM_ALL)
  install(PROGRAMS $<TARGET_FILE:libballast_session_shared> DESTINATION ballast/lib RENAME libballast_session.so.${BALLAST_SOVERSION}
    COMPONENT python EXCLUDE_FROM_ALL)
  install(PROGRAMS $<TARGET_FILE:ballast> DESTINATION ballast/bin COMPONENT python EXCLUDE_FROM_ALL)
endif()
