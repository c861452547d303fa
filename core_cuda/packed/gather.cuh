// The kernel that gathers a batch's attributes from packed ones. A thread copies one unit; blockIdx.y selects the
// column.
#pragma once

#include <cstdint>

#include "../common/search.h"
#include "../common/threads.cuh"
#include "columns.h"

namespace edgeless::cuda {

// N: a signed integer type of the unit's size. W: the unsigned type of that size, in which sums wrap.
template <class N, class W>
__device__ void write_number(const PackedColumn& column, int64_t from, int64_t to, int64_t graph, int64_t place) {
  N number =
      column.last && place >= 0 ? static_cast<N>(column.last[place]) : reinterpret_cast<const N*>(column.from)[from];
  if (column.offsets) number = static_cast<N>(static_cast<W>(number) + static_cast<W>(column.offsets[graph]));
  reinterpret_cast<N*>(column.to)[to] = number;
}

__device__ void write_unit(const PackedColumn& column, int64_t to) {
  const int64_t units = column.row_bytes / column.unit, row = to / units, unit = to - row * units;
  const int64_t block = row / column.to_rows, entry = row - block * column.to_rows;
  const int64_t graph = first_behind(0, column.graphs, [&](int64_t g) { return column.starts[g + 1] > entry; });
  const int64_t within = entry - column.starts[graph];
  const int64_t wanted = column.begins[graph] + within, end = column.from_rows - 1;
  const int64_t from = (block * column.from_rows + (wanted < end ? wanted : end)) * units + unit;
  const bool is_last = graph == column.graphs - 1;
  const int64_t place = is_last ? block * (column.to_rows - column.starts[graph]) + within : -1;
  switch (column.unit) {
    case 1: return write_number<int8_t, uint8_t>(column, from, to, graph, place);
    case 2: return write_number<int16_t, uint16_t>(column, from, to, graph, place);
    case 4: return write_number<int32_t, uint32_t>(column, from, to, graph, place);
    case 8: return write_number<int64_t, uint64_t>(column, from, to, graph, place);
  }
  reinterpret_cast<uint4*>(column.to)[to] = reinterpret_cast<const uint4*>(column.from)[from];
}

__global__ void gather_packed_kernel(const __grid_constant__ PackedColumns columns) {
  const PackedColumn& column = columns.at[blockIdx.y];
  const int64_t at = thread_id();
  if (at < units_of(column)) write_unit(column, at);
}

}  // namespace edgeless::cuda
