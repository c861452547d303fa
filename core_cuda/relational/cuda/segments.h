// Divides edges that are sorted by type and row into segments; means over segments and pairs of edges. No CUDA and no
// torch, no host sync.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../jit/queue.h"

namespace edgeless::cuda::relational {

constexpr int kWarp = 32;  // threads

// Brings edges that are sorted by row to the order of their types.
template <class I>
struct ArrangeArgs {
  const I* order = nullptr;     // [edges] former index of an edge
  const I* rows = nullptr;      // [edges]
  const I* indices = nullptr;   // [edges]
  const I* edge_ids = nullptr;  // [edges]; null: the former index is the id
  int64_t edges = 0;
  I *to_rows = nullptr, *to_indices = nullptr, *to_ids = nullptr;
};
template <class I>
void arrange_edges(const ArrangeArgs<I>& args, const jit::Queue& queue);

// I: dtype of all ids, int32_t or int64_t.
template <class I>
struct SegmentsArgs {
  const I* types = nullptr;        // [edges] of sorted edges
  const I* rows = nullptr;         // [edges]
  const I* type_begins = nullptr;  // [num_types + 1] first edge of every type
  int64_t edges = 0, num_types = 0, num_rows = 0;
  int64_t cut = 0;            // maximum number of edges of a segment
  I* numbers = nullptr;       // [edges] scratch
  I* type_ptr = nullptr;      // [num_types + 1] first segment of a type
  I* segment_rows = nullptr;  // [edges] row of a segment; behind the last segment num_rows
  I* ptr = nullptr;           // [edges + 1] first edge of a segment; behind the last segment `edges`
  int64_t* count = nullptr;   // the number of segments
};

template <class I>
size_t segments_scratch(int64_t edges);
// `scratch` holds segments_scratch<I>(edges) bytes.
template <class I>
void cut_into_segments(const SegmentsArgs<I>& args, void* scratch, const jit::Queue& queue);

// One over the number of edges of the same type and row: for every edge, indexed by its id, or for every segment if
// there are no ids. A: float or double.
template <class I, class A>
struct MeansArgs {
  const I* type_ptr = nullptr;  // [num_types + 1]
  const I* rows = nullptr;      // of the segments
  const I* ptr = nullptr;
  const I* edge_ids = nullptr;  // null: one mean per segment
  int64_t num_types = 0, most_segments = 0;
  A* means = nullptr;
};
template <class I, class A>
void run_means(const MeansArgs<I, A>& args, const jit::Queue& queue);

// of_edges[edge_ids[e]] = the pair of edge e. ptr [pairs + 1]: first edge of every pair.
template <class I>
void run_pairs(const I* ptr, int64_t pairs, const I* edge_ids, int64_t edges, I* of_edges, const jit::Queue& queue);

}  // namespace edgeless::cuda::relational
