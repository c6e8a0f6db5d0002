# SPDX-License-Identifier: Apache-2.0
# cmake -D HEADERS=a.h;b.h -D OUTPUT=file -D MAP=file -D VERSION=0.2 -P public_symbols.cmake: linker options that keep every function that
# the headers mark BL_API, and a version script that exports them as BALLAST_0.2 and nothing else.
foreach(header ${HEADERS})
  file(READ ${header} text)
  string(REGEX MATCHALL "\nBL_API [^;(]*\\(" declarations "${text}")
  foreach(declaration ${declarations})
    string(REGEX MATCH "[a-z0-9_]+\\($" name "${declaration}")
    string(REPLACE "(" "" name "${name}")
    string(APPEND options "-Wl,-u,${name}\n")
    string(APPEND names "    ${name};\n")
  endforeach()
endforeach()
file(WRITE ${OUTPUT} "${options}")
file(WRITE ${MAP} "BALLAST_${VERSION} {\n  global:\n${names}  local:\n    *;\n};\n")
