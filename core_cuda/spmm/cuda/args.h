// Arguments of the CUDA kernels of SpMM and SDDMM: plain pointers and sizes, no CUDA and no torch. A is the opmath
// type: float, or double for double rows.
#pragma once

#include <cstdint>

#include "../plan.h"

namespace edgeless::cuda::spmm {

template <class A>
struct SpmmArgs {
  CompressedGraph graph;
  ReducePlan plan;
  int vectors = 0, head_vectors = 0;  // vectors of a row, vectors of a head

  ReduceRows x;               // [columns, heads, head_vectors]
  const A* weight = nullptr;  // [E, heads] by original edge id with the strides below, null: 1
  int64_t weight_edge = 0, weight_head = 0;
  bool weight_by_head = false;
  const A* column_scale = nullptr;  // [columns], null: 1
  const A* row_scale = nullptr;     // [rows], null: 1
  const A* values = nullptr;        // [E] in CSR order: weight * column_scale; null: not precomputed

  char* out = nullptr;  // [rows, heads, dim] contiguous
  int dim = 0;
  int64_t out_row = 0;    // elements per row of out
  bool wide = false;      // out has type A, not the storage type
  bool whole = false;     // a head is a whole number of vectors
  char* carry = nullptr;  // fix-up workspace for hubs: [2, slots, vectors] of SumReducer::Segment
};

template <class A>
struct SddmmArgs {
  CompressedGraph graph;
  int edges_of_block = 0;      // a multiple of 32
  int sub_warp_log2 = 2;       // log2 of the lanes of a sub-warp, 4 to 32 lanes
  int heads = 0, vectors = 0;  // vectors of a head
  ReduceRows own, x;           // destination rows [rows, heads, vectors], source rows [columns, heads, vectors]
  const A* column_scale = nullptr;
  const A* row_scale = nullptr;
  A* products = nullptr;  // [E, heads] by original edge id
};

}  // namespace edgeless::cuda::spmm
