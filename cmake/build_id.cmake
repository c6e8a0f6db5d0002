# SPDX-License-Identifier: Apache-2.0
# cmake -D ROOT=... -D FLAGS=... -D OUTPUT=FILE.c -P build_id.cmake: writes bl_build_id (src/base/build_id.h).
#
# The id is a SHA-256 of the files below src/ and cmake/ that a build reads, by relative path, and of FLAGS: the compiler, its version and
# its options. The directory, the time and git are not in it. FILE.c is left alone when it has the id already.
file(GLOB_RECURSE files RELATIVE ${ROOT} ${ROOT}/src/*.c ${ROOT}/src/*.h ${ROOT}/src/*.cu ${ROOT}/src/*.cuh ${ROOT}/src/*/CMakeLists.txt
  ${ROOT}/cmake/*.cmake)
list(SORT files)
set(text "${FLAGS}")
foreach(file ${files})
  file(SHA256 ${ROOT}/${file} hash)
  string(APPEND text "\n${file} ${hash}")
endforeach()
string(SHA256 id "${text}")
string(SUBSTRING ${id} 0 16 id)
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT [[
/* Made by cmake/build_id.cmake. */
#include "base/build_id.h"

const char *bl_build_id(void)
{
    return "@id@";
}
]] @ONLY)
