// Equal shares of a compressed graph, whatever the degrees: no preprocessing, no atomics, no host sync.
//
// Rows and edges lie on one line: row r begins at indptr[r] + kRowUnits * r, first its kRowUnits (what a row costs
// besides its edges), then its edges. The line is cut every `range_units` into ranges, one for each block. A cut
// moves to the nearer end of its row, so that a block holds whole rows, unless the row is longer than a piece:
// those rows (hubs) are cut at multiples of `piece` edges from their start, and their pieces are merged afterwards.
// Inside a block the line is cut again, at any edge: its teams merge through shared memory.
//
// Pieces are kept by the position of the cut before them: two cuts are never less than `piece` edges apart, so
// (edge of the cut) / piece is a place of their own for each. The piece before a row's first cut has a second array.
#pragma once

#include <cstdint>

namespace edgeless::cuda {

constexpr int kRowUnits = 2;

struct Partition {
  int64_t range_units = 0;
  int64_t num_ranges = 0;
  int64_t piece = 0;  // at least a range
};

constexpr bool is_hub(int64_t degree, const Partition& part) { return degree > part.piece; }

// Whether rows may be cut. max_degree: edges of the max_degree one, -1 where nobody knows. The cuts do not depend on
// it.
constexpr bool may_cut(int64_t max_degree, int64_t num_edges, const Partition& part) {
  return is_hub(max_degree < 0 ? num_edges : max_degree, part);
}

// The place of the piece after a cut, and the number of places.
constexpr int64_t piece_slot(int64_t cut_edge, int64_t piece) { return cut_edge / piece; }
constexpr int64_t number_of_slots(int64_t num_edges, int64_t piece) { return num_edges / piece + 1; }

// The kernels that merge pieces: a block of kMergeThreads for each few slots.
constexpr int kSlotsOfBlock = 4, kMergeThreads = 32 * kSlotsOfBlock;
constexpr unsigned merge_blocks(int64_t slots) {
  return static_cast<unsigned>((slots + kSlotsOfBlock - 1) / kSlotsOfBlock);
}

}  // namespace edgeless::cuda
