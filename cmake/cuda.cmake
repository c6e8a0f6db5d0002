# SPDX-License-Identifier: Apache-2.0
# CUDA: BALLAST_CUDA is auto, on or off; afterwards the variable of that name is ON or OFF, and `if(BALLAST_CUDA)` asks it.
# A .cu file exports extern "C" functions only, so that programs are linked by the C compiler and need no C++ library.
set(BALLAST_CUDA off CACHE STRING "GPUs through CUDA: on, off, or auto (on where a toolkit is installed)")
set_property(CACHE BALLAST_CUDA PROPERTY STRINGS auto on off)
if(NOT BALLAST_CUDA MATCHES "^(auto|on|off|ON|OFF)$")
  message(FATAL_ERROR "BALLAST_CUDA is ${BALLAST_CUDA}: auto, on or off")
endif()

# Where a toolkit is usually installed without being on the PATH.
if(NOT BALLAST_CUDA MATCHES "^(off|OFF)$" AND NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(BALLAST_NVCC nvcc PATHS /usr/local/cuda/bin)
  mark_as_advanced(BALLAST_NVCC)
  if(BALLAST_NVCC)
    set(CMAKE_CUDA_COMPILER ${BALLAST_NVCC})
  endif()
endif()

set(ballast_cuda OFF)
if(NOT BALLAST_CUDA MATCHES "^(off|OFF)$")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(ballast_cuda ON)
  elseif(BALLAST_CUDA MATCHES "^(on|ON)$")
    message(FATAL_ERROR "BALLAST_CUDA is on and there is no CUDA compiler (set CUDACXX or CMAKE_CUDA_COMPILER to nvcc)")
  endif()
endif()
set(BALLAST_CUDA ${ballast_cuda})

if(BALLAST_CUDA)
  # Ampere; Hopper with its own instructions; and its intermediate code for what comes later.
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90a-real 90-virtual)
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit 12.9 REQUIRED) # cuBLASLt's row and block scales for FP8
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)        # a module that needs it links CUDA::cudart_static
  set(CMAKE_CUDA_IMPLICIT_LINK_LIBRARIES "") # of the host compiler: the C++ library, which nothing here uses
  set(CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES "")
  set(BALLAST_CUDA_OPTIONS --Werror=all-warnings -Xcompiler=-Wall,-Wextra,-Werror,-fno-threadsafe-statics,-fno-exceptions,-fno-rtti)
endif()

# Every program below `folder` is linked by the C compiler, whatever its libraries were written in.
function(ballast_link_with_c folder)
  get_property(targets DIRECTORY ${folder} PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target ${targets})
    get_target_property(type ${target} TYPE)
    if(type STREQUAL EXECUTABLE)
      set_target_properties(${target} PROPERTIES LINKER_LANGUAGE C)
    endif()
  endforeach()
  get_property(folders DIRECTORY ${folder} PROPERTY SUBDIRECTORIES)
  foreach(below ${folders})
    ballast_link_with_c(${below})
  endforeach()
endfunction()
