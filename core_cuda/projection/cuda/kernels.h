// Sums over rows and changes of dtype, of several tensors in one launch. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../common/storage.h"

namespace edgeless::cuda::projection {

constexpr int kMostTensors = 16;  // of a launch

struct Columns {
  const void* rows = nullptr;  // [N, width]
  int64_t row_stride = 0;      // in numbers; those of a row lie side by side
  int width = 0;
  int first = 0;        // column of `partial`
  void* out = nullptr;  // [width]
};

struct ColumnSumsArgs {
  Columns columns[kMostTensors];
  int tensors = 0;
  int64_t num_rows = 0;
  int total = 0;            // columns of all
  int chunks = 0;           // of rows
  bool wide = false;        // results are of the arithmetic's dtype, not of the rows'
  void* partial = nullptr;  // [chunks, total] of float, for double double
};

// Rows up to which column sums take one launch and no `partial`.
constexpr int64_t kRowsOfABlock = 4096;

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
  const void* more = nullptr;           // [N, heads, channels], to be added to grad_rows; may be these
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

constexpr int kMostProducts = 2;  // of a launch, with one a

// c [rows, columns] = a b^T + bias, or c += a b^T; a is [rows, depth] and b [columns, depth], or, stored transposed,
// [depth, rows] and [depth, columns]. All rows begin on 16 bytes, numbers of a row lie side by side, and rows are made
// of whole vectors of 16 bytes, those of c too. From devices of compute capability 8.0 on.
struct ProductArgs {
  struct Side {
    const void* b = nullptr;
    void* c = nullptr;
    int64_t b_row = 0, c_row = 0;
  };
  const void *a = nullptr, *bias = nullptr;
  int64_t a_row = 0;  // numbers from row to row, as above
  int products = 0;
  Side of[kMostProducts];  // b and c of each
  int64_t rows = 0, depth = 0;
  int columns = 0;
  // A second pair of the same rows and columns, none of them stored transposed, whose product is added.
  struct Pair {
    const void *a = nullptr, *b = nullptr;
    int64_t a_row = 0, b_row = 0, depth = 0;
  } more;
  bool add = false;
  bool wide = false;               // c holds floats, whatever the others do
  int64_t share = 0, c_share = 0;  // depth that a block walks; of the next share, c is c_share numbers further
  float* sums = nullptr;           // [rows]: the sums of a's rows, where a is stored transposed; shares as of c
};

// Of 16-bit numbers, and of floats. Not with a alone transposed.
cudaError_t run_half_gemm(Storage storage, bool transposed_a, bool transposed_b, const ProductArgs& args,
                          cudaStream_t stream);
cudaError_t run_product(bool transposed_a, bool transposed_b, const ProductArgs& args, cudaStream_t stream);
// The share of the depth of `count` products that lets all multiprocessors have something to do; at most `most_shares`
// of them. half: of run_half_gemm.
int64_t product_share(bool half, int64_t rows, int64_t columns, int64_t count, int64_t depth, int multiprocessors,
                      int64_t most_shares);

}  // namespace edgeless::cuda::projection
