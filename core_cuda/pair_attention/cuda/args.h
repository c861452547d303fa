// What the CUDA kernels of attention over pairs are given. No torch. All arithmetic is float.
//
// Of Args are used: graph, whose sources are pairs and whose edge ids are the pieces of destinations; part, layout,
// value and value_vectors; coefficient, the slope; logit_term, the queries [pieces]; out; in the backward grad_out,
// stats, grad_value, ds_out [E] by the position of edges by source, and grad_att, the shares of the key's gradient; and
// what is known of dropout.
#pragma once

#include "../../attention/cuda/args.h"

namespace edgeless::cuda {

struct PairArgs : Args<float> {
  const void* key = nullptr;          // [width], of storage, from 16 bytes on
  const void* bias = nullptr;         // the same, null: none
  OutRows sums;                       // the result without the bias; null: not wanted
  float* shift = nullptr;             // [2, Nd]: what inputs.h says of it
  const int32_t* drawn_by = nullptr;  // [E] original ids by the position of edges; null: no dropout
};

// A pass over many rows of numbers that ends in one sum for each column: `blocks` shares of it, [blocks, width] each.
// Rows are whole vectors, contiguous.
struct RowSumsArgs {
  const void *a = nullptr, *b = nullptr;  // rows, see the kernels
  const void* row = nullptr;              // [width] of storage, null: zero
  const float* shift = nullptr;           // [2, rows]
  const float* factor = nullptr;          // [rows]
  float4* stats = nullptr;                // [rows]
  void* out = nullptr;                    // [rows, width]
  float* shares = nullptr;                // null: nobody asks for the sums
  int64_t rows = 0;
  int vectors = 0;  // of a row, 1 to 32
  int blocks = 0;
};

// Sums of shares, each to a vector of storage.
constexpr int kMostSums = 2;
struct SharesArgs {
  struct Sum {
    const float* shares = nullptr;  // [count, width]
    int64_t count = 0;
    void* out = nullptr;
  } of[kMostSums];
  int sums = 0, width = 0;
};

// What is summed for nodes, see run_prepare().
struct PrepareArgs {
  const float* ds = nullptr;      // [E]
  const int32_t* ptr = nullptr;   // [pieces + 1]
  const int32_t* at = nullptr;    // [E]
  float* weights = nullptr;       // [pairs + pieces]
  const void* vectors = nullptr;  // [vector_words] words of 4 bytes
  void* rows = nullptr;
  int64_t pairs = 0, pieces = 0, vector_words = 0;
};

}  // namespace edgeless::cuda
