# SPDX-License-Identifier: Apache-2.0
# ballast_one_program(NAME PROGRAM ...): the executable NAME, which is all those programs (packaging/one_program.c). The objects of each
# become one object whose only global symbol is its main, so that two programs may have functions of one name.
function(ballast_one_program name)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/one_program)
  set(objects)
  set(libraries)
  set(table "")
  foreach(program ${ARGN})
    set(object ${folder}/${program}.o)
    add_custom_command(OUTPUT ${object} DEPENDS $<TARGET_OBJECTS:${program}> COMMAND_EXPAND_LISTS VERBATIM
      COMMAND ${CMAKE_LINKER} -r -o ${object} $<TARGET_OBJECTS:${program}>
      COMMAND ${CMAKE_OBJCOPY} --redefine-sym main=main_${program} ${object}
      COMMAND ${CMAKE_OBJCOPY} --keep-global-symbol=main_${program} ${object})
    set_source_files_properties(${object} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
    list(APPEND objects ${object})
    get_target_property(linked ${program} LINK_LIBRARIES)
    list(APPEND libraries ${linked})
    string(APPEND table "PROGRAM(${program})\n")
  endforeach()
  list(REMOVE_DUPLICATES libraries)
  file(GENERATE OUTPUT ${folder}/one_program.h CONTENT "${table}")
  add_executable(${name} EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/packaging/one_program.c ${objects})
  target_include_directories(${name} PRIVATE ${folder})
  target_link_libraries(${name} PRIVATE ${libraries})
endfunction()
