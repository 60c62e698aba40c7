# PCRE2 for bytes: PCRE2_FOUND, PCRE2_VERSION and the target PCRE2::pcre2-8. Honours PCRE2_ROOT.
#
# Debian and Ubuntu package it without a CMake configuration file.
find_path(PCRE2_INCLUDE_DIR pcre2.h)
find_library(PCRE2_LIBRARY pcre2-8)
mark_as_advanced(PCRE2_INCLUDE_DIR PCRE2_LIBRARY)
if(PCRE2_INCLUDE_DIR AND EXISTS "${PCRE2_INCLUDE_DIR}/pcre2.h")
  file(STRINGS "${PCRE2_INCLUDE_DIR}/pcre2.h" lines REGEX "^#define PCRE2_(MAJOR|MINOR) +[0-9]+")
  string(REGEX REPLACE "#define PCRE2_[A-Z]+ +" "" lines "${lines}")
  string(REPLACE ";" "." PCRE2_VERSION "${lines}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(PCRE2 REQUIRED_VARS PCRE2_LIBRARY PCRE2_INCLUDE_DIR
                                  VERSION_VAR PCRE2_VERSION)
if(PCRE2_FOUND AND NOT TARGET PCRE2::pcre2-8)
  add_library(PCRE2::pcre2-8 UNKNOWN IMPORTED)
  set_target_properties(PCRE2::pcre2-8 PROPERTIES IMPORTED_LOCATION "${PCRE2_LIBRARY}"
                        INTERFACE_INCLUDE_DIRECTORIES "${PCRE2_INCLUDE_DIR}")
endif()
