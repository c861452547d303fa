// coo_to_csr and csr_transpose for few edges, each in one launch. No CUDA and no torch, no host sync.
#pragma once

#include <cstdint>

#include "../common/thresholds.h"
#include "../jit/queue.h"
#include "grid_sort.h"

namespace edgeless::cuda {

// Returns whether a graph with int32 arrays is sorted in one launch, where launches dominate. most_rows: the maximum of
// rows, columns and, for typed graphs, edge types, which the kernels count in int32.
constexpr bool sorts_by_one_launch(int64_t edges, int64_t most_rows) {
  return edges <= kSmallGraphEdges && most_rows <= int64_t{1} << 30;
}

// Scratch size of a sort of `items`, in int32 elements.
int64_t grid_sort_scratch(int64_t items, int multiprocessors);

// In: type of the input ids.
template <class In>
struct FewCooArgs {
  const In *rows = nullptr, *cols = nullptr;  // [edges]
  int32_t edges = 0, num_rows = 0, num_cols = 0;
  int32_t* bad = nullptr;       // [2], set to 1 if a row id, a column id is out of range, else to 0; null: no check
  int32_t* indptr = nullptr;    // [num_rows + 1]
  int32_t* indices = nullptr;   // [edges]
  int32_t* edge_ids = nullptr;  // [edges]
};

// The arguments of a kernel.
template <class In>
struct CooLaunch {
  FewCooArgs<In> of;
  GridSortArgs sort;
};

template <class In>
void sort_few_edges(const FewCooArgs<In>& args, int32_t* scratch, int multiprocessors, const jit::Queue& queue);

struct FewTransposeArgs {
  const int32_t *indptr = nullptr, *indices = nullptr, *edge_ids = nullptr;  // edge_ids null: ids are positions
  int32_t edges = 0, num_rows = 0, num_cols = 0;
  int32_t* to_indptr = nullptr;    // [num_cols + 1]
  int32_t* to_indices = nullptr;   // [edges]
  int32_t* to_edge_ids = nullptr;  // [edges]
};

struct TransposeLaunch {
  FewTransposeArgs of;
  GridSortArgs sort;
};

void transpose_few_edges(const FewTransposeArgs& args, int32_t* scratch, int multiprocessors, const jit::Queue& queue);

}  // namespace edgeless::cuda
