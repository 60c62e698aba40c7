// Checked MPI calls: a failure throws mixtape::Error with the expression and MPI's own text. Needs
// MPI_ERRORS_RETURN on the communicators, which the communication thread sets. Internal.
#pragma once

#include <mpi.h>

#include "engine/check.h"

namespace mixtape::distributed {

inline std::string mpi_error_text(int error) {
  char text[MPI_MAX_ERROR_STRING] = "unknown error";
  int length = 0;
  if (MPI_Error_string(error, text, &length) == MPI_SUCCESS)
    return std::string(text, static_cast<std::size_t>(length));
  return text;
}

}  // namespace mixtape::distributed

#define MT_MPI_CHECK(expression)                                                                   \
  do {                                                                                             \
    const int mt_error = (expression);                                                             \
    if (mt_error != MPI_SUCCESS) [[unlikely]]                                                      \
      MT_THROW("MPI: " #expression " failed: ", ::mixtape::distributed::mpi_error_text(mt_error)); \
  } while (false)
