# SPDX-License-Identifier: Apache-2.0
# NCCL's header. Only that: the library is looked for when the program runs (src/comm/nccl/library.h, which has the reason for the version).
set(BALLAST_NCCL_HEADER_MIN 2.28)

# ballast_check_nccl_header(FOLDER OUT): OUT is whether FOLDER's nccl.h serves. Where there is none, FOLDER is empty or ends in NOTFOUND; then,
# and where it is too old, a warning says what the build lacks and how to have it.
function(ballast_check_nccl_header folder out)
  set(remedy "This build uses one GPU of a host, however many there are: ranks on several need nccl.h ${BALLAST_NCCL_HEADER_MIN} or newer, of the package libnccl-dev (NVIDIA's repository) or nvidia-nccl-cu13 (pip), with -DBALLAST_NCCL_INCLUDE=FOLDER where it is not found (docs/install.md)")
  set(${out} FALSE PARENT_SCOPE)
  if(NOT folder)
    message(WARNING "No nccl.h. ${remedy}")
    return()
  endif()
  set(version "")
  if(EXISTS ${folder}/nccl.h)
    foreach(part MAJOR MINOR)
      file(STRINGS ${folder}/nccl.h line REGEX "^#define[ \t]+NCCL_${part}[ \t]+[0-9]+" LIMIT_COUNT 1)
      string(REGEX REPLACE "^#define[ \t]+NCCL_${part}[ \t]+([0-9]+).*" "\\1" number "${line}")
      list(APPEND version ${number})
    endforeach()
  endif()
  list(JOIN version "." version)
  if(version VERSION_LESS BALLAST_NCCL_HEADER_MIN)
    message(WARNING "${folder}/nccl.h is NCCL ${version}. ${remedy}")
    return()
  endif()
  set(${out} TRUE PARENT_SCOPE)
endfunction()
