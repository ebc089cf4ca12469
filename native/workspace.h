// Memory that a thread keeps from call to call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace lpr {

constexpr size_t kHugePage = 2 << 20;  // bytes
constexpr size_t kCacheLine = 64;

// Large ones lie in huge pages where the system has them: what a prompt's layer makes is read and written once or twice
// from end to end, and looking up where each page of 4 KiB lies takes a sixth of a prompt's time.
class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { std::free(begin_); }

  // At least `size` bytes from a cache line's begin on, with any contents.
  char* at_least(size_t size) {
    if (size > size_) grow(size);
    return begin_;
  }

 private:
  void grow(size_t size) {
    std::free(begin_);
    size_ = 0;
    size_t unit = size < kHugePage / 2 ? kCacheLine : kHugePage, whole = (size + unit - 1) / unit * unit;
    begin_ = static_cast<char*>(std::aligned_alloc(unit, whole));
    if (!begin_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (unit == kHugePage) madvise(begin_, whole, MADV_HUGEPAGE);
#endif
    size_ = whole;
  }

  char* begin_ = nullptr;
  size_t size_ = 0;
};

}  // namespace lpr
