// Sums over weighted sparse blocks (WSB): what the kernel is given. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include "../../common/fold.h"
#include "../../common/storage.h"

namespace edgeless::cuda::wsb {

constexpr int kBlockColumns = 16, kHeight = 32;  // columns of a block, rows of a window

// Rows lie in windows of 32, and each window has a list of columns: all that its rows have, each one once.
// Sixteen of them are a block: a bit for each of the window's rows says which of them have the column. A word holds the
// bits of two columns, 2 w and 2 w + 1, for sixteen rows, as one register of an mma does: those of the first column in
// its lower half.
struct Blocks {
  const int32_t* first = nullptr;    // [windows + 1], a window's first block
  const int32_t* order = nullptr;    // [windows], the order in which they are begun
  const int32_t* columns = nullptr;  // [blocks, 16]
  const uint32_t* bits = nullptr;    // [blocks, 4, 2, 2]: words 2 q and 2 q + 1 of both halves of the rows, q < 4
  int windows = 0;
};

struct SumArgs {
  Blocks blocks;
  CompressedGraph graph;  // of the same edges, for sums that are not finite
  bool wide_index = false;
  const char* x = nullptr;
  int64_t x_row = 0;                 // bytes
  int vectors = 0;                   // of 16 bytes in a row
  const float* row_scale = nullptr;  // null: 1
  void* out = nullptr;               // [rows, vectors * 8]
  bool wide = false;                 // out is float32
  bool shared_windows = false;       // four warps share a window, else each has its own columns of x
  bool by_window = false;            // all columns of x for a window, then the next; else all windows for a few columns
};

struct ScaleArgs {
  const char* x = nullptr;
  int64_t rows = 0, x_row = 0;  // bytes
  int vectors = 0;              // of 16 bytes in a row
  const float* scale = nullptr;
  char* out = nullptr;  // without gaps
};

// Storage of both must be of 16 bits.
cudaError_t run_scale(Storage storage, const ScaleArgs& args, cudaStream_t stream);
cudaError_t run_sum(Storage storage, const SumArgs& args, cudaStream_t stream);

}  // namespace edgeless::cuda::wsb
