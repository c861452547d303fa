// What the CUDA kernels of SpMM and SDDMM are given: plain pointers and sizes, no torch. A is the type of arithmetic:
// float, for double rows double.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../plan.h"

namespace edgeless::cuda::spmm {

template <class A>
struct SpmmArgs {
  CompressedGraph graph;
  FoldPlan plan;
  int vectors = 0, head_vectors = 0;  // of a row, of a head

  FoldRows x;                 // of the graph's columns
  const A* weight = nullptr;  // [E, heads] by original id with the strides below, null: 1
  int64_t weight_edge = 0, weight_head = 0;
  bool weight_by_head = false;
  const A* column_scale = nullptr;  // [columns], null: 1
  const A* row_scale = nullptr;     // [rows], null: 1
  const A* values = nullptr;        // [E] by position: the product of weight and column_scale, null: not there

  char* out = nullptr;  // [rows, heads, dim] contiguous
  int dim = 0;
  int64_t out_row = 0;    // numbers of a row
  bool wide = false;      // numbers are A, not storage
  bool whole = false;     // heads are made of whole vectors
  char* carry = nullptr;  // pieces of hubs: [2, slots, vectors] of one lane's sums
};

template <class A>
struct SddmmArgs {
  CompressedGraph graph;
  int edges_of_block = 0;      // a multiple of 32
  int team_log2 = 2;           // lanes of a team, four to 32
  int heads = 0, vectors = 0;  // vectors of a head
  FoldRows own, x;             // of the graph's rows and columns
  const A* column_scale = nullptr;
  const A* row_scale = nullptr;
  A* products = nullptr;  // [E, heads] by original id
};

}  // namespace edgeless::cuda::spmm
