// gather_packed on the CPU: copies one range of memory for each graph.
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "tensors.h"

namespace edgeless {
namespace {

using at::Tensor;

// Copies the attribute's entries from `begin` on to the entries `first` to `end` of a block.
void copy_entries(const PackedColumn& column, int64_t block, int64_t first, int64_t end, int64_t begin) {
  const char* from = column.from + block * column.from_rows * column.row_bytes;
  char* to = column.to + (block * column.to_rows + first) * column.row_bytes;
  const int64_t there = std::clamp<int64_t>(column.from_rows - begin, 0, end - first);
  std::memcpy(to, from + begin * column.row_bytes, there * column.row_bytes);
  for (int64_t entry = first + there; entry < end; ++entry) {
    to = column.to + (block * column.to_rows + entry) * column.row_bytes;
    std::memcpy(to, from + (column.from_rows - 1) * column.row_bytes, column.row_bytes);
  }
}

// W: an unsigned integer type, in which sums wrap.
template <typename W>
void add_offset(const PackedColumn& column, int64_t block, int64_t first, int64_t end, int64_t offset) {
  const int64_t numbers = column.row_bytes / static_cast<int64_t>(sizeof(W));
  W* to = reinterpret_cast<W*>(column.to) + block * column.to_rows * numbers;
  for (int64_t i = first * numbers; i < end * numbers; ++i) to[i] = static_cast<W>(to[i] + static_cast<W>(offset));
}

template <typename W>
void copy_last(const PackedColumn& column, int64_t block, int64_t first, int64_t end) {
  W* to = reinterpret_cast<W*>(column.to) + block * column.to_rows;
  const int64_t* last = column.last + block * (end - first) - first;
  for (int64_t i = first; i < end; ++i) to[i] = static_cast<W>(last[i]);
}

template <typename F>
void with_unsigned(int32_t bytes, const F& f) {
  switch (bytes) {
    case 1: return f(uint8_t{});
    case 2: return f(uint16_t{});
    case 4: return f(uint32_t{});
    default: return f(uint64_t{});
  }
}

void write(const PackedColumn& column) {
  for (int64_t block = 0; block < column.outer; ++block) {
    for (int64_t graph = 0; graph < column.graphs; ++graph) {
      const int64_t first = column.starts[graph], end = column.starts[graph + 1];
      if (first == end) continue;
      const auto into = [&](auto number) {
        using W = decltype(number);
        if (column.last && graph == column.graphs - 1) {
          copy_last<W>(column, block, first, end);
        } else {
          copy_entries(column, block, first, end, column.begins[graph]);
        }
        if (column.offsets) add_offset<W>(column, block, first, end, column.offsets[graph]);
      };
      with_unsigned(column.unit, into);
    }
  }
}

std::vector<Tensor> gather_packed_cpu(at::TensorList columns, at::IntArrayRef dims, at::IntArrayRef levels,
                                      at::IntArrayRef increments, const c10::List<Optional<Tensor>>& last,
                                      const Tensor& starts, const Tensor& begins, at::IntArrayRef sizes) {
  auto [made, found] = packed_columns({columns, dims, levels, increments, last, starts, begins, sizes});
  for (const PackedColumn& column : found) write(column);
  return made;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CPU, m) { m.impl("gather_packed", gather_packed_cpu); }

}  // namespace edgeless
