// Edges that are sorted by row, sorted by (type, row) and cut into pieces: from a direction of a graph and the types of
// its edges to what typed products walk.
//
// One stable pass of the radix sort of graph/edge_sort.h over the types. A piece is a run of edges of one type and one
// row, at most `cut` long. Blocks of consecutive edges count the pieces that begin in them, and write them from the sum
// of the counts before. Then the parts: the pieces are also laid end to end in the order of rows, and of types within a
// row, and cut where equal numbers of edges and rows lie between. A boundary is at the beginning of a row unless the
// row alone is a good part of a part. Nothing is of the size of types times rows; parts times types are few beside
// pieces.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../graph/edge_sort.h"

namespace edgeless {

// Edges by row, to be sorted by their types. `visit` hands on the position in place of the id.
template <typename Type, typename Index>
struct EdgesOfTypes {
  const Index* indptr;    // [rows + 1]
  const Index* edge_ids;  // [E] or null: the position is the id
  const Type* types;      // [E] by id
  int64_t rows;

  int64_t key(int64_t position) const { return types[edge_ids ? edge_ids[position] : position]; }

  template <typename F>
  void visit(int64_t begin, int64_t end, const F& f) const {
    int64_t row = std::upper_bound(indptr, indptr + rows + 1, static_cast<Index>(begin)) - indptr - 1;
    for (int64_t p = begin; p < end; ++p) {
      while (indptr[row + 1] <= p) ++row;
      f(key(p), row, static_cast<Index>(p));
    }
  }
};

template <typename Index>
struct TypedArrays {
  Index* type_ptr;  // [types + 1] pieces of a type
  Index* rows;      // [E] row of a piece; what is behind the last piece is not written
  Index* ptr;       // [E + 1] edges of a piece
  Index* indices;   // [E]
  Index* edge_ids;  // [E]
  int64_t* parts;   // [num_parts + 1, 2 + types]: see TypedArgs in cpu/args.h
};

// From sizes alone, so that who allocates knows it: enough pieces of one type in a part for the type's weight to be
// read once for many, and enough parts for many threads.
inline int64_t num_typed_parts(int64_t rows, int64_t edges, int64_t types) {
  const int64_t fewest = 8 * types <= edges ? 8 : 1;
  const int64_t wanted = std::clamp<int64_t>(edges / (64 * std::max<int64_t>(types, 1)), fewest, 1024);
  return std::clamp<int64_t>((rows + edges) / 2048, 1, wanted);
}

// First piece of [begin, end), whose rows do not fall, with a row of at least `row`.
template <typename Index>
int64_t first_of_row(const TypedArrays<Index>& to, int64_t begin, int64_t end, int64_t row) {
  return std::lower_bound(to.rows + begin, to.rows + end, row) - to.rows;
}

template <typename Index, typename Parallel>
void cut_into_pieces(const std::vector<int64_t>& starts, const Index* rows, int64_t edges, int64_t types, int64_t cut,
                     const TypedArrays<Index>& to, const Parallel& parallel) {
  const Blocks<Parallel> blocks(edges, kMinEdgesPerBlock, parallel);
  std::vector<int64_t> firsts(blocks.count + 1, 0);
  // f(position, type) for every edge of a block that begins a piece, g(type, position) before, for every type's first
  const auto walk = [&](int64_t begin, int64_t end, const auto& piece, const auto& type_begins) {
    int64_t type = std::lower_bound(starts.begin(), starts.end() - 1, begin) - starts.begin();  // the next to begin
    int64_t run = begin;
    if (begin < end && (type == types || starts[type] > begin)) {  // may be inside of a run
      run = std::lower_bound(rows + starts[type - 1], rows + begin, rows[begin]) - rows;
    }
    for (int64_t p = begin; p < end; ++p) {
      bool fresh = p == run;
      for (; type < types && starts[type] == p; ++type) {
        type_begins(type);
        fresh = true;
      }
      if (fresh || rows[p] != rows[p - 1]) {
        run = p;
        piece(p);
      } else if ((p - run) % cut == 0) {
        piece(p);
      }
    }
  };
  blocks.run([&](int64_t block, int64_t begin, int64_t end) {
    int64_t count = 0;
    walk(begin, end, [&](int64_t) { ++count; }, [](int64_t) {});
    firsts[block + 1] = count;
  });
  for (int64_t block = 0; block < blocks.count; ++block) firsts[block + 1] += firsts[block];
  const int64_t pieces = firsts[blocks.count];
  blocks.run([&](int64_t block, int64_t begin, int64_t end) {
    int64_t next = firsts[block];
    const auto piece = [&](int64_t p) {
      to.rows[next] = rows[p];
      to.ptr[next++] = static_cast<Index>(p);
    };
    walk(begin, end, piece, [&](int64_t type) { to.type_ptr[type] = static_cast<Index>(next); });
  });
  to.ptr[pieces] = static_cast<Index>(edges);
  for (int64_t type = types; type >= 0 && starts[type] == edges; --type) to.type_ptr[type] = static_cast<Index>(pieces);
}

template <typename Index>
void cut_into_parts(const Index* indptr, int64_t num_rows, int64_t types, int64_t parts, const TypedArrays<Index>& to) {
  const int64_t items = num_rows + indptr[num_rows], long_row = items / parts / 8;
  for (int64_t part = 0; part <= parts; ++part) {
    int64_t* boundary = to.parts + part * (2 + types);
    const int64_t item = items / parts * part + std::min(part, items % parts);
    int64_t row = 0, above = num_rows;  // the last row with indptr[row] + row <= item
    while (above - row > 1) {
      const int64_t middle = row + (above - row) / 2;
      (indptr[middle] + middle <= item) ? row = middle : above = middle;
    }
    int64_t inside = item - indptr[row] - row;  // edges of the row that come before
    const int64_t degree = num_rows ? indptr[row + 1] - indptr[row] : 0;
    if (inside >= degree) {
      row = std::min(row + (part > 0), num_rows), inside = 0;
    } else if (degree < long_row) {
      inside = 0;
    }
    if (part == 0) row = inside = 0;
    if (part == parts) row = num_rows, inside = 0;
    boundary[0] = row;
    boundary[1] = inside > 0;
    for (int64_t type = 0; type < types; ++type) {
      const int64_t end = to.type_ptr[type + 1];
      int64_t piece = first_of_row(to, to.type_ptr[type], end, row);
      for (; inside > 0 && piece < end && to.rows[piece] == row; ++piece) inside -= to.ptr[piece + 1] - to.ptr[piece];
      boundary[2 + type] = piece;
    }
  }
}

// Returns false, with unspecified results, when a type is outside [0, types).
template <typename Type, typename Index, typename Parallel>
bool sort_by_type(const EdgesOfTypes<Type, Index>& edges, const Index* indices, int64_t num_edges, int64_t types,
                  int64_t cut, int64_t parts, const TypedArrays<Index>& to, const Parallel& parallel) {
  RangeCheck check{types, edges.rows};
  const int64_t bins = int64_t{1} << bits_for(types);
  const Blocks<Parallel> blocks(num_edges, std::max(kMinEdgesPerBlock, 4 * bins), parallel);
  auto rows = large_array<Index>(num_edges + 1);
  const auto counts = radix_pass<Index>(edges, blocks, 0, bins, [&](Index at, int64_t type, int64_t row, Index p) {
    check(type, row);
    rows[at] = static_cast<Index>(row);
    to.indices[at] = indices[p];
    to.edge_ids[at] = edges.edge_ids ? edges.edge_ids[p] : p;
  });
  if (!check.passed) return false;
  std::vector<int64_t> starts(counts.begin(), counts.begin() + types);
  starts.push_back(num_edges);
  cut_into_pieces(starts, rows.get(), num_edges, types, cut, to, parallel);
  cut_into_parts(edges.indptr, edges.rows, types, parts, to);
  return true;
}

}  // namespace edgeless
