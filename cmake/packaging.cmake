# SPDX-License-Identifier: Apache-2.0
# What is installed beside the program and the libraries (man pages, completion, the bill of materials), and the Debian package. `scripts/package`
# makes packages.
if(NOT CMAKE_CROSSCOMPILING AND NOT BALLAST_SANITIZE AND NOT BALLAST_CUDA_EMULATED) # the program runs, as in an installation
  set(man_pages ${CMAKE_BINARY_DIR}/man)
  add_custom_command(OUTPUT ${man_pages}/ballast.1 DEPENDS ballast ${CMAKE_SOURCE_DIR}/cmake/man_pages.cmake
    COMMAND ${CMAKE_COMMAND} -E env "LD_LIBRARY_PATH=${CUDAToolkit_LIBRARY_DIR}" ${CMAKE_COMMAND} -D PROGRAM=$<TARGET_FILE:ballast> -D OUTPUT=${man_pages} -P ${CMAKE_SOURCE_DIR}/cmake/man_pages.cmake
    COMMENT "Man pages" VERBATIM)
  add_custom_target(man_pages ALL DEPENDS ${man_pages}/ballast.1)
  install(DIRECTORY ${man_pages}/ DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
endif()
install(FILES packaging/completions/ballast.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME ballast)
install(FILES packaging/completions/_ballast DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/vendor-completions)
install(FILES packaging/completions/ballast.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
install(FILES LICENSE README.md CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY docs DESTINATION ${CMAKE_INSTALL_DOCDIR} FILES_MATCHING PATTERN "*.md" PATTERN "*.svg")

if(BALLAST_CUDA AND NOT BALLAST_CUDA_EMULATED)
  ballast_component(cublas "${CUDAToolkit_VERSION}" LicenseRef-NVIDIA-CUDA-EULA)
  ballast_component(cudart "${CUDAToolkit_VERSION}" LicenseRef-NVIDIA-CUDA-EULA)
endif()
ballast_write_bill(${CMAKE_BINARY_DIR}/ballast.spdx.json)
install(FILES ${CMAKE_BINARY_DIR}/ballast.spdx.json DESTINATION ${CMAKE_INSTALL_DATADIR}/ballast)

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_CONTACT "Ballast's developers <ballast@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "fine-tuning of large language models over a frozen FP8 base")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_PRE_BUILD_SCRIPTS ${CMAKE_SOURCE_DIR}/cmake/package_tree.cmake)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
include(CPack)
