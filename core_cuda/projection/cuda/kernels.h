// Sums over rows and changes of dtype, of several tensors in one launch. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../common/storage.h"

namespace edgeless::cuda::maps {

constexpr int kMostTensors = 16;  // of a launch

struct Columns {
  const void* rows = nullptr;  // [N, width]
  int64_t row_stride = 0;      // in numbers; those of a row lie side by side
  int width = 0;
  int first = 0;        // column of `partial`
  void* out = nullptr;  // [width], of the rows' dtype
};

struct ColumnSumsArgs {
  Columns columns[kMostTensors];
  int tensors = 0;
  int64_t num_rows = 0;
  int total = 0;            // columns of all
  int chunks = 0;           // of rows
  void* partial = nullptr;  // [chunks, total] of float, for double double
};

// How many chunks of rows are summed apart: of the number of rows alone, so that results depend on nothing else.
constexpr int chunks_of(int64_t num_rows) {
  const int64_t chunks = (num_rows + 127) / 128;
  return static_cast<int>(chunks < 256 ? chunks : 256);
}

cudaError_t run_column_sums(Storage dtype, const ColumnSumsArgs& args, cudaStream_t stream);
// The second half of it: `partial` is there, Columns::rows are not looked at.
cudaError_t add_chunks(Storage dtype, const ColumnSumsArgs& args, cudaStream_t stream);

constexpr int kMostVectors = 2;

// Numbers are those of the rows' dtype in `rows` and `grad_rows`, else of the arithmetic's.
struct LogitsArgs {
  const void* rows = nullptr;  // [N, heads, channels]
  int64_t row_stride = 0, head_stride = 0;
  int64_t num_rows = 0;
  int heads = 0, channels = 0;
  bool fours = false;  // four numbers of a head lie side by side and aligned, in rows and vectors
  int team_log2 = 0;   // lanes of a head, forward
  int vectors = 0;
  const void* vector[kMostVectors] = {};  // [heads, channels]
  void* logits[kMostVectors] = {};        // [N, heads], forward
  // Backward
  int chunks = 0;
  const void* grad[kMostVectors] = {};  // [N, heads], null: zero
  void* grad_rows = nullptr;            // [N, heads, channels], null: not wanted
  void* partial = nullptr;              // [chunks, vectors, heads, channels], null: not wanted
};

cudaError_t run_logits(Storage dtype, const LogitsArgs& args, cudaStream_t stream);
cudaError_t run_logit_gradients(Storage dtype, const LogitsArgs& args, cudaStream_t stream);

struct CastArgs {
  const void* from[kMostTensors];
  void* to[kMostTensors];
  int64_t numbers[kMostTensors];
  Storage dtype[kMostTensors];  // of from
  int tensors = 0;
};

cudaError_t run_cast(Storage to, const CastArgs& args, cudaStream_t stream);

}  // namespace edgeless::cuda::maps
