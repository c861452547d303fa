// Arguments of the CUDA kernels of attention over pairs. No torch. All arithmetic is float.
//
// The kernels use these fields of Args: graph, whose sources are pairs and whose edge ids are segments (`segments`, see
// ../inputs.h); part, layout, value and value_vectors; coefficient, the slope; logit_term, the queries [segments]; out;
// in the backward grad_out, stats, grad_value, ds_out [E] in the order of edges by pair, and grad_att, the partial sums
// of the key's gradient; and the fields of dropout.
#pragma once

#include "../../attention/cuda/args.h"

namespace edgeless::cuda {

struct PairArgs : Args<float> {
  const void* key = nullptr;          // [width] of the storage type, 16-byte aligned
  const void* bias = nullptr;         // like key; null: no bias
  OutRows sums;                       // the result without the bias; null: not needed
  float* shift = nullptr;             // [2, Nd], see PairResults in ../inputs.h
  const int32_t* drawn_by = nullptr;  // [E] original edge ids in the order of the pass; null: no dropout
};

constexpr int kRowThreads = 128;  // threads per block of the row-wise kernels

// A row-wise pass that also computes column sums: each block writes one row of the partial sums `shares`, [blocks,
// width]. Rows are contiguous and whole vectors.
struct RowSumsArgs {
  const void *a = nullptr, *b = nullptr;  // rows, see kernels.h
  const void* row = nullptr;              // [width] of the storage type, null: zero
  const float* shift = nullptr;           // [2, rows]
  const float* factor = nullptr;          // [rows]
  float* stats = nullptr;                 // [rows, 4]
  void* out = nullptr;                    // [rows, width]
  float* shares = nullptr;                // null: sums not needed
  int64_t rows = 0;
  int vectors = 0;  // vectors per row, 1 to 32
  int blocks = 0;
};

// Reductions of partial sums, each to a [width] result of the storage type.
constexpr int kMostSums = 2;
constexpr int kShareLanes = 32, kShareSides = 32;  // threads of a block along the columns and along the rows
struct SharesArgs {
  struct Sum {
    const float* shares = nullptr;  // [count, width]
    int64_t count = 0;
    void* out = nullptr;
  } of[kMostSums];
  int sums = 0, width = 0;
};

// See run_prepare().
struct PrepareArgs {
  const float* ds = nullptr;      // [E]
  const int32_t* ptr = nullptr;   // [segments + 1] offsets of the segments in `at`
  const int32_t* at = nullptr;    // [E] indices into ds
  float* weights = nullptr;       // [pairs + segments]
  const void* vectors = nullptr;  // [vector_words] words of 4 bytes
  void* rows = nullptr;
  int64_t pairs = 0, segments = 0, vector_words = 0;
};

}  // namespace edgeless::cuda
