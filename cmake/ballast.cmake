# SPDX-License-Identifier: Apache-2.0
# ballast_module(NAME SOURCES ... LINKS ...): the static library bl_NAME of the folder src/NAME, or of some of its files.
# ballast_test(NAME SOURCES ... LINKS ... [LABELS ...] [ARGS ...] [TIMEOUT s]): builds the test program NAME and adds it as a test.
# ballast_add_test(NAME COMMAND ... [LABELS ...] [TIMEOUT s] [EXHAUSTIVE]): a test that is a script, or a program that exists, in another
# way. Each test runs in the repository's root, ends with 77 when it skips, and has its folder's name as a label. Other labels:
#   thorough  not in `scripts/test`: takes long
#   slow      as well, and not with sanitizers: takes minutes
#   gpu, mpi  needs a GPU or the emulated one; needs MPI
#   tsan      only with ThreadSanitizer
# EXHAUSTIVE: with `ctest -C exhaustive` only.
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)

add_library(ballast_options INTERFACE)
set(ballast_c_options -Wall -Wextra -Wstrict-prototypes -Wmissing-prototypes -Wshadow -Wvla -Wpointer-arith -Wformat-security
  -fno-math-errno -ffp-contract=off
  $<$<C_COMPILER_ID:Clang>:-Wno-pass-failed>) # a loop that clang leaves scalar at -O1 is no error
target_compile_options(ballast_options INTERFACE "$<$<COMPILE_LANGUAGE:C>:${ballast_c_options}>")
if(BALLAST_CUDA AND NOT BALLAST_CUDA_EMULATED)
  target_compile_options(ballast_options INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:${BALLAST_CUDA_OPTIONS}>")
endif()
target_compile_definitions(ballast_options INTERFACE _GNU_SOURCE)
target_include_directories(ballast_options INTERFACE ${CMAKE_SOURCE_DIR}/src)
target_link_libraries(ballast_options INTERFACE Threads::Threads m)
ballast_harden(ballast_options)
if(BALLAST_SANITIZE)
  target_compile_options(ballast_options INTERFACE
    "$<$<COMPILE_LANGUAGE:C>:-fsanitize=${BALLAST_SANITIZE};-fno-sanitize-recover=all;-fno-omit-frame-pointer;-g>")
  target_link_options(ballast_options INTERFACE -fsanitize=${BALLAST_SANITIZE})
endif()

function(ballast_module name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINKS" ${ARGN})
  add_library(bl_${name} STATIC ${ARG_SOURCES})
  target_link_libraries(bl_${name} PUBLIC ballast_options ${ARG_LINKS})
  set_property(GLOBAL APPEND PROPERTY BALLAST_MODULES bl_${name})
endfunction()

function(ballast_add_test name)
  cmake_parse_arguments(ARG "EXHAUSTIVE" "TIMEOUT" "COMMAND;LABELS" ${ARGN})
  set(configurations)
  if(ARG_EXHAUSTIVE)
    set(configurations CONFIGURATIONS exhaustive)
  endif()
  set(is_long ${ARG_TIMEOUT})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 900) # a hang; a loaded machine and a sanitizer make the longest take minutes
  endif()
  string(REGEX REPLACE "/tests$" "" folder ${CMAKE_CURRENT_SOURCE_DIR}) # emulator/tests
  get_filename_component(room ${folder} NAME)
  add_test(NAME ${name} ${configurations} COMMAND ${ARG_COMMAND} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77 LABELS "${room};${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT})
  if(is_long OR "thorough" IN_LIST ARG_LABELS OR "slow" IN_LIST ARG_LABELS)
    set_tests_properties(${name} PROPERTIES COST 10) # starts early, so that a short test ends last
  endif()
endfunction()

add_custom_target(gpu_programs) # what tests labeled gpu need
function(ballast_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;LINKS;LABELS;ARGS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ballast_options ${ARG_LINKS} cmocka)
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}/tests) # skip.h
  if(BALLAST_CUDA_EMULATED)
    target_compile_definitions(${name} PRIVATE BALLAST_CUDA_EMULATED)
    target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}) # emulator/emulated.h has what a test may do to the GPU
  endif()
  ballast_add_test(${name} COMMAND ${name} ${ARG_ARGS} LABELS ${ARG_LABELS} TIMEOUT ${ARG_TIMEOUT})
  if("gpu" IN_LIST ARG_LABELS)
    set_property(GLOBAL APPEND PROPERTY BALLAST_GPU_TESTS ${name}) # scripts/gpu-check reads them
    add_dependencies(gpu_programs ${name})
  endif()
endfunction()
