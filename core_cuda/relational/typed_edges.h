// Sorts edges by (type, row) and divides them into segments for the typed ops. Input: one direction of a graph, whose
// edges are sorted by row, and the types of its edges.
//
// One stable radix sort pass (graph/edge_sort.h) sorts by type. A segment is a run of edges of one type and one row, at
// most `cut` long. Blocks of consecutive edges count the segments that begin in them; a scan of the counts gives each
// block the index of its first segment. Then the parts: they divide the segments, in the order of rows and of types
// within a row, such that all parts have equally many edges plus rows. A boundary is inside a row only if the row has
// at least an eighth of a part. No array has types * rows elements; parts * types is small beside the number of
// segments.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../graph/edge_sort.h"

namespace edgeless {

// Edges by row, the input of the sort by type. `visit` passes an edge's index in the CSR in place of its id.
template <typename Type, typename Index>
struct EdgesOfTypes {
  const Index* indptr;    // [rows + 1]
  const Index* edge_ids;  // [E]; null: the index in the CSR is the id
  const Type* types;      // [E], indexed by edge id
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
  Index* type_ptr;  // [types + 1] first segment of every type
  Index* rows;      // [E] row of every segment; not written beyond the last one
  Index* ptr;       // [E + 1] first edge of every segment
  Index* indices;   // [E]
  Index* edge_ids;  // [E]
  int64_t* parts;   // [num_parts + 1, 2 + types]: see TypedArgs in cpu/args.h
};

// The number of parts, from sizes alone, so that it is known at allocation: parts have enough segments of one type to
// amortize reading the type's weight, and there are enough parts for many threads.
inline int64_t num_typed_parts(int64_t rows, int64_t edges, int64_t types) {
  const int64_t fewest = 8 * types <= edges ? 8 : 1;
  const int64_t wanted = std::clamp<int64_t>(edges / (64 * std::max<int64_t>(types, 1)), fewest, 1024);
  return std::clamp<int64_t>((rows + edges) / 2048, 1, wanted);
}

// First segment of [begin, end) with a row of at least `row`. The rows of these segments must not decrease.
template <typename Index>
int64_t first_of_row(const TypedArrays<Index>& to, int64_t begin, int64_t end, int64_t row) {
  return std::lower_bound(to.rows + begin, to.rows + end, row) - to.rows;
}

template <typename Index, typename Parallel>
void cut_into_segments(const std::vector<int64_t>& starts, const Index* rows, int64_t edges, int64_t types, int64_t cut,
                       const TypedArrays<Index>& to, const Parallel& parallel) {
  const Blocks<Parallel> blocks(edges, kMinEdgesPerBlock, parallel);
  std::vector<int64_t> firsts(blocks.count + 1, 0);
  // Calls segment(p) for every edge p of the block that begins a segment and, before that, type_begins(type) for every
  // type that begins at p.
  const auto walk = [&](int64_t begin, int64_t end, const auto& segment, const auto& type_begins) {
    int64_t type = std::lower_bound(starts.begin(), starts.end() - 1, begin) - starts.begin();  // the next type
    int64_t run = begin;
    if (begin < end && (type == types || starts[type] > begin)) {  // the block may begin inside a run
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
        segment(p);
      } else if ((p - run) % cut == 0) {
        segment(p);
      }
    }
  };
  blocks.run([&](int64_t block, int64_t begin, int64_t end) {
    int64_t count = 0;
    walk(begin, end, [&](int64_t) { ++count; }, [](int64_t) {});
    firsts[block + 1] = count;
  });
  for (int64_t block = 0; block < blocks.count; ++block) firsts[block + 1] += firsts[block];
  const int64_t segments = firsts[blocks.count];
  blocks.run([&](int64_t block, int64_t begin, int64_t end) {
    int64_t next = firsts[block];
    const auto segment = [&](int64_t p) {
      to.rows[next] = rows[p];
      to.ptr[next++] = static_cast<Index>(p);
    };
    walk(begin, end, segment, [&](int64_t type) { to.type_ptr[type] = static_cast<Index>(next); });
  });
  to.ptr[segments] = static_cast<Index>(edges);
  for (int64_t type = types; type >= 0 && starts[type] == edges; --type)
    to.type_ptr[type] = static_cast<Index>(segments);
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
    int64_t inside = item - indptr[row] - row;  // edges of the row before the boundary
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
      int64_t segment = first_of_row(to, to.type_ptr[type], end, row);
      for (; inside > 0 && segment < end && to.rows[segment] == row; ++segment)
        inside -= to.ptr[segment + 1] - to.ptr[segment];
      boundary[2 + type] = segment;
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
  cut_into_segments(starts, rows.get(), num_edges, types, cut, to, parallel);
  cut_into_parts(edges.indptr, edges.rows, types, parts, to);
  return true;
}

}  // namespace edgeless
