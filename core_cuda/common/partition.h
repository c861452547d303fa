// Equal quotas of a compressed graph for any degrees: no preprocessing, no atomics, no host sync.
//
// The rows and their edges form one line of units: row r begins at unit indptr[r] + kRowUnits * r with kRowUnits units
// (the cost of a row besides its edges), followed by one unit per edge. The line is cut every `range_units` into
// ranges, one per block. A cut moves to the nearer end of its row, so that a block holds whole rows, unless the row has
// more than `segment` edges. These rows, the hubs, are cut at multiples of `segment` edges from their start, and a
// second kernel merges their segments. Inside a block the line is cut again, at any edge: the block's workers merge
// through shared memory.
//
// A segment's slot in the fix-up workspace follows from the edge of the cut before it: two cuts are never less than
// `segment` edges apart, so (edge of the cut) / segment is a unique slot. The segment before a row's first cut is
// stored to a second array, in the slot of that cut.
#pragma once

#include <cstdint>

namespace edgeless::cuda {

constexpr int kRowUnits = 2;

struct Partition {
  int64_t range_units = 0;
  int64_t num_ranges = 0;
  int64_t segment = 0;  // edges per segment of a hub, at least range_units
};

constexpr bool is_hub(int64_t degree, const Partition& part) { return degree > part.segment; }

// True if rows may be split. max_degree: edges of the longest row, -1 if unknown; the cuts do not depend on it.
constexpr bool may_cut(int64_t max_degree, int64_t num_edges, const Partition& part) {
  return is_hub(max_degree < 0 ? num_edges : max_degree, part);
}

// The fix-up slot of the segment after a cut, and the number of slots.
constexpr int64_t segment_slot(int64_t cut_edge, int64_t segment) { return cut_edge / segment; }
constexpr int64_t number_of_slots(int64_t num_edges, int64_t segment) { return num_edges / segment + 1; }

// Merge kernels: one block of kMergeThreads threads per kSlotsOfBlock slots, a warp for each slot.
constexpr int kSlotsOfBlock = 4, kMergeThreads = 32 * kSlotsOfBlock;
constexpr unsigned merge_blocks(int64_t slots) {
  return static_cast<unsigned>((slots + kSlotsOfBlock - 1) / kSlotsOfBlock);
}

}  // namespace edgeless::cuda
