// Small building blocks of the tape: an intrusive reference count, a thread-local pool for the
// objects a step makes and drops by the hundred, and a vector with inline room.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <utility>

namespace mixtape {

/// Memory for objects of at most 1 KiB from per-thread free lists (16 size classes of 64 bytes);
/// larger ones from operator new. An object may be freed on another thread.
void* pool_allocate(std::size_t bytes);
void pool_free(void* memory, std::size_t bytes) noexcept;

/// A shared pointer whose count lies in the object. T derives from RefCounted and has
/// `static void destroy(T*)`, called at zero.
class RefCounted {
 public:
  std::uint32_t use_count() const { return count_.load(std::memory_order_acquire); }
  void retain() const { count_.fetch_add(1, std::memory_order_relaxed); }
  /// True when this was the last reference.
  bool release() const { return count_.fetch_sub(1, std::memory_order_acq_rel) == 1; }

 protected:
  RefCounted() = default;

 private:
  mutable std::atomic<std::uint32_t> count_{1};
};

template <class T>
class Ref {
 public:
  Ref() = default;
  /// Takes over the reference that a new object is born with.
  static Ref adopt(T* object) {
    Ref r;
    r.object_ = object;
    return r;
  }
  static Ref share(T* object) {
    if (object) object->retain();
    return adopt(object);
  }
  Ref(const Ref& other) : object_(other.object_) {
    if (object_) object_->retain();
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() {
    if (object_ && object_->release()) T::destroy(object_);
  }
  T* get() const { return object_; }
  T* operator->() const { return object_; }
  T& operator*() const { return *object_; }
  explicit operator bool() const { return object_ != nullptr; }
  friend bool operator==(const Ref& a, const Ref& b) { return a.object_ == b.object_; }

 private:
  T* object_ = nullptr;
};

/// A vector that keeps its first N elements inline.
template <class T, int N>
class SmallVector {
 public:
  SmallVector() = default;
  explicit SmallVector(int size) { resize(size); }
  SmallVector(std::initializer_list<T> values) {
    for (const T& v : values) push_back(v);
  }
  SmallVector(const SmallVector& other) {
    for (const T& v : other) push_back(v);
  }
  SmallVector(SmallVector&& other) noexcept { take(other); }
  SmallVector& operator=(SmallVector other) noexcept {
    clear_storage();
    take(other);
    return *this;
  }
  ~SmallVector() { clear_storage(); }

  int size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T& operator[](int i) { return data()[i]; }
  const T& operator[](int i) const { return data()[i]; }
  T* data() { return heap_ ? heap_ : reinterpret_cast<T*>(inline_); }
  const T* data() const { return heap_ ? heap_ : reinterpret_cast<const T*>(inline_); }
  T* begin() { return data(); }
  T* end() { return data() + size_; }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size_; }
  T& back() { return data()[size_ - 1]; }
  operator std::span<const T>() const { return {data(), static_cast<std::size_t>(size_)}; }
  operator std::span<T>() { return {data(), static_cast<std::size_t>(size_)}; }

  template <class... Args>
  T& emplace_back(Args&&... args) {
    if (size_ == capacity_) grow(capacity_ * 2);
    return *new (data() + size_++) T(std::forward<Args>(args)...);
  }
  void push_back(const T& v) { emplace_back(v); }
  void push_back(T&& v) { emplace_back(std::move(v)); }
  void resize(int size) {
    if (size > capacity_) grow(size);
    while (size_ < size) emplace_back();
    while (size_ > size) data()[--size_].~T();
  }
  void clear() { resize(0); }

 private:
  void grow(int capacity) {
    if (capacity <= 0) __builtin_unreachable();  // or GCC warns of an allocation of 0 elements
    T* fresh = static_cast<T*>(
        ::operator new(sizeof(T) * static_cast<unsigned>(capacity), std::align_val_t(alignof(T))));
    for (int i = 0; i < size_; ++i) {
      new (fresh + i) T(std::move(data()[i]));
      data()[i].~T();
    }
    if (heap_) ::operator delete(heap_, std::align_val_t(alignof(T)));
    heap_ = fresh;
    capacity_ = capacity;
  }
  void clear_storage() noexcept {
    for (int i = 0; i < size_; ++i) data()[i].~T();
    if (heap_) ::operator delete(heap_, std::align_val_t(alignof(T)));
    heap_ = nullptr;
    size_ = 0;
    capacity_ = N;
  }
  void take(SmallVector& other) noexcept {  // *this is empty
    if (other.heap_) {
      heap_ = std::exchange(other.heap_, nullptr);
      size_ = std::exchange(other.size_, 0);
      capacity_ = std::exchange(other.capacity_, N);
      return;
    }
    for (int i = 0; i < other.size_; ++i) new (data() + i) T(std::move(other.data()[i]));
    size_ = other.size_;
    other.clear_storage();
  }

  alignas(T) unsigned char inline_[sizeof(T) * N];
  T* heap_ = nullptr;
  int size_ = 0;
  int capacity_ = N;
};

}  // namespace mixtape
