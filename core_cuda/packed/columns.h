// Attributes of many graphs, concatenated, and the entries that a batch of some of the graphs gets. No CUDA and no
// torch.
#pragma once

#include <cstdint>

namespace edgeless {

// One attribute. The entries of graph g in the batch are starts[g] to starts[g + 1]; they are copies of the attribute's
// entries from begins[g] on. Where the attribute has too few entries, its last one is repeated.
struct PackedColumn {
  const char* from = nullptr;  // [outer, from_rows, row_bytes]
  char* to = nullptr;          // [outer, to_rows, row_bytes]
  int64_t outer = 0, from_rows = 0, to_rows = 0, row_bytes = 0;
  const int64_t* starts = nullptr;   // [graphs + 1], from 0 to to_rows
  const int64_t* begins = nullptr;   // [graphs]
  const int64_t* offsets = nullptr;  // [graphs]: added to all values of a graph; null: no offsets
  const int64_t* last = nullptr;     // [outer, entries of the last graph]: these entries; null: they are in `from`
  int64_t graphs = 0;
  int32_t unit = 1;  // bytes copied at once; the size of one value if `offsets` or `last` is given
};

constexpr int kMostColumns = 24;
struct PackedColumns {
  PackedColumn at[kMostColumns];
  int count = 0;
};

// Number of units that a column writes.
constexpr int64_t units_of(const PackedColumn& column) {
  return column.outer * column.to_rows * (column.row_bytes / column.unit);
}

}  // namespace edgeless
