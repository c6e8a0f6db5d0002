# SPDX-License-Identifier: Apache-2.0
# The libraries that programs link, in one list, and the software bill of materials (SPDX 2.3) made of it. Modules link
# PkgConfig::PREFIX. A minimum version is the oldest one that is tested: Debian 12's. The build downloads nothing.

set_property(GLOBAL PROPERTY BALLAST_COMPONENTS "")

# ballast_component(NAME VERSION LICENSE): a package of the bill of materials. Version and license as their package states them.
function(ballast_component name version license)
  string(REGEX REPLACE "[^A-Za-z0-9.-]" "-" id ${name})
  set_property(GLOBAL APPEND PROPERTY BALLAST_COMPONENTS
    "{\"SPDXID\": \"SPDXRef-${id}\", \"name\": \"${name}\", \"versionInfo\": \"${version}\", \"licenseDeclared\": \"${license}\", \"downloadLocation\": \"NOASSERTION\", \"filesAnalyzed\": false}")
  set_property(GLOBAL APPEND PROPERTY BALLAST_COMPONENT_LINKS
    "{\"spdxElementId\": \"SPDXRef-ballast\", \"relationshipType\": \"DYNAMIC_LINK\", \"relatedSpdxElement\": \"SPDXRef-${id}\"}")
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

# ballast_write_bill(FILE): what this build links, after all modules have named theirs. The time in it is SOURCE_DATE_EPOCH where that is set.
function(ballast_write_bill file)
  get_property(components GLOBAL PROPERTY BALLAST_COMPONENTS)
  get_property(links GLOBAL PROPERTY BALLAST_COMPONENT_LINKS)
  list(JOIN components ",\n    " components)
  list(JOIN links ",\n    " links)
  string(SHA256 hash "${components}")
  string(TIMESTAMP now UTC)
  file(WRITE ${file} "{
  \"spdxVersion\": \"SPDX-2.3\",
  \"dataLicense\": \"CC0-1.0\",
  \"SPDXID\": \"SPDXRef-DOCUMENT\",
  \"name\": \"ballast-${PROJECT_VERSION}\",
  \"documentNamespace\": \"https://spdx.org/spdxdocs/ballast-${PROJECT_VERSION}-${hash}\",
  \"creationInfo\": {\"created\": \"${now}\", \"creators\": [\"Tool: ballast-cmake\"]},
  \"packages\": [
    {\"SPDXID\": \"SPDXRef-ballast\", \"name\": \"ballast\", \"versionInfo\": \"${PROJECT_VERSION}\", \"licenseDeclared\": \"Apache-2.0\", \"downloadLocation\": \"NOASSERTION\", \"filesAnalyzed\": false},
    ${components}
  ],
  \"relationships\": [
    {\"spdxElementId\": \"SPDXRef-DOCUMENT\", \"relationshipType\": \"DESCRIBES\", \"relatedSpdxElement\": \"SPDXRef-ballast\"},
    ${links}
  ]
}
")
endfunction()
