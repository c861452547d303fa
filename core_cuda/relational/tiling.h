// Pieces, and the rows that add them up, cut into tiles of bounded work: what a thread of the CUDA kernels does and a
// turn of the loops on the CPU. No torch.
//
// Pieces of one type are a tile where their edges and kOfPiece for each of them come to no more than kOfTile: then 64
// pieces are the most (cuda/piece_tiles.h), and tiles take equally long whatever the degrees. The same of rows and what
// they add up, kOfRow for each row and kOfRowTile in all. A row adds up at most kHubPart pieces itself; one of more is
// a hub, whose pieces are added up in parts of so many first, and the hub adds up its parts.
#pragma once

#include <cstdint>

#include "../common/search.h"

namespace edgeless {

constexpr int64_t kOfTile = 576, kOfPiece = 8;
constexpr int64_t kOfRowTile = 1024, kOfRow = 16;
constexpr int64_t kHubPart = 512;

// In: pieces as typed_edges gives them. I: int32_t or int64_t.
template <class I>
struct Tiling {
  const I* type_ptr = nullptr;  // [types + 1] first piece of a type
  const I* rows = nullptr;      // [pieces] row of a piece
  const I* ptr = nullptr;       // [pieces + 1] first edge of a piece
  const I* by_row = nullptr;    // [num_rows + 1] first place of a row, and behind it the pieces in the order of rows
  int64_t types = 0, pieces = 0, num_rows = 0, edges = 0;

  I* type_tiles = nullptr;  // [types + 1] first tile of a type
  I* tiles = nullptr;       // [num_tiles()] first piece of a tile; behind the last tile the number of pieces
  I* row_tiles = nullptr;   // [num_row_tiles(added)] first row of a tile; behind the last tile the number of rows

  // Where there are hubs:
  I* hub_parts = nullptr;  // [num_rows + 1] first part of a row
  I* of_rows = nullptr;    // as by_row: what a row adds up, the parts being numbered behind the pieces
  I* parts = nullptr;      // [2, num_parts] from which place of by_row's to which
  int64_t num_parts = 0;

  constexpr int64_t num_tiles() const { return (edges + kOfPiece * pieces) / kOfTile + types + 1; }
  // added: what the rows add up, all together
  constexpr int64_t num_row_tiles(int64_t added) const {
    return (added + kOfRow * num_rows + kOfRowTile - 1) / kOfRowTile + 1;
  }
  constexpr int64_t place(int64_t piece) const { return ptr[piece] + kOfPiece * piece; }
  constexpr int64_t pieces_of_row(int64_t row) const { return by_row[row + 1] - by_row[row]; }
};

template <class I>
constexpr int64_t tiles_of_type(const Tiling<I>& of, int64_t type) {
  return (of.place(of.type_ptr[type + 1]) - of.place(of.type_ptr[type]) + kOfTile - 1) / kOfTile;
}

// type_tiles is there.
template <class I>
constexpr int64_t first_piece_of_tile(const Tiling<I>& of, int64_t tile) {
  if (of.types == 0) return 0;
  const I* type_tiles = of.type_tiles;
  const int64_t type = first_behind(1, of.types, [=](int64_t t) { return type_tiles[t] > tile; }) - 1;
  const int64_t begin = of.type_ptr[type], end = of.type_ptr[type + 1];
  const int64_t place = of.place(begin) + kOfTile * (tile - type_tiles[type]);
  return first_behind(begin, end, [&of, place](int64_t piece) { return of.place(piece) >= place; });
}

// ptr [num_rows + 1]: the begin of by_row, or of of_rows where there are hubs.
template <class I>
constexpr int64_t first_row_of_tile(const I* ptr, int64_t num_rows, int64_t tile) {
  const int64_t place = kOfRowTile * tile;
  return first_behind(0, num_rows, [=](int64_t row) { return ptr[row] + kOfRow * row >= place; });
}

constexpr bool is_hub(int64_t pieces) { return pieces > kHubPart; }
constexpr int64_t parts_of_hub(int64_t pieces) { return (pieces + kHubPart - 1) / kHubPart; }

// Of the piece at `place` of by_row's: where its row adds it up, or the part that begins with it. hub_parts and the
// begin of of_rows are there.
template <class I>
constexpr void place_piece(const Tiling<I>& of, int64_t place) {
  const I piece = of.by_row[of.num_rows + 1 + place], row = of.rows[piece];
  const int64_t inside = place - of.by_row[row], end = of.by_row[row + 1];
  I* added = of.of_rows + of.num_rows + 1 + of.of_rows[row];
  if (!is_hub(of.pieces_of_row(row))) {
    added[inside] = piece;
  } else if (inside % kHubPart == 0) {
    const int64_t part = of.hub_parts[row] + inside / kHubPart;
    added[inside / kHubPart] = static_cast<I>(of.pieces + part);
    of.parts[part] = static_cast<I>(place);
    of.parts[of.num_parts + part] = static_cast<I>(place + kHubPart < end ? place + kHubPart : end);
  }
}

}  // namespace edgeless
