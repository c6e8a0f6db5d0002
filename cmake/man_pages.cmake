# SPDX-License-Identifier: Apache-2.0
# cmake -D PROGRAM=ballast -D OUTPUT=DIR -P man_pages.cmake: DIR/ballast.1 and a page per command, as the program prints them.
execute_process(COMMAND ${PROGRAM} help --complete "" OUTPUT_VARIABLE lines COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]+" lines "${lines}")
foreach(line ${lines})
  string(REGEX REPLACE "\t.*" "" command "${line}")
  execute_process(COMMAND ${PROGRAM} help --man ${command} OUTPUT_FILE ${OUTPUT}/ballast-${command}.1 COMMAND_ERROR_IS_FATAL ANY)
endforeach()
execute_process(COMMAND ${PROGRAM} help --man OUTPUT_FILE ${OUTPUT}/ballast.1 COMMAND_ERROR_IS_FATAL ANY)
