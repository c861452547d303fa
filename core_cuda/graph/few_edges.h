// coo_to_csr and csr_transpose of few edges, each by one launch. No torch, no host sync.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../thresholds.h"

namespace edgeless::cuda {

// Whether a graph of int32 arrays is sorted so; most_rows: of either direction, or types. Their counters are int32 too.
constexpr bool sorts_by_one_launch(int64_t edges, int64_t most_rows) {
  return edges <= kSmallGraphEdges && most_rows <= int64_t{1} << 30;
}

// Numbers of int32 that a sort of so many items needs beside its result.
int64_t grid_sort_scratch(int64_t items, int multiprocessors);

// In: type of the ids given.
template <class In>
struct FewCooArgs {
  const In *rows = nullptr, *cols = nullptr;  // [edges]
  int32_t edges = 0, num_rows = 0, num_cols = 0;
  int32_t* bad = nullptr;       // [2] becomes 1 where an id of a row, of a column is out of range; null: not asked for
  int32_t* indptr = nullptr;    // [num_rows + 1]
  int32_t* indices = nullptr;   // [edges]
  int32_t* edge_ids = nullptr;  // [edges]
};
template <class In>
cudaError_t sort_few_edges(const FewCooArgs<In>& args, int32_t* scratch, int multiprocessors, cudaStream_t stream);

struct FewTransposeArgs {
  const int32_t *indptr = nullptr, *indices = nullptr, *edge_ids = nullptr;  // edge_ids null: the positions
  int32_t edges = 0, num_rows = 0, num_cols = 0;
  int32_t* to_indptr = nullptr;    // [num_cols + 1]
  int32_t* to_indices = nullptr;   // [edges]
  int32_t* to_edge_ids = nullptr;  // [edges]
};
cudaError_t transpose_few_edges(const FewTransposeArgs& args, int32_t* scratch, int multiprocessors,
                                cudaStream_t stream);

}  // namespace edgeless::cuda
