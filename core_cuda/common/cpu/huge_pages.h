// Large arrays on large pages: first touches of 4 KiB pages took half the time of sorting 10 million edges.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace edgeless {

// Ask for large pages behind memory that was not touched yet. Only for blocks that malloc maps on their own (glibc:
// 32 MiB or more), so that no heap page is left marked after the block is freed.
inline void prefer_huge_pages(void* memory, std::size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::size_t kMappedAlone = std::size_t{32} << 20;
  constexpr std::uintptr_t kPage = 4096;
  if (bytes >= kMappedAlone) {
    const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(memory);
    const std::uintptr_t begin = (address + kPage - 1) / kPage * kPage, end = (address + bytes) / kPage * kPage;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: a refusal changes nothing
  }
#else
  (void)memory, (void)bytes;
#endif
}

// An array left uninitialised.
template <typename T>
std::unique_ptr<T[]> large_array(std::int64_t size) {
  std::unique_ptr<T[]> array(new T[size]);
  prefer_huge_pages(array.get(), size * sizeof(T));
  return array;
}

}  // namespace edgeless
