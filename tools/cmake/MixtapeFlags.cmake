# Compile options, and what the library target is made of.
#
# mixtape_flags carries what the library, its tests, examples and tools share: it is never exported,
# so a consumer keeps its own options.

add_library(mixtape_flags INTERFACE)
target_compile_features(mixtape_flags INTERFACE cxx_std_20)

set(host_options -Wall -Wextra)
if(MIXTAPE_WERROR)
  list(APPEND host_options -Werror)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC bug 105651: "text" + std::string warns of an overlapping copy from -O2 on.
  list(APPEND host_options -Wno-restrict)
endif()
# errno and floating-point traps are never read; without them sqrt and selections vectorise. Results
# stay IEEE: no -ffast-math.
list(APPEND host_options -fno-math-errno -fno-trapping-math)

set(arch_options "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(arch_options -march=x86-64-v3)
endif()
if(MIXTAPE_NATIVE)
  set(arch_options -march=native)
endif()

set(sanitizer_options "")
if(MIXTAPE_SANITIZE STREQUAL "address+undefined")
  set(sanitizer_options -fsanitize=address,undefined -fno-sanitize-recover=all)
elseif(MIXTAPE_SANITIZE STREQUAL "thread")
  set(sanitizer_options -fsanitize=thread)
endif()
if(sanitizer_options)
  list(APPEND host_options ${sanitizer_options} -fno-omit-frame-pointer -g1)
  target_link_options(mixtape_flags INTERFACE ${sanitizer_options})
endif()

# A program that never reaches a backend does not load its libraries.
target_link_options(mixtape_flags INTERFACE -Wl,--as-needed)
target_compile_options(mixtape_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:${host_options};${arch_options}>")
if(MIXTAPE_WITH_CUDA)
  # Vector options stay off nvcc's host pass: it does not need them and cannot parse every
  # intrinsic header.
  string(REPLACE ";" "," nvcc_host_options "${host_options}")
  set(cuda_options "-Xcompiler=${nvcc_host_options}" --expt-relaxed-constexpr --extended-lambda)
  if(MIXTAPE_WERROR)
    list(APPEND cuda_options -Werror=all-warnings)
  endif()
  target_compile_options(mixtape_flags INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:${cuda_options}>")
endif()

foreach(name IN ITEMS CUDA CUDNN NCCL MPI ONEDNN)
  if(MIXTAPE_WITH_${name})
    target_compile_definitions(mixtape_flags INTERFACE MIXTAPE_WITH_${name})
  endif()
endforeach()

# Every program that links the library may use Eigen too, with other vector options: renaming the
# namespace keeps the linker from merging the two sets of inline functions.
target_compile_definitions(mixtape_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:Eigen=MixtapeEigen>")

# Output settings, include paths and dependencies of the one library target.
function(mixtape_configure_library)
  set_target_properties(mixtape PROPERTIES
    VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
    POSITION_INDEPENDENT_CODE ON
    CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF
    CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF)
  target_compile_features(mixtape PUBLIC cxx_std_20)
  if(MIXTAPE_WITH_CUDA)
    # kernels/kernel.h: a user's op that calls a kernel must see the same pair of functions.
    target_compile_definitions(mixtape INTERFACE MIXTAPE_WITH_CUDA)
  endif()
  target_include_directories(mixtape PUBLIC
    "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>"
    "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/engine/public>"
    "$<INSTALL_INTERFACE:include/mixtape>")
  target_link_libraries(mixtape PRIVATE "$<BUILD_INTERFACE:mixtape_flags>"
    "$<BUILD_INTERFACE:Eigen3::Eigen>" "$<BUILD_INTERFACE:nlohmann_json::nlohmann_json>"
    Threads::Threads ZLIB::ZLIB PCRE2::pcre2-8)
  if(MIXTAPE_WITH_CUDA)
    # A shared Mixtape and its users must see one CUDA runtime: its last error is per copy.
    if(BUILD_SHARED_LIBS)
      set_target_properties(mixtape PROPERTIES CUDA_RUNTIME_LIBRARY Shared)
      target_link_libraries(mixtape PRIVATE CUDA::cudart CUDA::cublasLt)
    else()
      set_target_properties(mixtape PROPERTIES CUDA_RUNTIME_LIBRARY Static)
      target_link_libraries(mixtape PRIVATE CUDA::cudart_static CUDA::cublasLt)
    endif()
  endif()
  if(MIXTAPE_WITH_CUDNN)
    target_link_libraries(mixtape PRIVATE CUDNN::cudnn)
  endif()
  if(MIXTAPE_WITH_NCCL)
    target_link_libraries(mixtape PRIVATE NCCL::nccl)
  endif()
  if(MIXTAPE_WITH_MPI)
    target_link_libraries(mixtape PRIVATE MPI::MPI_CXX)
  endif()
  if(MIXTAPE_WITH_ONEDNN)
    target_link_libraries(mixtape PRIVATE OneDNN::dnnl)
  endif()
  foreach(format IN ITEMS JPEG PNG)
    if(MIXTAPE_WITH_${format})
      target_link_libraries(mixtape PRIVATE ${format}::${format})
    endif()
  endforeach()
endfunction()
