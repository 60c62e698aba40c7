# mixtape_test(NAME SOURCES files... LABELS labels... [WHOLE] [TIMEOUT seconds])
#
# A GoogleTest binary NAME; a file needs no main(). Its CPU tests are listed when ctest starts, one
# ctest entry each, so that a failure and a skip have a name; WHOLE makes the binary one entry, for
# suites of very many or very short cases.
#
# Labels: cpu and cuda say on which devices the tests run; a binary with both is run once for each,
# and testing::test_devices() (tests/support/devices.h) tells it where. Without the CUDA backend or
# without a GPU the cuda entries show as skipped. `dist` is for tests of several processes
# (mixtape_mpi_test below), `threads`, beside cpu, for what the thread sanitizer should see.
# tests_LABEL builds a label's binaries.

foreach(label IN ITEMS cpu cuda dist threads)
  add_custom_target(tests_${label})
endforeach()

function(mixtape_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "WHOLE" "TIMEOUT" "SOURCES;LABELS")
  if(NOT arg_SOURCES OR NOT arg_LABELS)
    message(FATAL_ERROR "mixtape_test(${name}): SOURCES and LABELS are required")
  endif()
  foreach(label IN LISTS arg_LABELS)
    if(NOT label MATCHES "^(cpu|cuda|dist|threads)$")
      message(FATAL_ERROR "mixtape_test(${name}): unknown label '${label}'")
    endif()
  endforeach()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()

  set(labels ${arg_LABELS})
  if("cuda" IN_LIST labels AND NOT MIXTAPE_WITH_CUDA)
    add_test(NAME ${name}.cuda COMMAND "${CMAKE_COMMAND}" -E echo
             "[  SKIPPED ] this build has no CUDA backend: ${MIXTAPE_NOTE_CUDA}")
    set_tests_properties(${name}.cuda PROPERTIES LABELS cuda SKIP_REGULAR_EXPRESSION "SKIPPED")
    list(REMOVE_ITEM labels cuda)
    if(NOT labels)
      return()
    endif()
  endif()

  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE mixtape_test_main mixtape_flags mixtape::mixtape
                                        GTest::gtest)
  # What is tested is optimised; the tests themselves compile a third faster with less of it.
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang>:-O1>)
  mixtape_test_settings(${name})
  foreach(label IN LISTS labels)
    add_dependencies(tests_${label} ${name})
  endforeach()

  if("cuda" IN_LIST labels)
    # One entry: each process pays for a CUDA context, and without a GPU there is nothing to list.
    list(REMOVE_ITEM labels cuda)
    add_test(NAME ${name}.cuda COMMAND ${name})
    mixtape_test_properties(properties cuda cuda)
    set_tests_properties(${name}.cuda PROPERTIES ${properties})
  endif()
  if(labels)
    mixtape_test_properties(properties cpu "${labels}")
    if(arg_WHOLE)
      add_test(NAME ${name} COMMAND ${name})
      set_tests_properties(${name} PROPERTIES ${properties})
    else()
      include(GoogleTest)
      # A machine with a GPU lists the instances on both devices.
      gtest_discover_tests(${name} TEST_PREFIX "${name}." TEST_FILTER "-*/cuda*"
                           DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 PROPERTIES ${properties})
    endif()
  endif()
endfunction()

# Sets `out` to the ctest properties of a run on `device`; for mixtape_test, whose arguments it reads.
function(mixtape_test_properties out device labels)
  # gtest_discover_tests takes no list as a value: one label holds the names, and -L cpu and
  # -L threads, regular expressions, both match cpu_threads.
  string(REPLACE ";" "_" label "${labels}")
  set(${out} LABELS ${label} TIMEOUT ${arg_TIMEOUT} SKIP_RETURN_CODE 77
      ENVIRONMENT MIXTAPE_TEST_DEVICE=${device} PARENT_SCOPE)
endfunction()

# mixtape_mpi_test(NAME SOURCES files... RANKS n... [TIMEOUT seconds])
#
# A GoogleTest binary whose tests run on every rank: once under mpirun for each number of ranks. A
# failure on any rank fails the run (tests/support/dist_main.cpp). A rank gets one thread, and ranks
# may outnumber cores. Label dist; shown as skipped in a build without MPI.
function(mixtape_mpi_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "SOURCES;RANKS")
  if(NOT arg_SOURCES OR NOT arg_RANKS)
    message(FATAL_ERROR "mixtape_mpi_test(${name}): SOURCES and RANKS are required")
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  if(MIXTAPE_WITH_MPI)
    add_executable(${name} ${arg_SOURCES})
    target_link_libraries(${name} PRIVATE mixtape_dist_test_main mixtape_flags mixtape::mixtape
                                          GTest::gtest)
    mixtape_test_settings(${name})
    add_dependencies(tests_dist ${name})
  endif()
  foreach(ranks IN LISTS arg_RANKS)
    mixtape_mpi_command(command ${ranks})
    mixtape_add_mpi_test(${name}.np${ranks} ${ranks} ${arg_TIMEOUT} dist
                         COMMAND ${command} $<TARGET_FILE:${name}>)
  endforeach()
endfunction()

# mixtape_mpi_command(OUT [RANKS]): the command that starts that many ranks on this machine; without
# RANKS the rest of it, for a script that adds their number.
function(mixtape_mpi_command out)
  set(command "${MPIEXEC_EXECUTABLE}")
  if(ARGC GREATER 1)
    list(APPEND command ${MPIEXEC_NUMPROC_FLAG} ${ARGV1})
  endif()
  if(NOT MIXTAPE_MPIEXEC_IS_OPEN_MPI STREQUAL "")
    list(APPEND command --allow-run-as-root --oversubscribe --bind-to none)
  endif()
  set(${out} ${command} PARENT_SCOPE)
endfunction()

if(MIXTAPE_WITH_MPI)
  execute_process(COMMAND "${MPIEXEC_EXECUTABLE}" --version OUTPUT_VARIABLE version ERROR_QUIET)
  string(REGEX MATCH "Open MPI|OpenRTE" MIXTAPE_MPIEXEC_IS_OPEN_MPI "${version}")
endif()

# mixtape_add_mpi_test(NAME RANKS TIMEOUT LABEL COMMAND ...): a ctest that takes RANKS processors, or
# its skip in a build without MPI. LABEL dist runs on the CPU, cuda on GPUs.
function(mixtape_add_mpi_test name ranks timeout label)
  cmake_parse_arguments(PARSE_ARGV 4 arg "" "" "COMMAND")
  if(MIXTAPE_WITH_MPI)
    add_test(NAME ${name} COMMAND ${arg_COMMAND})
  else()
    add_test(NAME ${name} COMMAND "${CMAKE_COMMAND}" -E echo
             "NOT RUN: this build has no MPI: ${MIXTAPE_NOTE_MPI}")
  endif()
  set(device cpu)
  if(label STREQUAL "cuda")
    set(device cuda)
  endif()
  # In containers Open MPI may not read another process's memory, and warns of it.
  set_tests_properties(${name} PROPERTIES LABELS ${label} TIMEOUT ${timeout} PROCESSORS ${ranks}
    SKIP_REGULAR_EXPRESSION "NOT RUN"
    ENVIRONMENT "OMP_NUM_THREADS=1;MIXTAPE_NUM_THREADS=1;MIXTAPE_TEST_DEVICE=${device};\
OMPI_MCA_btl_vader_single_copy_mechanism=none")
endfunction()

# Language level and libraries that test and benchmark binaries need beside the library.
function(mixtape_test_settings target)
  set_target_properties(${target} PROPERTIES
    CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF
    CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF)
  target_link_libraries(${target} PRIVATE Eigen3::Eigen Threads::Threads)
  if(MIXTAPE_WITH_CUDA)
    if(BUILD_SHARED_LIBS)
      set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY Shared)
      target_link_libraries(${target} PRIVATE CUDA::cudart)
    else()
      set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY Static)
      target_link_libraries(${target} PRIVATE CUDA::cudart_static)
    endif()
  endif()
endfunction()

# mixtape_benchmark(NAME SOURCES files...): a Google Benchmark program, run by hand; `benchmarks`
# builds them all.
add_custom_target(benchmarks)
function(mixtape_benchmark name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES")
  if(NOT MIXTAPE_BUILD_BENCHMARKS)
    return()
  endif()
  find_package(benchmark REQUIRED)
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE mixtape_flags mixtape::mixtape benchmark::benchmark_main)
  mixtape_test_settings(${name})
  add_dependencies(benchmarks ${name})
endfunction()
