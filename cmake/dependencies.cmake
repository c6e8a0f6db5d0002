# SPDX-License-Identifier: Apache-2.0
# The libraries that programs link, in one list, and the software bill of materials (CycloneDX 1.5) made of it. Modules link
# PkgConfig::PREFIX. A minimum version is the oldest one that is tested: Debian 12's. The build downloads nothing.

set_property(GLOBAL PROPERTY BALLAST_COMPONENTS "")

# ballast_component(NAME VERSION LICENSE): a line of the bill of materials. Version and license as their package states them.
function(ballast_component name version license)
  set(purl "pkg:generic/${name}")
  if(version)
    string(APPEND purl "@${version}")
  endif()
  set_property(GLOBAL APPEND PROPERTY BALLAST_COMPONENTS
    "{\"type\": \"library\", \"name\": \"${name}\", \"version\": \"${version}\", \"licenses\": [{\"expression\": \"${license}\"}], \"purl\": \"${purl}\"}")
endfunction()

# ballast_dependency(PREFIX MODULE MINIMUM LICENSE [OPTIONAL]): PkgConfig::PREFIX, by pkg-config.
macro(ballast_dependency prefix module minimum license)
  set(required REQUIRED)
  if("${ARGN}" STREQUAL "OPTIONAL")
    set(required "")
  endif()
  pkg_check_modules(${prefix} ${required} IMPORTED_TARGET ${module}>=${minimum})
  if(${prefix}_FOUND)
    ballast_component(${module} "${${prefix}_VERSION}" "${license}")
  endif()
endmacro()

ballast_dependency(JANSSON jansson 2.14 MIT)
ballast_dependency(XXHASH libxxhash 0.8.1 BSD-2-Clause)
ballast_dependency(ZLIB zlib 1.2.13 Zlib)
ballast_dependency(ZSTD libzstd 1.5.4 "BSD-3-Clause OR GPL-2.0-only")
ballast_dependency(YAML yaml-0.1 0.2.5 MIT)
ballast_dependency(PCRE2 libpcre2-8 10.42 BSD-3-Clause)
ballast_dependency(UTF8PROC libutf8proc 2.6 MIT)
ballast_dependency(SODIUM libsodium 1.0.18 ISC)
ballast_dependency(HWLOC hwloc 2.9 BSD-3-Clause)
ballast_dependency(URING liburing 2.3 "LGPL-2.1-or-later OR MIT" OPTIONAL)

# ballast_write_bill(FILE): what this build links, after all modules have named theirs.
function(ballast_write_bill file)
  get_property(components GLOBAL PROPERTY BALLAST_COMPONENTS)
  list(JOIN components ",\n    " components)
  file(WRITE ${file} "{
  \"bomFormat\": \"CycloneDX\",
  \"specVersion\": \"1.5\",
  \"version\": 1,
  \"metadata\": {\"component\": {\"type\": \"application\", \"name\": \"ballast\", \"version\": \"${PROJECT_VERSION}\", \"licenses\": [{\"expression\": \"Apache-2.0\"}]}},
  \"components\": [
    ${components}
  ]
}
")
endfunction()
