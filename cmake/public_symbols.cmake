# SPDX-License-Identifier: Apache-2.0
# cmake -D HEADERS=a.h;b.h -D OUTPUT=file -P public_symbols.cmake: linker options that keep every function that the headers mark BL_API.
foreach(header ${HEADERS})
  file(READ ${header} text)
  string(REGEX MATCHALL "\nBL_API [^;(]*\\(" declarations "${text}")
  foreach(declaration ${declarations})
    string(REGEX MATCH "[a-z0-9_]+\\($" name "${declaration}")
    string(REPLACE "(" "" name "${name}")
    string(APPEND options "-Wl,-u,${name}\n")
  endforeach()
endforeach()
file(WRITE ${OUTPUT} "${options}")
