// Arguments and launch geometry of SpMM over weighted sparse blocks. No CUDA and no torch.
#pragma once

#include <algorithm>

#include "../../jit/queue.h"
#include "blocks.h"

namespace edgeless::cuda::wsb {

struct SumArgs {
  Blocks blocks;
  CompressedGraph graph;  // CSR of the same edges, to recompute sums that are not finite
  bool wide_index = false;
  const char* x = nullptr;
  int64_t x_row = 0;                 // bytes from row to row of x
  int vectors = 0;                   // vectors of 16 bytes per row
  const float* row_scale = nullptr;  // null: 1
  void* out = nullptr;               // [rows, vectors * 8]
  bool wide = false;                 // out is float32
  bool shared_windows = false;       // four warps share a window and feature tile; else each has its own feature tile
  bool by_window = false;            // block order: all feature tiles of a window first; else all windows of a tile
};

struct ScaleArgs {
  const char* x = nullptr;
  int64_t rows = 0, x_row = 0;   // number of rows; bytes from row to row
  int vectors = 0;               // vectors of 16 bytes per row
  const float* scale = nullptr;  // [rows]
  char* out = nullptr;           // contiguous
};

// Both support 16-bit storage only.
void run_scale(Storage storage, const ScaleArgs& args, const jit::Queue& queue);
void run_sum(Storage storage, const SumArgs& args, const jit::Queue& queue);

constexpr int kSumWarps = 4, kSumStages = 4;
constexpr int kVectors = 8;       // 16-byte vectors of a row in a warp's feature tile
constexpr int kRowsOfLane = 4;    // rows of x per block that a lane copies one vector of
constexpr int kNumbersOfMma = 4;  // accumulators of one mma per lane

constexpr int kTiles = kHeight / 16;                                       // row tiles of a window, one mma high
constexpr int kSums = kTiles * kVectors * kNumbersOfMma;                   // accumulators of a lane
constexpr int kStageRows = kBlockColumns * kVectors;                       // vectors of 16 bytes
constexpr int kStageBits = kBlockColumns * kTiles / 2 * 4 / 16;            // vectors of 16 bytes
constexpr int kRing = kSumWarps * kSumStages * (kStageRows + kStageBits);  // vectors of 16 bytes
constexpr int kSharedBytes = 16 * std::max(kRing, kSumWarps * kSums * 32 / 4);

// Thread blocks that cover all feature tiles of a window.
constexpr int num_parts(const SumArgs& args, int split) {
  const int vectors = kVectors * (kSumWarps / split);
  return (args.vectors + vectors - 1) / vectors;
}

}  // namespace edgeless::cuda::wsb
