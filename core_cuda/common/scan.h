// Exclusive prefix sums on the GPU, in place, by two launches: blocks sum equal shares of the numbers, then each block
// adds the sums in front of its share and scans it. No CUDA and no torch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../jit/queue.h"

namespace edgeless::cuda {

constexpr int kScanThreads = 256, kScanNumbers = 4;     // threads per block, numbers that a thread scans at a time
constexpr int kScanTile = kScanThreads * kScanNumbers;  // numbers that a block scans at a time
constexpr int64_t kMostScanBlocks = 4 * kScanThreads;   // every block reads the sums of all shares in front of it

// Numbers per block, whole tiles; and the blocks.
constexpr int64_t scan_share(int64_t count) {
  const int64_t tiles = (count + kScanTile - 1) / kScanTile;
  return (tiles + kMostScanBlocks - 1) / kMostScanBlocks * kScanTile;
}
constexpr int64_t scan_blocks(int64_t count) { return (count + scan_share(count) - 1) / scan_share(count); }

// Bytes of scratch for a scan of `count` numbers, at least one.
constexpr size_t scan_scratch(int64_t count, bool wide_index) {
  return static_cast<size_t>(scan_blocks(count)) * (wide_index ? 8 : 4);
}

// numbers: int32 or, if wide_index, int64.
void exclusive_sum(void* numbers, int64_t count, bool wide_index, void* scratch, const jit::Queue& queue);

}  // namespace edgeless::cuda
