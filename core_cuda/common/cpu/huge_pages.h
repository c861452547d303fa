// Large arrays on huge pages: the page faults of 4 KiB pages took half the time of sorting 10 million edges.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace edgeless {

// Requests huge pages for memory that has not been touched yet. Ignores blocks that malloc may not map on their own
// (glibc: below 32 MiB), so that no heap page stays marked after the block is freed.
inline void prefer_huge_pages(void* memory, std::size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::size_t kMappedAlone = std::size_t{32} << 20;
  constexpr std::uintptr_t kPage = 4096;
  if (bytes >= kMappedAlone) {
    const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(memory);
    const std::uintptr_t begin = (address + kPage - 1) / kPage * kPage, end = (address + bytes) / kPage * kPage;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // only advice: failure is harmless
  }
#else
  (void)memory, (void)bytes;
#endif
}

// Returns an uninitialised array.
template <typename T>
std::unique_ptr<T[]> large_array(std::int64_t size) {
  std::unique_ptr<T[]> array(new T[size]);
  prefer_huge_pages(array.get(), size * sizeof(T));
  return array;
}

}  // namespace edgeless
