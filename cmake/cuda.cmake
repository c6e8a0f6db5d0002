# SPDX-License-Identifier: Apache-2.0
# CUDA: BALLAST_CUDA is auto, on, off or emulated; afterwards the variable of that name is ON or OFF, and `if(BALLAST_CUDA)` asks it.
# Emulated, it is ON and so is BALLAST_CUDA_EMULATED: a C++ compiler takes the .cu files, and emulator/ is the runtime and cuBLASLt.
# Modules link the targets ballast_cudart, ballast_cublaslt and ballast_nccl, and name their kernels by ballast_cuda_sources.
# A .cu file exports extern "C" functions only, so that programs are linked by the C compiler and need no C++ library.
set(BALLAST_CUDA off CACHE STRING "GPUs through CUDA: on, off, auto (on where a toolkit is installed), or emulated (on the CPU, for tests)")
set_property(CACHE BALLAST_CUDA PROPERTY STRINGS auto on off emulated)
if(NOT BALLAST_CUDA MATCHES "^(auto|on|off|emulated|ON|OFF)$")
  message(FATAL_ERROR "BALLAST_CUDA is ${BALLAST_CUDA}: auto, on, off or emulated")
endif()
set(BALLAST_CUDA_EMULATED OFF)
if(BALLAST_CUDA STREQUAL "emulated")
  set(BALLAST_CUDA_EMULATED ON)
endif()

# Where a toolkit is usually installed without being on the PATH.
if(NOT BALLAST_CUDA MATCHES "^(off|OFF|emulated)$" AND NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(BALLAST_NVCC nvcc PATHS /usr/local/cuda/bin)
  mark_as_advanced(BALLAST_NVCC)
  if(BALLAST_NVCC)
    set(CMAKE_CUDA_COMPILER ${BALLAST_NVCC})
  endif()
endif()

set(ballast_cuda ${BALLAST_CUDA_EMULATED})
if(NOT BALLAST_CUDA MATCHES "^(off|OFF|emulated)$")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(ballast_cuda ON)
  elseif(BALLAST_CUDA MATCHES "^(on|ON)$")
    message(FATAL_ERROR "BALLAST_CUDA is on and there is no CUDA compiler (set CUDACXX or CMAKE_CUDA_COMPILER to nvcc)")
  endif()
endif()
set(BALLAST_CUDA ${ballast_cuda})

if(BALLAST_CUDA_EMULATED)
  enable_language(CXX)
  set(CMAKE_CXX_STANDARD 17)
  set(CMAKE_CXX_STANDARD_REQUIRED ON)
  set(CMAKE_CXX_EXTENSIONS OFF)
  add_library(ballast_cudart INTERFACE)
  target_include_directories(ballast_cudart INTERFACE ${CMAKE_SOURCE_DIR}/emulator/cuda) # in the place of the toolkit's headers
  target_link_libraries(ballast_cudart INTERFACE emulated_cudart)
  add_library(ballast_cublaslt INTERFACE)
  target_link_libraries(ballast_cublaslt INTERFACE ballast_cudart emulated_cublaslt)
  add_library(ballast_nccl INTERFACE)
  target_link_libraries(ballast_nccl INTERFACE ballast_cudart emulated_nccl)
  target_link_options(ballast_nccl INTERFACE -Wl,--wrap=dlopen,--wrap=dlsym,--wrap=dlclose,-u,__wrap_dlopen) # emulator/nccl_symbols.c answers
elseif(BALLAST_CUDA)
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
  set(BALLAST_CUDA_OPTIONS -Xcompiler=-Wall,-Wextra$<$<BOOL:${BALLAST_WERROR}>:,-Werror>,-fno-threadsafe-statics,-fno-exceptions,-fno-rtti)
  add_library(ballast_cudart INTERFACE)
  target_link_libraries(ballast_cudart INTERFACE CUDA::cudart_static)
  add_library(ballast_cublaslt INTERFACE)
  target_link_libraries(ballast_cublaslt INTERFACE CUDA::cublasLt)
  find_path(BALLAST_NCCL_INCLUDE nccl.h PATHS ${CUDAToolkit_INCLUDE_DIRS})
  mark_as_advanced(BALLAST_NCCL_INCLUDE)
  include(${CMAKE_CURRENT_LIST_DIR}/nccl.cmake)
  ballast_check_nccl_header("${BALLAST_NCCL_INCLUDE}" serves)
  if(serves)
    add_library(ballast_nccl INTERFACE)
    target_include_directories(ballast_nccl SYSTEM INTERFACE ${BALLAST_NCCL_INCLUDE})
    target_link_libraries(ballast_nccl INTERFACE ballast_cudart ${CMAKE_DL_LIBS})
  endif()
endif()

# ballast_cuda_sources(TARGET FILE...): kernels of a module. The arithmetic in element.h rounds where C rounds: no fused multiply-add.
function(ballast_cuda_sources target)
  target_sources(${target} PRIVATE ${ARGN})
  foreach(source ${ARGN})
    set_property(GLOBAL APPEND PROPERTY BALLAST_CUDA_SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/${source})
  endforeach()
  if(NOT BALLAST_CUDA_EMULATED)
    set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS --fmad=false)
    return()
  endif()
  set(emulate ${CMAKE_SOURCE_DIR}/emulator)
  set(options ${BALLAST_EMULATED_OPTIONS})
  if(BALLAST_SANITIZE MATCHES thread) # which kernels reach through emulator/hooks.cpp
    list(APPEND options -fsanitize=thread -fno-tree-sra -g1)
  endif()
  set_source_files_properties(${ARGN} PROPERTIES LANGUAGE CXX
    OBJECT_DEPENDS "${emulate}/emulate.h;${emulate}/instrument.h" INCLUDE_DIRECTORIES ${emulate}
    COMPILE_OPTIONS "-include;${emulate}/emulate.h;${options}")
endfunction()
# A GPU traps on a wide access that is not aligned; x86 may let it pass. These traps need no sanitizer's runtime.
set(BALLAST_EMULATED_OPTIONS -Wall -Wextra -Wno-unknown-pragmas -O2 -ffp-contract=off -U_FORTIFY_SOURCE
  -fsanitize=alignment,bounds,shift,signed-integer-overflow -fsanitize-undefined-trap-on-error)

# ballast_checked_kernels(NAME ARCH FILE...): objects of .cu files compiled for the compute capability ARCH (80 or 90), which call the emulator
# before each access to memory; it ends the program on a race (emulator/README.md). Accesses of 16 bytes stay whole (-fno-tree-sra), so
# that conflicts of banks are those of nvcc's code.
function(ballast_checked_kernels name arch)
  set(emulate ${CMAKE_SOURCE_DIR}/emulator)
  add_library(${name} OBJECT ${ARGN})
  set_source_files_properties(${ARGN} PROPERTIES LANGUAGE CXX OBJECT_DEPENDS "${emulate}/emulate.h;${emulate}/instrument.h")
  target_include_directories(${name} PRIVATE ${emulate} ${CMAKE_SOURCE_DIR}/src)
  target_compile_definitions(${name} PRIVATE _GNU_SOURCE __CUDA_ARCH__=${arch}0)
  target_compile_options(${name} PRIVATE -include ${emulate}/emulate.h ${BALLAST_EMULATED_OPTIONS} -fsanitize=thread -fno-tree-sra -g1)
endfunction()

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
