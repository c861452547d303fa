// Prefix sums and maxima on the GPU, in place. No CUDA and no torch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../jit/queue.h"

namespace edgeless::cuda {

enum class Scan : uint8_t { sum, maximum };
inline constexpr const char* type_text(Scan) { return "edgeless::cuda::Scan"; }

constexpr int kScanThreads = 512, kScanItems = 16;  // threads per block, values per thread
constexpr int64_t kScanTile = kScanThreads * kScanItems;
constexpr int64_t scan_tiles(int64_t count) { return (count + kScanTile - 1) / kScanTile; }

// Bytes of scratch for a scan of `count` values.
constexpr size_t scan_scratch(int64_t count, bool wide_index) {
  return count > kScanTile ? static_cast<size_t>(scan_tiles(count)) * (wide_index ? 8 : 4) : 0;
}

// numbers [count]: int32 or, if wide_index, int64. Value i is replaced by the sum of values 0 to i - 1, the sum of
// values 0 to i, or the maximum of values 0 to i.
void exclusive_sum(void* numbers, int64_t count, bool wide_index, void* scratch, const jit::Queue& queue);
void inclusive_sum(void* numbers, int64_t count, bool wide_index, void* scratch, const jit::Queue& queue);
void inclusive_maximum(void* numbers, int64_t count, bool wide_index, void* scratch, const jit::Queue& queue);

}  // namespace edgeless::cuda
