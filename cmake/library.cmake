# SPDX-License-Identifier: Apache-2.0
# libballast, static and shared: the LoRA linear layer, the FP8 formats, the pager, devices and communicators, without the trainer; and libballast_session, shared,
# with it.
# Headers keep their folders under include/ballast; pkg-config files and a CMake package name the libraries a program must link.
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
add_library(ballast::ballast_static ALIAS libballast)

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

# *out: the headers, and what they include, directly or not.
function(ballast_headers out)
  set(found)
  set(pending ${ARGN})
  while(pending)
    list(POP_FRONT pending header)
    list(APPEND found ${header})
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS src/${header})
    file(STRINGS src/${header} included REGEX "^#include \"")
    list(TRANSFORM included REPLACE "^#include \"(.*)\"$" "\\1")
    list(APPEND pending ${included})
    list(REMOVE_DUPLICATES pending)
    list(REMOVE_ITEM pending ${found})
  endwhile()
  set(${out} ${found} PARENT_SCOPE)
endfunction()

# The installed headers: ballast.h, ballast_ops.h and, of libballast_session, ballast_session.h.
ballast_headers(library_headers ballast.h ballast_ops.h)
ballast_headers(session_headers ballast_session.h)
set(installed_headers ${library_headers} ${session_headers})
list(REMOVE_DUPLICATES installed_headers)
foreach(header ${installed_headers})
  get_filename_component(folder ${header} DIRECTORY)
  install(FILES src/${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ballast/${folder})
endforeach()
install(TARGETS libballast DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS ballast DESTINATION ${CMAKE_INSTALL_BINDIR})

# A shared library of the functions that the headers mark BL_API, as BALLAST_MAJOR.MINOR, and what they need of the linked archives.
function(ballast_shared target name headers)
  set(public_symbols ${CMAKE_BINARY_DIR}/${name}_symbols.txt) # "-Wl,-u,NAME" for each
  set(version_script ${CMAKE_BINARY_DIR}/lib${name}.map)
  list(TRANSFORM headers PREPEND ${CMAKE_SOURCE_DIR}/src/)
  add_custom_command(OUTPUT ${public_symbols} ${version_script} DEPENDS ${headers} ${CMAKE_SOURCE_DIR}/cmake/public_symbols.cmake
    COMMAND ${CMAKE_COMMAND} -D "HEADERS=${headers}" -D OUTPUT=${public_symbols} -D MAP=${version_script} -D VERSION=${BALLAST_SOVERSION}
      -P ${CMAKE_SOURCE_DIR}/cmake/public_symbols.cmake
    COMMENT "Public symbols" VERBATIM)
  add_library(${target} SHARED $<TARGET_OBJECTS:bl_build_id> ${public_symbols})
  target_link_options(${target} PRIVATE @${public_symbols} LINKER:-z,defs,--as-needed,--version-script,${version_script})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${name} LINKER_LANGUAGE C LINK_DEPENDS ${public_symbols}
    VERSION ${PROJECT_VERSION} SOVERSION ${BALLAST_SOVERSION})
  target_link_libraries(${target} PRIVATE ${ARGN})
  install(TARGETS ${target} DESTINATION ${CMAKE_INSTALL_LIBDIR})
endfunction()

# libballast.so: of the archive, what the public functions need (the launcher and its MPI are not part of it). libballast_session.so: with
# the trainer, and what that links. Sanitizers and the emulated GPU are for tests only.
set(BALLAST_SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}) # before 1.0 a minor version may change functions
foreach(module options store tokenizer jinja chat data arch model config trained plan convert train)
  set_target_properties(bl_${module} PROPERTIES POSITION_INDEPENDENT_CODE ON)
endforeach()
if(NOT BALLAST_SANITIZE AND NOT BALLAST_CUDA_EMULATED)
  list(TRANSFORM library_modules PREPEND bl_ OUTPUT_VARIABLE library_archives)
  ballast_shared(libballast_shared ballast "${library_headers}" libballast ${library_archives})
  add_library(ballast::ballast ALIAS libballast_shared)
  ballast_shared(libballast_session_shared ballast_session "${session_headers}" bl_train)
endif()

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
# ballast.pc: the shared library; ballast-static.pc: the archive, with all that it links.
foreach(name ballast ballast-static)
  set(BALLAST_PC_LIBS "-lballast")
  set(BALLAST_PC_LIBS_PRIVATE "${BALLAST_LINK_LIBRARIES} ${BALLAST_LINK_LIBRARIES_ALL} -pthread -lm")
  if(name STREQUAL "ballast-static")
    set(BALLAST_PC_LIBS "-l:libballast.a ${BALLAST_LINK_LIBRARIES} -pthread -lm")
    set(BALLAST_PC_LIBS_PRIVATE "${BALLAST_LINK_LIBRARIES_ALL}")
  endif()
  configure_file(cmake/ballast.pc.in ${CMAKE_BINARY_DIR}/${name}.pc @ONLY)
  install(FILES ${CMAKE_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()

configure_package_config_file(cmake/ballast-config.cmake.in ${CMAKE_BINARY_DIR}/ballast-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/ballast PATH_VARS CMAKE_INSTALL_INCLUDEDIR CMAKE_INSTALL_LIBDIR)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/ballast-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/ballast-config.cmake ${CMAKE_BINARY_DIR}/ballast-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/ballast)
