// Divides segments, and the rows that sum them, into tiles of bounded work. Each function is the work of one thread of
// the CUDA kernels and of one iteration of the CPU's loops. No torch.
//
// The cost of a segment is its edges plus kOfSegment. A tile holds the segments of one type that begin within kOfTile
// of cost, so at most 64 (cuda/segment_tiles.h), and tiles take equally long whatever the degrees. The cost of a row is
// what it sums plus kOfRow, and a tile of rows holds those that begin within kOfRowTile. A row sums at most kHubPart
// segments itself. A row with more is a hub: its segments are summed in parts of kHubPart first, and the hub sums its
// parts.
#pragma once

#include <cstdint>

#include "../common/search.h"

namespace edgeless {

constexpr int64_t kOfTile = 576, kOfSegment = 8;
constexpr int64_t kOfRowTile = 1024, kOfRow = 16;
constexpr int64_t kHubPart = 512;

// Input: segments as typed_edges returns them. I: int32_t or int64_t.
template <class I>
struct Tiling {
  const I* type_ptr = nullptr;  // [types + 1] first segment of every type
  const I* rows = nullptr;      // [segments] row of every segment
  const I* ptr = nullptr;       // [segments + 1] first edge of every segment
  const I* by_row = nullptr;    // [num_rows + 1] row pointers into the segments in the order of rows, which follow
  int64_t types = 0, segments = 0, num_rows = 0, edges = 0;

  I* type_tiles = nullptr;  // [types + 1] first tile of every type
  I* tiles = nullptr;       // [num_tiles()] first segment of every tile; after the last tile the number of segments
  I* row_tiles = nullptr;   // [num_row_tiles(added)] first row of every tile; after the last tile the number of rows

  // If there are hubs:
  I* hub_parts = nullptr;  // [num_rows + 1] first part of every row
  I* of_rows = nullptr;    // laid out as by_row: what every row sums, with parts numbered after the segments
  I* parts = nullptr;      // [2, num_parts] begin and end of every part in by_row
  int64_t num_parts = 0;

  constexpr int64_t num_tiles() const { return (edges + kOfSegment * segments) / kOfTile + types + 1; }
  // added: the number of segments and parts that all rows sum.
  constexpr int64_t num_row_tiles(int64_t added) const {
    return (added + kOfRow * num_rows + kOfRowTile - 1) / kOfRowTile + 1;
  }
  constexpr int64_t place(int64_t segment) const { return ptr[segment] + kOfSegment * segment; }
  constexpr int64_t segments_of_row(int64_t row) const { return by_row[row + 1] - by_row[row]; }
};

template <class I>
constexpr int64_t tiles_of_type(const Tiling<I>& of, int64_t type) {
  return (of.place(of.type_ptr[type + 1]) - of.place(of.type_ptr[type]) + kOfTile - 1) / kOfTile;
}

// Requires type_tiles.
template <class I>
constexpr int64_t first_segment_of_tile(const Tiling<I>& of, int64_t tile) {
  if (of.types == 0) return 0;
  const I* type_tiles = of.type_tiles;
  const int64_t type = first_behind(1, of.types, [=](int64_t t) { return type_tiles[t] > tile; }) - 1;
  const int64_t begin = of.type_ptr[type], end = of.type_ptr[type + 1];
  const int64_t place = of.place(begin) + kOfTile * (tile - type_tiles[type]);
  return first_behind(begin, end, [&of, place](int64_t segment) { return of.place(segment) >= place; });
}

// ptr [num_rows + 1]: the row pointers of by_row or, if there are hubs, of of_rows.
template <class I>
constexpr int64_t first_row_of_tile(const I* ptr, int64_t num_rows, int64_t tile) {
  const int64_t place = kOfRowTile * tile;
  return first_behind(0, num_rows, [=](int64_t row) { return ptr[row] + kOfRow * row >= place; });
}

constexpr bool is_hub(int64_t segments) { return segments > kHubPart; }
constexpr int64_t parts_of_hub(int64_t segments) { return (segments + kHubPart - 1) / kHubPart; }

// Writes the segment at index `place` of by_row to its row's list in of_rows; in a hub, writes the part that begins
// with the segment, if one does. Requires hub_parts and the row pointers of of_rows.
template <class I>
constexpr void place_segment(const Tiling<I>& of, int64_t place) {
  const I segment = of.by_row[of.num_rows + 1 + place], row = of.rows[segment];
  const int64_t inside = place - of.by_row[row], end = of.by_row[row + 1];
  I* added = of.of_rows + of.num_rows + 1 + of.of_rows[row];
  if (!is_hub(of.segments_of_row(row))) {
    added[inside] = segment;
  } else if (inside % kHubPart == 0) {
    const int64_t part = of.hub_parts[row] + inside / kHubPart;
    added[inside / kHubPart] = static_cast<I>(of.segments + part);
    of.parts[part] = static_cast<I>(place);
    of.parts[of.num_parts + part] = static_cast<I>(place + kHubPart < end ? place + kHubPart : end);
  }
}

}  // namespace edgeless
