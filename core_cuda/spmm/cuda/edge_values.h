// Conversion between arrays in original edge order and the CSR order that cuSPARSE reads and writes. No CUDA and no
// torch.
#pragma once

#include "../../common/storage.h"
#include "../../jit/queue.h"

namespace edgeless::cuda::spmm {

template <class A>
struct EdgeValues {
  CompressedGraph graph;
  const A* weight = nullptr;  // [E] by original edge id with the stride below, null: 1
  int64_t weight_edge = 0;
  const A* column_scale = nullptr;  // null: 1
  const A* row_scale = nullptr;     // null: 1
};

// values[position] = weight * column_scale * row_scale, rounded to `storage`.
template <class A>
void fill_edge_values(const EdgeValues<A>& args, Storage storage, bool wide_index, void* values,
                      const jit::Queue& queue);

// products[id] = by_position[position] * column_scale * row_scale.
template <class A>
void place_products(const EdgeValues<A>& args, bool wide_index, const A* by_position, A* products,
                    const jit::Queue& queue);

}  // namespace edgeless::cuda::spmm
