// Arguments of SpMM over weighted sparse blocks (WSB). No torch.
#pragma once

#include <cuda_runtime_api.h>

#include "../../common/fold.h"
#include "../../common/storage.h"

namespace edgeless::cuda::wsb {

constexpr int kBlockColumns = 16, kHeight = 32;  // columns of a block, rows of a window

// Rows are grouped into windows of 32. Each window lists the distinct columns of its rows; sixteen of these columns
// form a block, with one bit per row and column that says whether the edge exists. Word w holds the bits of columns 2 w
// and 2 w + 1 for sixteen rows, as one mma register does, column 2 w in the lower half.
struct Blocks {
  const int32_t* first = nullptr;    // [windows + 1], a window's first block
  const int32_t* order = nullptr;    // [windows], the order in which windows are processed
  const int32_t* columns = nullptr;  // [blocks, 16]
  const uint32_t* bits = nullptr;    // [blocks, 4, 2, 2]: words 2 q and 2 q + 1 of both halves of the rows, q < 4
  int windows = 0;
};

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

// Both take 16-bit storage only.
cudaError_t run_scale(Storage storage, const ScaleArgs& args, cudaStream_t stream);
cudaError_t run_sum(Storage storage, const SumArgs& args, cudaStream_t stream);

}  // namespace edgeless::cuda::wsb
