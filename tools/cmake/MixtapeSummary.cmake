# The table printed at the end of the configure step: what was found, and what its absence means.

function(mixtape_summary_line label enabled found missing)
  string(SUBSTRING "${label}                    " 0 11 padded)
  if(enabled)
    message(STATUS "  ${padded} yes  ${found}")
  else()
    message(STATUS "  ${padded} no   ${found}")
    message(STATUS "                   -> ${missing}")
  endif()
endfunction()

set(build_type "${CMAKE_BUILD_TYPE}")
if(MIXTAPE_SANITIZE)
  string(APPEND build_type ", sanitizers ${MIXTAPE_SANITIZE}")
endif()
message(STATUS "")
message(STATUS "Mixtape ${PROJECT_VERSION}: ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}, "
               "${build_type}, ${arch_options}")
message(STATUS "  CPU         yes  Eigen ${Eigen3_VERSION}, zlib ${ZLIB_VERSION_STRING}, "
               "nlohmann-json ${nlohmann_json_VERSION}, PCRE2 ${PCRE2_VERSION}")
mixtape_summary_line(oneDNN ${MIXTAPE_WITH_ONEDNN} "${MIXTAPE_NOTE_ONEDNN}"
  "CPU convolution and 16-bit products run on Eigen, slower")
mixtape_summary_line(CUDA ${MIXTAPE_WITH_CUDA} "${MIXTAPE_NOTE_CUDA}"
  "no GPU: tensors live on the CPU, and Device::cuda() throws")
mixtape_summary_line(cuDNN ${MIXTAPE_WITH_CUDNN} "${MIXTAPE_NOTE_CUDNN}"
  "convolution throws on CUDA tensors")
mixtape_summary_line("  frontend" ${MIXTAPE_WITH_CUDNN_FRONTEND} "${MIXTAPE_NOTE_CUDNN_FRONTEND}"
  "attention on CUDA runs on our own kernels, slower in 16 bits")
mixtape_summary_line(CUPTI ${MIXTAPE_WITH_CUPTI} "${MIXTAPE_NOTE_CUPTI}"
  "profiles have no CUDA kernel times")
mixtape_summary_line(NVTX ${MIXTAPE_WITH_NVTX} "${MIXTAPE_NOTE_NVTX}"
  "no named ranges in Nsight Systems")
mixtape_summary_line(NCCL ${MIXTAPE_WITH_NCCL} "${MIXTAPE_NOTE_NCCL}"
  "no data-parallel training over several GPUs")
mixtape_summary_line(MPI ${MIXTAPE_WITH_MPI} "${MIXTAPE_NOTE_MPI}"
  "no launch under mpirun")
mixtape_summary_line(JPEG ${MIXTAPE_WITH_JPEG} "${MIXTAPE_NOTE_JPEG}"
  "image folders with JPEG files throw")
mixtape_summary_line(PNG ${MIXTAPE_WITH_PNG} "${MIXTAPE_NOTE_PNG}"
  "image folders with PNG files throw")
message(STATUS "")
