// Arguments and host entry points of the projection kernels: column sums, node logits, casts, matrix products. No
// CUDA and no torch.
#pragma once

#include <cstdint>

#include "../../common/storage.h"
#include "../../jit/queue.h"

namespace edgeless::cuda::projection {

constexpr int kMostTensors = 16;  // tensors per launch

struct Columns {
  const void* rows = nullptr;  // [N, width]
  int64_t row_stride = 0;      // in elements; rows are contiguous
  int width = 0;
  int first = 0;        // first column of this matrix in `partial`
  void* out = nullptr;  // [width]
};

struct ColumnSumsArgs {
  Columns columns[kMostTensors];
  int tensors = 0;
  int64_t num_rows = 0;
  int total = 0;            // columns of all matrices
  int chunks = 0;           // chunks of rows
  bool wide = false;        // results have the opmath dtype, not that of the rows
  void* partial = nullptr;  // [chunks, total] of the opmath type
};

// Rows up to which column sums take one launch and no `partial`.
constexpr int64_t kRowsOfABlock = 4096;

// Number of chunks of rows that are summed separately. It depends on the number of rows alone, and so do the results.
constexpr int chunks_of(int64_t num_rows) {
  const int64_t chunks = (num_rows + 127) / 128;
  return static_cast<int>(chunks < 256 ? chunks : 256);
}

void run_column_sums(Storage dtype, const ColumnSumsArgs& args, const jit::Queue& queue);
// The second step alone: sums a given `partial` over its chunks; Columns::rows is not read.
void add_chunks(Storage dtype, const ColumnSumsArgs& args, const jit::Queue& queue);

constexpr int kLogitsThreads = 256;  // of a block that computes logits
constexpr int kMostVectors = 2;

// `rows`, `more` and `grad_rows` have the dtype of the rows, all other arrays the opmath dtype.
struct LogitsArgs {
  const void* rows = nullptr;  // [N, heads, channels]
  int64_t row_stride = 0, head_stride = 0;
  int64_t num_rows = 0;
  int heads = 0, channels = 0;
  bool fours = false;     // heads can be read four aligned elements at a time, in rows and vectors
  int sub_warp_log2 = 0;  // forward: log2 of the lanes of the sub-warp of a head
  int vectors = 0;
  const void* vector[kMostVectors] = {};  // [heads, channels]
  void* logits[kMostVectors] = {};        // forward: [N, heads]
  // Backward
  int chunks = 0;
  const void* grad[kMostVectors] = {};  // [N, heads], null: zero
  const void* more = nullptr;           // [N, heads, channels], added to grad_rows, which it may alias; null: zero
  void* grad_rows = nullptr;            // [N, heads, channels], null: not needed
  void* partial = nullptr;              // [chunks, vectors, heads, channels], null: not needed
};

void run_logits(Storage dtype, const LogitsArgs& args, const jit::Queue& queue);
void run_logit_gradients(Storage dtype, const LogitsArgs& args, const jit::Queue& queue);

// Threads of a block that casts, and elements that a thread casts at a time.
constexpr int kCastThreads = 256, kCastPer = 4;

struct CastArgs {
  const void* from[kMostTensors];
  void* to[kMostTensors];
  int64_t numbers[kMostTensors];
  Storage dtype[kMostTensors];  // dtypes of `from`
  int tensors = 0;
};

void run_cast(Storage to, const CastArgs& args, const jit::Queue& queue);

constexpr int kMostProducts = 2;  // products per launch, which share a

// c [rows, columns] = a b^T + bias or, with `add`, c += a b^T + bias. a is [rows, depth] and b [columns, depth] or,
// stored transposed, [depth, rows] and [depth, columns]. Rows of a, b and c are contiguous, 16-byte aligned and whole
// vectors of 16 bytes. Needs compute capability 8.0.
struct ProductArgs {
  struct Side {
    const void* b = nullptr;
    void* c = nullptr;
    int64_t b_row = 0, c_row = 0;
  };
  const void *a = nullptr, *bias = nullptr;
  int64_t a_row = 0;  // elements from row to row, as b_row and c_row
  int products = 0;
  Side of[kMostProducts];  // b and c of each
  int64_t rows = 0, depth = 0;
  int columns = 0;
  // A second pair of operands for the same c, whose product is added. Neither is stored transposed.
  struct Pair {
    const void *a = nullptr, *b = nullptr;
    int64_t a_row = 0, b_row = 0, depth = 0;
  } more;
  bool add = false;
  bool wide = false;               // c is float32 whatever the dtype of a and b
  int64_t share = 0, c_share = 0;  // split-K: depth per block; part y writes its product to c + y * c_share
  float* sums = nullptr;           // [rows]: sums over the depth of a, if a is stored transposed; parts as of c
};

// For 16-bit elements and for float32. `a` alone must not be transposed.
void run_half_gemm(Storage storage, bool transposed_a, bool transposed_b, const ProductArgs& args,
                   const jit::Queue& queue);
void run_product(bool transposed_a, bool transposed_b, const ProductArgs& args, const jit::Queue& queue);
// The split-K depth per block with which `count` products occupy all SMs, in at most `most_shares` parts. half: for
// run_half_gemm.
int64_t product_share(bool half, int64_t rows, int64_t columns, int64_t count, int64_t depth, int multiprocessors,
                      int64_t most_shares);

}  // namespace edgeless::cuda::projection
