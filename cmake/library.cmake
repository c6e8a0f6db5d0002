# SPDX-License-Identifier: Apache-2.0
# libballast: the LoRA linear layer, the FP8 formats, the pager, devices and communicators, without the trainer. Headers keep their
# folders under include/ballast; a pkg-config file and a CMake package name the libraries a program must link.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(library_modules base build_id safetensors io device fp8 ops comm job ring offload linear linear_paged)
set(library_objects)
set(BALLAST_LINK_LIBRARIES)
foreach(module ${library_modules})
  set_target_properties(bl_${module} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  list(APPEND library_objects $<TARGET_OBJECTS:bl_${module}>)
  get_target_property(flags bl_${module} BALLAST_LINK_FLAGS) # of the libraries that the module itself needs
  if(flags)
    string(APPEND BALLAST_LINK_LIBRARIES " ${flags}")
  endif()
endforeach()
add_library(libballast STATIC ${library_objects})
set_target_properties(libballast PROPERTIES OUTPUT_NAME ballast LINKER_LANGUAGE C)
add_library(ballast::ballast ALIAS libballast)

if(BALLAST_CUDA AND NOT BALLAST_CUDA_EMULATED)
  string(APPEND BALLAST_LINK_LIBRARIES " -L${CUDAToolkit_LIBRARY_DIR} -lcublasLt -lcudart_static -ldl -lrt")
endif()
string(STRIP "${BALLAST_LINK_LIBRARIES}" BALLAST_LINK_LIBRARIES)

# A program takes from the archive what it uses, and nothing that an installed header names needs MPI. A shared object made of the whole
# archive has the launcher in it: `pkg-config --static` adds what that needs, and the CMake package names it in any case.
set(BALLAST_LINK_LIBRARIES_ALL)
if(BALLAST_HAS_MPI)
  string(JOIN " " BALLAST_LINK_LIBRARIES_ALL ${MPI_C_LIBRARIES})
endif()

set(library_headers
  base/status.h base/sizes.h base/dtype.h base/host_device.h base/pool.h
  store/safetensors.h
  io/reader.h
  device/device.h device/staging.h device/tensor.h device/timeline.h
  fp8/fp8.h fp8/codec.h
  ops/ops.h ops/weight.h ops/matmul.h ops/gemm.h ops/norm.h ops/rope.h ops/attention.h ops/elementwise.h ops/loss_head.h
  ops/optimizer.h ops/philox.h
  comm/comm.h job/processes.h ring/gather_ring.h comm/host_memory.h comm/nccl/nccl.h
  offload/tier.h offload/arena.h offload/pages.h offload/pager.h
  linear/base.h linear/base_paged.h linear/lora_linear.h linear/prepared.h linear/apply.h
  linear/layer.h)
foreach(header ${library_headers})
  get_filename_component(folder ${header} DIRECTORY)
  install(FILES src/${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ballast/${folder})
endforeach()
install(TARGETS libballast DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS ballast DESTINATION ${CMAKE_INSTALL_BINDIR})

# Its prefix is where it lies, so that `cmake --install --prefix` and a tree that is moved are right; an absolute folder stays.
set(BALLAST_PC_PREFIX ${CMAKE_INSTALL_PREFIX})
if(NOT IS_ABSOLUTE ${CMAKE_INSTALL_LIBDIR})
  file(RELATIVE_PATH BALLAST_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
  string(REGEX REPLACE "/$" "" BALLAST_PC_PREFIX "\${pcfiledir}/${BALLAST_PC_PREFIX}")
endif()
foreach(folder INCLUDEDIR LIBDIR)
  set(BALLAST_PC_${folder} ${CMAKE_INSTALL_${folder}})
  if(NOT IS_ABSOLUTE ${CMAKE_INSTALL_${folder}})
    set(BALLAST_PC_${folder} "\${prefix}/${CMAKE_INSTALL_${folder}}")
  endif()
endforeach()
configure_file(cmake/ballast.pc.in ${CMAKE_BINARY_DIR}/ballast.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/ballast.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

configure_package_config_file(cmake/ballast-config.cmake.in ${CMAKE_BINARY_DIR}/ballast-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/ballast PATH_VARS CMAKE_INSTALL_INCLUDEDIR CMAKE_INSTALL_LIBDIR)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/ballast-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/ballast-config.cmake ${CMAKE_BINARY_DIR}/ballast-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/ballast)

# The bill of materials beside what it lists.
if(BALLAST_CUDA AND NOT BALLAST_CUDA_EMULATED)
  ballast_component(cublas "${CUDAToolkit_VERSION}" LicenseRef-NVIDIA-CUDA-EULA)
  ballast_component(cudart "${CUDAToolkit_VERSION}" LicenseRef-NVIDIA-CUDA-EULA)
endif()
ballast_write_bill(${CMAKE_BINARY_DIR}/ballast.cdx.json)
install(FILES ${CMAKE_BINARY_DIR}/ballast.cdx.json DESTINATION ${CMAKE_INSTALL_DATADIR}/ballast)
