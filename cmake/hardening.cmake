# SPDX-License-Identifier: Apache-2.0
# ballast_harden(TARGET): compiler and linker options against the exploitation of memory errors, for all that links the interface TARGET.
# Sanitizers find the same errors sooner and bring their own runtime: their builds leave FORTIFY and the stack checks out.
# tests/install/test_hardening holds the result.
include(CheckCCompilerFlag)
include(CheckPIESupported)
check_pie_supported(LANGUAGES C)

function(ballast_harden target)
  # Position-independent code for programs; modules of libballast are compiled with -fPIC.
  target_compile_options(${target} INTERFACE
    "$<$<AND:$<COMPILE_LANGUAGE:C>,$<NOT:$<BOOL:$<TARGET_PROPERTY:POSITION_INDEPENDENT_CODE>>>>:-fPIE>")
  set(type $<TARGET_PROPERTY:TYPE>)
  target_link_options(${target} INTERFACE
    "$<$<IN_LIST:${type},EXECUTABLE;SHARED_LIBRARY>:LINKER:-z,relro;LINKER:-z,now;LINKER:-z,noexecstack>"
    "$<$<STREQUAL:${type},EXECUTABLE>:-pie>")
  if(BALLAST_SANITIZE)
    return()
  endif()
  set(options -fstack-protector-strong)
  foreach(option -fstack-clash-protection -fcf-protection)
    string(MAKE_C_IDENTIFIER "ballast_has${option}" has)
    check_c_compiler_flag(${option} ${has})
    if(${has})
      list(APPEND options ${option})
    endif()
  endforeach()
  # FORTIFY needs an optimizing build; some distributions define it already.
  target_compile_options(${target} INTERFACE
    "$<$<COMPILE_LANGUAGE:C>:${options}>"
    "$<$<AND:$<COMPILE_LANGUAGE:C>,$<NOT:$<CONFIG:Debug>>>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=3>")
endfunction()
