# SPDX-License-Identifier: Apache-2.0
# cmake -DPROGRAM=... -DHOW=stream|ring -DVARIANT=race|late -P expect_race.cmake: passes when ThreadSanitizer reports a data race in
# `PROGRAM HOW VARIANT`.
execute_process(COMMAND ${PROGRAM} ${HOW} ${VARIANT} RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
if(code EQUAL 0 OR NOT text MATCHES "ThreadSanitizer: data race" OR NOT text MATCHES "read_values")
  message(FATAL_ERROR "the planted race was not reported (exit code ${code}):\n${text}")
endif()
