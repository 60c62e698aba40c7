// Errors: every failure in Mixtape is a mixtape::Error that says which operation failed, what it
// expected and what it got, and where the call was made. Nothing prints, nothing exits.
//
//   MT_CHECK(x.dim() == 2, "matmul: expected a 2-D tensor, got ", x.shape());
//   MT_CHECK_EQ(x.size(1), w.size(0), "matmul: inner dimensions");
//     -> "matmul: inner dimensions: expected 512, got 784 [ops/matmul.cpp:41]"
#pragma once

#include <concepts>
#include <iosfwd>
#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>

namespace mixtape {

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& what, std::source_location where = {});
  const std::source_location& where() const noexcept { return where_; }

 private:
  std::source_location where_;
};

/// Raised when a device or the pinned-memory cache has no room; what() holds the allocator's
/// report.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

namespace detail {
/// A text put together from parts, each as operator<< of std::ostream writes it. The stream lies
/// behind a pointer: this header is in every file, and <sstream> would make each a tenth slower.
class Message {
 public:
  Message();
  ~Message();
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;

  template <class T>
  void add(const T& part) {
    if constexpr (std::convertible_to<const T&, std::string_view>)
      add_text(part);
    else if constexpr (std::same_as<T, bool> || std::same_as<T, char>)
      add_value(part);
    else if constexpr (std::signed_integral<T>)
      add_value(static_cast<long long>(part));
    else if constexpr (std::unsigned_integral<T>)
      add_value(static_cast<unsigned long long>(part));
    else if constexpr (std::floating_point<T>)
      add_value(static_cast<double>(part));
    else
      stream() << part;  // the type's own operator<<
  }
  std::ostream& stream();
  std::string text() const;

 private:
  void add_text(std::string_view part);
  void add_value(bool part);
  void add_value(char part);
  void add_value(long long part);
  void add_value(unsigned long long part);
  void add_value(double part);

  std::ostringstream* out_;
};

template <class... Parts>
std::string concat(const Parts&... parts) {
  Message message;
  (message.add(parts), ...);
  return message.text();
}
[[noreturn]] void throw_error(const std::string& message, std::source_location where);
}  // namespace detail

/// Throws mixtape::Error with the parts joined by operator<<; for the cases that need no condition.
#define MT_THROW(...)                                                    \
  ::mixtape::detail::throw_error(::mixtape::detail::concat(__VA_ARGS__), \
                                 std::source_location::current())

#define MT_CHECK(condition, ...)   \
  do {                             \
    if (!(condition)) [[unlikely]] \
      MT_THROW(__VA_ARGS__);       \
  } while (false)

/// MT_CHECK_EQ(got, expected, "op: what is compared"): throws "op: what: expected E, got G".
#define MT_CHECK_EQ(got, expected, ...)                                    \
  do {                                                                     \
    const auto& mt_got = (got);                                            \
    const auto& mt_expected = (expected);                                  \
    if (!(mt_got == mt_expected)) [[unlikely]]                             \
      MT_THROW(__VA_ARGS__, ": expected ", mt_expected, ", got ", mt_got); \
  } while (false)

}  // namespace mixtape
