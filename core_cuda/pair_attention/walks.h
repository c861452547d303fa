// Builds the index arrays of attention over pairs from the edges by pair and the segments by relation
// (shared/functional/pair_attention.py). Each function is the work of one thread of a CUDA kernel, or of one iteration
// on the CPU. No torch.
#pragma once

#include <cstdint>

#include "../common/search.h"

namespace edgeless {

// I: int32_t or int64_t. A pair is a unique (source, relation); a segment has edges of one destination and
// relation (`type`). A node's pairs are those whose source it is, its segments those whose destination it is.
template <class I>
struct WalksArgs {
  const I* indptr = nullptr;        // [nodes + 1] offsets of edges by node
  const I* pair_ptr = nullptr;      // [pairs + 1] offsets of edges by pair
  const I* pair_edges = nullptr;    // [edges] edge ids by pair
  const I* pair_of_edge = nullptr;  // [edges] pair of each edge id
  const I* pair_nodes = nullptr;    // [pairs] source of each pair
  const I* node_ptr = nullptr;      // [nodes + 1] offsets of pairs by node
  const I* node_pairs = nullptr;    // [pairs] pairs by node
  const I* type_ptr = nullptr;      // [types + 1] offsets of segments by relation
  const I* rows = nullptr;          // [segments] destination of each segment, by relation
  const I* ptr = nullptr;           // [segments + 1] offsets of the edges of segments, by relation
  const I* edge_ids = nullptr;      // [edges] edge ids by segment
  const I* segment_ptr = nullptr;   // [nodes + 1] offsets of segments by node
  const I* order = nullptr;         // [segments] for each segment by node, its index by relation
  int64_t edges = 0, pairs = 0, segments = 0, nodes = 0, types = 0;

  I* place_of_edge = nullptr;  // [edges] for each edge id, its index in the edges by pair
  // Arrays by node. The number of a segment is its index in this order.
  I* edge_pairs = nullptr;     // [edges] pair of each edge
  I* edge_segments = nullptr;  // [edges] segment number of each edge
  I* begins = nullptr;         // [segments + 1] offsets of the edges of segments
  I* places = nullptr;         // [edges] for each edge, its index in the edges by pair
  I* segment_types = nullptr;  // [segments] relation of each segment
  // Array by pair.
  I* pair_segments = nullptr;  // [edges] segment number of each edge
  // Array by relation.
  I* numbers = nullptr;  // [segments] number of each segment (its index by node)
  // The CSR of the sums of each node.
  I* sums_ptr = nullptr;       // [nodes + 1]
  I* columns = nullptr;        // [pairs + segments] a pair, or pairs + relation
  I* weights = nullptr;        // [pairs + segments] a pair, or pairs + segment number
  int64_t* longest = nullptr;  // [3] longest row of edges by node, of edges by pair, of the sums
};

// Writes, for index i in [0, max(edges, nodes)], the arrays that do not depend on the offsets of segments, and in
// begins[i] the edge count of segment number i. An exclusive scan must then turn begins into offsets.
template <class I>
constexpr void prepare_walks(const WalksArgs<I>& of, int64_t i) {
  if (i < of.edges) of.place_of_edge[of.pair_edges[i]] = static_cast<I>(i);
  if (i < of.segments) of.begins[i] = of.ptr[of.order[i] + 1] - of.ptr[of.order[i]];
  if (i == of.segments) of.begins[i] = 0;
  if (i <= of.nodes) of.sums_ptr[i] = of.node_ptr[i] + of.segment_ptr[i];
  if (i < of.pairs) {
    const I pair = of.node_pairs[i];
    const int64_t to = i + of.segment_ptr[of.pair_nodes[pair]];
    of.columns[to] = of.weights[to] = pair;
  }
}

// Writes the arrays of segment `number`. Needs the results of prepare_walks and the scanned begins.
template <class I>
constexpr void walk_segment(const WalksArgs<I>& of, int64_t number) {
  const int64_t segment = of.order[number], first = of.ptr[segment], count = of.ptr[segment + 1] - first;
  const int64_t type = first_behind(1, of.types, [&](int64_t t) { return of.type_ptr[t] > segment; }) - 1;
  const int64_t to = number + of.node_ptr[of.rows[segment] + 1];
  of.segment_types[number] = static_cast<I>(type), of.numbers[segment] = static_cast<I>(number);
  of.columns[to] = static_cast<I>(of.pairs + type), of.weights[to] = static_cast<I>(of.pairs + number);
  for (int64_t i = 0; i < count; ++i) {
    const I id = of.edge_ids[first + i], place = of.place_of_edge[id];
    const int64_t at = of.begins[number] + i;
    of.edge_pairs[at] = of.pair_of_edge[id], of.edge_segments[at] = static_cast<I>(number);
    of.places[at] = place, of.pair_segments[place] = static_cast<I>(number);
  }
}

// The row length that index i contributes to longest[which].
template <class I>
constexpr int64_t walk_length(const WalksArgs<I>& of, int which, int64_t i) {
  const I* ptr = which == 0 ? of.indptr : which == 1 ? of.pair_ptr : of.sums_ptr;
  return i < (which == 1 ? of.pairs : of.nodes) ? int64_t{ptr[i + 1]} - ptr[i] : 0;
}

}  // namespace edgeless
