# cmake -D WAY=install|fetch -D SOURCE=... -D BUILD=... -D CONFIG=... -D WORK=... -P consumer.cmake
#
# Configures, builds and runs tests/consumer against Mixtape. `install` uses an install tree of the
# finished build. `fetch` compiles the library again inside the consumer; with the build's own
# options and compiler cache that costs little, and without a cache it is skipped.
set(ENV{CTEST_OUTPUT_ON_FAILURE} 1)
file(REMOVE_RECURSE "${WORK}")

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# The options with which BUILD was configured.
load_cache("${BUILD}" READ_WITH_PREFIX cached_
  CMAKE_GENERATOR CMAKE_CXX_COMPILER CCACHE_PROGRAM MIXTAPE_CUDA MIXTAPE_CUDNN MIXTAPE_NCCL
  MIXTAPE_MPI MIXTAPE_ONEDNN MIXTAPE_NATIVE MIXTAPE_WERROR MIXTAPE_SANITIZE BUILD_SHARED_LIBS
  MIXTAPE_CUDNN_FRONTEND MIXTAPE_CUDNN_FRONTEND_DIR CMAKE_CUDA_ARCHITECTURES)
set(arguments -G "${cached_CMAKE_GENERATOR}" -D CMAKE_BUILD_TYPE=${CONFIG}
              -D CMAKE_CXX_COMPILER=${cached_CMAKE_CXX_COMPILER})
if(cached_MIXTAPE_SANITIZE STREQUAL "thread")
  list(APPEND arguments -D CMAKE_EXE_LINKER_FLAGS=-fsanitize=thread)
elseif(cached_MIXTAPE_SANITIZE)
  list(APPEND arguments -D CMAKE_EXE_LINKER_FLAGS=-fsanitize=address,undefined)
endif()

if(WAY STREQUAL "install")
  run("${CMAKE_COMMAND}" --install "${BUILD}" --config ${CONFIG} --prefix "${WORK}/prefix")
  list(APPEND arguments -D CMAKE_PREFIX_PATH=${WORK}/prefix)
else()
  if(NOT cached_CCACHE_PROGRAM)
    message("SKIPPED: compiling the library again takes long without ccache")
    return()
  endif()
  list(APPEND arguments -D MIXTAPE_SOURCE=${SOURCE}
       -D CMAKE_CXX_COMPILER_LAUNCHER=${cached_CCACHE_PROGRAM}
       -D CMAKE_CUDA_COMPILER_LAUNCHER=${cached_CCACHE_PROGRAM})
  foreach(name IN ITEMS MIXTAPE_CUDA MIXTAPE_CUDNN MIXTAPE_NCCL MIXTAPE_MPI MIXTAPE_ONEDNN
                        MIXTAPE_NATIVE MIXTAPE_WERROR MIXTAPE_SANITIZE BUILD_SHARED_LIBS
                        MIXTAPE_CUDNN_FRONTEND MIXTAPE_CUDNN_FRONTEND_DIR CMAKE_CUDA_ARCHITECTURES)
    if(NOT "${cached_${name}}" STREQUAL "")
      string(REPLACE ";" "\\;" value "${cached_${name}}")
      list(APPEND arguments "-D${name}=${value}")
    endif()
  endforeach()
endif()

run("${CMAKE_COMMAND}" -S "${SOURCE}/tests/consumer" -B "${WORK}/build" ${arguments})
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
run("${CMAKE_COMMAND}" --build "${WORK}/build" --config ${CONFIG} -j ${cores})
run("${WORK}/build/consumer")
