// Geometry and buffers of the radix sort inside a cooperative launch (grid_sort.cuh). No CUDA and no torch.
#pragma once

#include <algorithm>
#include <cstdint>

namespace edgeless::cuda {

constexpr int kGridThreads = 512, kGridWarps = kGridThreads / 32, kDigitBits = 8, kDigits = 1 << kDigitBits;

// Thread blocks of the cooperative launch: at most one per SM, so all are resident.
inline int grid_blocks(int64_t items, int multiprocessors) {
  return static_cast<int>(std::clamp<int64_t>(items / (2 * kGridThreads), 1, multiprocessors));
}

// Double buffers of the keys and of the permutation (`places`: original indices), [count] each; the result is in
// keys[0] and places[0]. of_blocks: [blocks, kDigits] digit counts.
struct GridSortArgs {
  int32_t *keys[2], *places[2];
  int32_t* of_blocks;
};

}  // namespace edgeless::cuda
