// Prefix sums and maxima on the GPU, in place. No CUDA and no torch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../jit/queue.h"

namespace edgeless::cuda {

enum class Scan : uint8_t { sum, maximum };
inline constexpr const char* type_text(Scan) { return "edgeless::cuda::Scan"; }

constexpr int kScanThreads = 512, kScanItems = 16;  // threads per block, numbers per thread
constexpr int64_t kScanTile = kScanThreads * kScanItems;
constexpr int64_t scan_tiles(int64_t count) { return (count + kScanTile - 1) / kScanTile; }

// Bytes of scratch for a scan of `count` numbers.
constexpr size_t scan_scratch(int64_t count, bool wide_index) {
  return count > kScanTile ? static_cast<size_t>(scan_tiles(count)) * (wide_index ? 8 : 4) : 0;
}

// numbers [count]: int32 or, if wide_index, int64. Number i becomes the sum of those before it, the sum of those up to
// it, or the maximum of those up to it.
void exclusive_sum(void* numbers, int64_t count, bool wide_index, void* scratch, const jit::Queue& queue);
void inclusive_sum(void* numbers, int64_t count, bool wide_index, void* scratch, const jit::Queue& queue);
void inclusive_maximum(void* numbers, int64_t count, bool wide_index, void* scratch, const jit::Queue& queue);

}  // namespace edgeless::cuda
