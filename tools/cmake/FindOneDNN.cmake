# oneDNN: OneDNN_FOUND, OneDNN_VERSION and the target OneDNN::dnnl. Honours OneDNN_ROOT.
#
# Debian's own dnnl-config.cmake insists on OpenCL, which Mixtape does not use.
find_path(OneDNN_INCLUDE_DIR dnnl.hpp)
find_library(OneDNN_LIBRARY dnnl)
mark_as_advanced(OneDNN_INCLUDE_DIR OneDNN_LIBRARY)
foreach(header IN ITEMS oneapi/dnnl/dnnl_version.h dnnl_version.h)
  if(OneDNN_INCLUDE_DIR AND EXISTS "${OneDNN_INCLUDE_DIR}/${header}" AND NOT OneDNN_VERSION)
    file(STRINGS "${OneDNN_INCLUDE_DIR}/${header}" lines
         REGEX "^#define DNNL_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+")
    string(REGEX REPLACE "[^0-9;]" "" lines "${lines}")
    string(REPLACE ";" "." OneDNN_VERSION "${lines}")
  endif()
endforeach()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(OneDNN REQUIRED_VARS OneDNN_LIBRARY OneDNN_INCLUDE_DIR
                                  VERSION_VAR OneDNN_VERSION)
if(OneDNN_FOUND AND NOT TARGET OneDNN::dnnl)
  add_library(OneDNN::dnnl UNKNOWN IMPORTED)
  set_target_properties(OneDNN::dnnl PROPERTIES IMPORTED_LOCATION "${OneDNN_LIBRARY}"
                        INTERFACE_INCLUDE_DIRECTORIES "${OneDNN_INCLUDE_DIR}")
endif()
