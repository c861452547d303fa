// What attention over pairs walks, from edges by pair and pieces by type (shared/pair_attention.py): what a thread of
// the CUDA kernels does and a turn of the loops on the CPU. No torch.
#pragma once

#include <cstdint>

#include "../common/search.h"

namespace edgeless {

// I: int32_t or int64_t. A node's pairs are those that it is the source of, its pieces those that it is the destination
// of.
template <class I>
struct WalksArgs {
  const I* indptr = nullptr;        // [nodes + 1] edges by node
  const I* pair_ptr = nullptr;      // [pairs + 1] edges by pair
  const I* pair_edges = nullptr;    // [edges] their ids
  const I* pair_of_edge = nullptr;  // [edges] by id
  const I* pair_nodes = nullptr;    // [pairs]
  const I* node_ptr = nullptr;      // [nodes + 1] pairs by node
  const I* node_pairs = nullptr;    // [pairs]
  const I* type_ptr = nullptr;      // [types + 1] pieces by type
  const I* rows = nullptr;          // [pieces] their nodes
  const I* ptr = nullptr;           // [pieces + 1] their edges
  const I* edge_ids = nullptr;      // [edges] these edges' ids
  const I* piece_ptr = nullptr;     // [nodes + 1] pieces by node
  const I* order = nullptr;         // [pieces]
  int64_t edges = 0, pairs = 0, pieces = 0, nodes = 0, types = 0;

  I* place_of_edge = nullptr;  // [edges] by id: where it is by pair
  // By node, a piece's number being its place there:
  I* edge_pairs = nullptr;   // [edges] the pairs of the edges
  I* edge_pieces = nullptr;  // [edges] and their pieces
  I* begins = nullptr;       // [pieces + 1] the first edge of a piece
  I* places = nullptr;       // [edges] where the edges are by pair
  I* piece_types = nullptr;  // [pieces]
  // By pair:
  I* pair_pieces = nullptr;  // [edges] the pieces of the edges
  // By type:
  I* numbers = nullptr;  // [pieces] the numbers of pieces
  // What a node sums:
  I* sums_ptr = nullptr;       // [nodes + 1]
  I* columns = nullptr;        // [pairs + pieces] a pair; or a type, counted from behind the pairs
  I* weights = nullptr;        // [pairs + pieces] a pair; or a piece's number, counted from behind the pairs
  int64_t* longest = nullptr;  // [3] the most edges of a node and of a pair, and the most that a node sums
};

// What does not need to know where pieces begin, for i up to the number of edges and up to that of nodes; and the edges
// of the piece of number i, for their sum to become where it begins.
template <class I>
constexpr void prepare_walks(const WalksArgs<I>& of, int64_t i) {
  if (i < of.edges) of.place_of_edge[of.pair_edges[i]] = static_cast<I>(i);
  if (i < of.pieces) of.begins[i] = of.ptr[of.order[i] + 1] - of.ptr[of.order[i]];
  if (i == of.pieces) of.begins[i] = 0;
  if (i <= of.nodes) of.sums_ptr[i] = of.node_ptr[i] + of.piece_ptr[i];
  if (i < of.pairs) {
    const I pair = of.node_pairs[i];
    const int64_t to = i + of.piece_ptr[of.pair_nodes[pair]];
    of.columns[to] = of.weights[to] = pair;
  }
}

// The piece of number `number`. What prepare_walks leaves is there.
template <class I>
constexpr void walk_piece(const WalksArgs<I>& of, int64_t number) {
  const int64_t piece = of.order[number], first = of.ptr[piece], count = of.ptr[piece + 1] - first;
  const int64_t type = first_behind(1, of.types, [&](int64_t t) { return of.type_ptr[t] > piece; }) - 1;
  const int64_t to = number + of.node_ptr[of.rows[piece] + 1];
  of.piece_types[number] = static_cast<I>(type), of.numbers[piece] = static_cast<I>(number);
  of.columns[to] = static_cast<I>(of.pairs + type), of.weights[to] = static_cast<I>(of.pairs + number);
  for (int64_t i = 0; i < count; ++i) {
    const I id = of.edge_ids[first + i], place = of.place_of_edge[id];
    const int64_t at = of.begins[number] + i;
    of.edge_pairs[at] = of.pair_of_edge[id], of.edge_pieces[at] = static_cast<I>(number);
    of.places[at] = place, of.pair_pieces[place] = static_cast<I>(number);
  }
}

// What `i` comes to of longest[which].
template <class I>
constexpr int64_t walk_length(const WalksArgs<I>& of, int which, int64_t i) {
  const I* ptr = which == 0 ? of.indptr : which == 1 ? of.pair_ptr : of.sums_ptr;
  return i < (which == 1 ? of.pairs : of.nodes) ? int64_t{ptr[i + 1]} - ptr[i] : 0;
}

}  // namespace edgeless
