# SPDX-License-Identifier: Apache-2.0
# CPack runs this over the installed tree before it makes the archive: man pages are compressed, and all files get the time SOURCE_DATE_EPOCH,
# so that two builds give the same package.
execute_process(COMMAND find ${CPACK_TEMPORARY_DIRECTORY} -path */man1/*.1 -exec gzip -9n {} + COMMAND_ERROR_IS_FATAL ANY)
if(DEFINED ENV{SOURCE_DATE_EPOCH})
  execute_process(COMMAND find ${CPACK_TEMPORARY_DIRECTORY} -exec touch -h -d @$ENV{SOURCE_DATE_EPOCH} {} + COMMAND_ERROR_IS_FATAL ANY)
endif()
