// Edges that are sorted by type and row, cut into segments; and what is known of the segments. No CUDA and no torch, no
// host sync.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../jit/queue.h"

namespace edgeless::cuda::relational {

constexpr int kWarp = 32;  // threads

// Edges by row, brought to the order of their types.
template <class I>
struct ArrangeArgs {
  const I* order = nullptr;     // [edges] where an edge was
  const I* rows = nullptr;      // [edges]
  const I* indices = nullptr;   // [edges]
  const I* edge_ids = nullptr;  // [edges], null: where it was is its id
  int64_t edges = 0;
  I *to_rows = nullptr, *to_indices = nullptr, *to_ids = nullptr;
};
template <class I>
void arrange_edges(const ArrangeArgs<I>& args, const jit::Queue& queue);

// I: type of all ids, int32_t or int64_t.
template <class I>
struct SegmentsArgs {
  const I* types = nullptr;        // [edges] of sorted edges
  const I* rows = nullptr;         // [edges]
  const I* type_begins = nullptr;  // [num_types + 1] first edge of every type
  int64_t edges = 0, num_types = 0, num_rows = 0;
  int64_t cut = 0;            // edges of a segment, at most
  I* numbers = nullptr;       // [edges] for the kernels alone
  I* type_ptr = nullptr;      // [num_types + 1] segments of a type
  I* segment_rows = nullptr;  // [edges] row of a segment; behind the last segment num_rows
  I* ptr = nullptr;           // [edges + 1] first edge of a segment; behind the last segment `edges`
  int64_t* count = nullptr;   // the number of segments
};

template <class I>
size_t segments_scratch(int64_t edges);
// `scratch` holds segments_scratch<I>(edges) bytes.
template <class I>
void cut_into_segments(const SegmentsArgs<I>& args, void* scratch, const jit::Queue& queue);

// One over the number of edges of the same type and row, for every edge by its id, or for every segment where there are
// no ids; A: float or double.
template <class I, class A>
struct MeansArgs {
  const I* type_ptr = nullptr;  // [num_types + 1]
  const I* rows = nullptr;      // of segments
  const I* ptr = nullptr;
  const I* edge_ids = nullptr;  // null: means are of segments
  int64_t num_types = 0, most_segments = 0;
  A* means = nullptr;
};
template <class I, class A>
void run_means(const MeansArgs<I, A>& args, const jit::Queue& queue);

// of_edges[edge_ids[e]] = the pair that has edge e, of those that begin at ptr [pairs + 1]
template <class I>
void run_pairs(const I* ptr, int64_t pairs, const I* edge_ids, int64_t edges, I* of_edges, const jit::Queue& queue);

}  // namespace edgeless::cuda::relational
