# The header-only cuDNN frontend: CUDNNFrontend_FOUND, CUDNNFrontend_VERSION and
# CUDNNFrontend_INCLUDE_DIR.
#
# Looks in MIXTAPE_CUDNN_FRONTEND_DIR, then in the repository's .venv, in system folders, and last
# where python3 has the wheel nvidia-cudnn-frontend. Only the library's own files include it.
set(candidates "${MIXTAPE_CUDNN_FRONTEND_DIR}")
file(GLOB venv "${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/include")
list(APPEND candidates ${venv})
find_path(CUDNNFrontend_INCLUDE_DIR cudnn_frontend.h HINTS ${candidates})
if(NOT CUDNNFrontend_INCLUDE_DIR)
  find_program(MIXTAPE_PYTHON3 python3)
  if(MIXTAPE_PYTHON3)
    execute_process(
      COMMAND "${MIXTAPE_PYTHON3}" -c
              "from importlib.metadata import files
print(*[f.locate().parent for f in files('nvidia-cudnn-frontend') if f.name == 'cudnn_frontend.h'])"
      OUTPUT_VARIABLE wheel OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_path(CUDNNFrontend_INCLUDE_DIR cudnn_frontend.h HINTS "${wheel}")
  endif()
  mark_as_advanced(MIXTAPE_PYTHON3)
endif()
mark_as_advanced(CUDNNFrontend_INCLUDE_DIR)
if(EXISTS "${CUDNNFrontend_INCLUDE_DIR}/cudnn_frontend_version.h")
  file(STRINGS "${CUDNNFrontend_INCLUDE_DIR}/cudnn_frontend_version.h" lines
       REGEX "^#define CUDNN_FRONTEND_(MAJOR|MINOR|PATCH)_VERSION +[0-9]+")
  string(REGEX REPLACE "[^0-9;]" "" lines "${lines}")
  string(REPLACE ";" "." CUDNNFrontend_VERSION "${lines}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CUDNNFrontend REQUIRED_VARS CUDNNFrontend_INCLUDE_DIR
                                  VERSION_VAR CUDNNFrontend_VERSION)
