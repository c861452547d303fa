// The op typed_edges for few edges, in one launch. No CUDA and no torch, no host sync.
#pragma once

#include <cstdint>

#include "../../graph/grid_sort.h"
#include "../../jit/queue.h"

namespace edgeless::cuda::relational {

// T: dtype of `types`. The results are those of the kernels of segments.h.
template <class T>
struct FewTypedArgs {
  const int32_t *indptr = nullptr, *indices = nullptr, *edge_ids = nullptr;  // edge_ids null: ids are CSR indices
  const T* types = nullptr;                                                  // [edges] indexed by edge id
  int32_t edges = 0, num_rows = 0, num_types = 0, cut = 0;
  int64_t* facts = nullptr;         // [2] whether a type is out of range; number of segments
  int32_t* type_ptr = nullptr;      // [num_types + 1] first segment of a type
  int32_t* segment_rows = nullptr;  // [edges] row of a segment; behind the last segment num_rows
  int32_t* ptr = nullptr;           // [edges + 1] first edge of a segment; behind the last segment `edges`
  int32_t* to_indices = nullptr;    // [edges]
  int32_t* to_ids = nullptr;        // [edges]
  int32_t* by_row = nullptr;        // [num_rows + 1 + edges] row pointers; then segments by row; then zeros
};

// The arguments of the kernel.
template <class T>
struct FewSegments {
  FewTypedArgs<T> of;
  GridSortArgs sort;
  int32_t* rows;  // [edges] rows of the sorted edges
};

// Number of int32 elements of scratch that cut_few_edges needs.
int64_t few_segments_scratch(int64_t edges, int multiprocessors);
template <class T>
void cut_few_edges(const FewTypedArgs<T>& args, int32_t* scratch, int multiprocessors, const jit::Queue& queue);

}  // namespace edgeless::cuda::relational
