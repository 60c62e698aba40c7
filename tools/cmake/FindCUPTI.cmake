# CUPTI: CUPTI_FOUND, CUPTI_VERSION (major version of the CUDA toolkit it is from), CUPTI_INCLUDE_DIR
# and CUPTI_LIBRARY. Nothing links it: a profile loads it. Honours CUPTI_ROOT.
find_package(CUDAToolkit QUIET)
set(cupti_hints ${CUDAToolkit_INCLUDE_DIRS} "${CUDAToolkit_LIBRARY_ROOT}/extras/CUPTI/include")
find_path(CUPTI_INCLUDE_DIR cupti.h HINTS ${cupti_hints})
find_library(CUPTI_LIBRARY cupti HINTS ${CUDAToolkit_LIBRARY_DIR}
             "${CUDAToolkit_LIBRARY_ROOT}/extras/CUPTI/lib64" PATH_SUFFIXES lib64 lib)
mark_as_advanced(CUPTI_INCLUDE_DIR CUPTI_LIBRARY)
if(CUPTI_INCLUDE_DIR)
  set(CUPTI_VERSION "${CUDAToolkit_VERSION}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CUPTI REQUIRED_VARS CUPTI_LIBRARY CUPTI_INCLUDE_DIR
                                  VERSION_VAR CUPTI_VERSION)
