// The kernels that divide segments and rows into tiles of bounded work (../tiling.h), with a thread per item.
//
// Every tile finds its first segment or row by a binary search. In a graph with hubs, which are rows of very many
// segments, added_kernel counts what each row sums, two exclusive scans (common/scan.h) turn the counts into offsets,
// and place_kernel writes every segment to its row's list. Totals are integers, so the order of their atomic additions
// does not change them.
#pragma once

#include <cstdint>

#include "../../common/scan.cuh"
#include "../../common/threads.cuh"
#include "tiling.h"

namespace edgeless::cuda::relational {

// A single block: types are few beside edges.
template <class I>
__global__ void __launch_bounds__(kTypeThreads) type_tiles_kernel(Tiling<I> args, int64_t* totals) {
  __shared__ I of_warps[kTypeThreads / 32];
  I before = 0;
  for (int64_t first = 0; first <= args.types; first += kTypeThreads) {
    const int64_t type = first + threadIdx.x;
    const I count = type < args.types ? static_cast<I>(tiles_of_type(args, type)) : I(0);
    const Scanned<I> tiles = scan_of_threads<Scan::sum>(count, of_warps);
    if (type <= args.types) args.type_tiles[type] = before + tiles.before;
    before += tiles.all;
  }
  if (totals && threadIdx.x < 2) totals[threadIdx.x] = 0;
}

template <class I>
__global__ void tiles_kernel(Tiling<I> args, int64_t* totals) {
  const int64_t i = thread_id();
  if (i < args.num_tiles()) args.tiles[i] = static_cast<I>(first_segment_of_tile(args, i));
  if (!totals || i >= args.num_rows) return;
  const int64_t segments = args.segments_of_row(i);
  if (!is_hub(segments)) return;
  auto* of = reinterpret_cast<unsigned long long*>(totals);
  atomicAdd(of, static_cast<unsigned long long>(parts_of_hub(segments)));
  atomicAdd(of + 1, static_cast<unsigned long long>(segments));
}

template <class I>
__global__ void added_kernel(Tiling<I> args) {
  const int64_t row = thread_id();
  if (row > args.num_rows) return;
  const int64_t segments = row < args.num_rows ? args.segments_of_row(row) : 0;
  const int64_t parts = is_hub(segments) ? parts_of_hub(segments) : 0;
  args.hub_parts[row] = static_cast<I>(parts);
  args.of_rows[row] = static_cast<I>(parts ? parts : segments);
}

template <class I>
__global__ void place_kernel(Tiling<I> args) {
  const int64_t place = thread_id();
  if (place < args.by_row[args.num_rows]) place_segment(args, place);
}

template <class I>
__global__ void row_tiles_kernel(const I* ptr, int64_t num_rows, int64_t count, I* row_tiles) {
  const int64_t tile = thread_id();
  if (tile < count) row_tiles[tile] = static_cast<I>(first_row_of_tile(ptr, num_rows, tile));
}

}  // namespace edgeless::cuda::relational
