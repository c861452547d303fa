// Divides the edges of a small typed graph into segments in one cooperative launch (few_segments.h has the shapes). A
// CSR graph has its edges sorted by destination row; this kernel sorts them by type and, within a type, by row. A
// segment is a run of edges of one type and one row, or a part of `cut` edges of a longer run.
//
// The thread blocks synchronize between the steps: a radix sort by type (graph/grid_sort.cuh), the count of the
// segments, their first edges and rows, and a second sort of the segments by row. For few edges the launches of
// separate kernels would take most of the time.
#pragma once

#include "../../graph/grid_sort.cuh"
#include "few_segments.h"

namespace edgeless::cuda::relational {

// Edges sorted by type and row. begins_segment() says whether a segment begins at an edge.
struct SortedEdges {
  const int32_t *types, *rows;
  int32_t cut;

  __device__ bool alike(int32_t p, int32_t q) const { return types[p] == types[q] && rows[p] == rows[q]; }
  __device__ bool begins_type(int32_t p) const { return p == 0 || types[p] != types[p - 1]; }
  // In a run of edges of one type and row, the first edge and every cut-th edge after it begin a segment.
  __device__ bool begins_segment(int32_t p) const {
    if (p == 0 || !alike(p, p - 1)) return true;
    if (p < cut || !alike(p, p - cut)) return false;
    const int64_t first = first_behind(
        0, p, [&](int64_t q) { return types[q] > types[p] || (types[q] == types[p] && rows[q] >= rows[p]); });
    return (p - first) % cut == 0;
  }
};

// Number of segments that begin before the items of this warp, and of all segments.
struct SegmentsBefore {
  int32_t before, all;
};

// Counts the segments of all warps. of_blocks [blocks] is scratch. Synchronizes the grid.
inline __device__ SegmentsBefore count_segments(const SortedEdges& edges, int32_t count, int32_t* of_blocks) {
  __shared__ int32_t of_warps[kGridWarps];
  const int warp = threadIdx.x / 32;
  int32_t own = 0;
  for_own_items(count, [&](int32_t p, bool inside) {
    own += __popc(__ballot_sync(kFullWarp, inside && edges.begins_segment(p)));
  });
  if (threadIdx.x % 32 == 0) of_warps[warp] = own;
  __syncthreads();
  SegmentsBefore found{0, 0};
  for (int w = 0; w < kGridWarps; ++w) {
    if (w == warp) found.before = found.all;
    found.all += of_warps[w];
  }
  if (threadIdx.x == 0) of_blocks[blockIdx.x] = found.all;
  sync_grid();
  found.all = 0;
  for (int b = 0; b < static_cast<int>(gridDim.x); ++b) {
    if (b == static_cast<int>(blockIdx.x)) found.before += found.all;
    found.all += of_blocks[b];
  }
  return found;
}

// Types out of range are reported in facts[0] and never cause writes out of bounds.
template <class T>
__global__ void __launch_bounds__(kGridThreads) few_segments_kernel(const __grid_constant__ FewSegments<T> launch) {
  __shared__ GridSortRoom room;
  const FewTypedArgs<T>& args = launch.of;
  const int32_t count = args.edges;
  if (blockIdx.x == 0 && threadIdx.x < 2) args.facts[threadIdx.x] = 0;
  grid_sort(count, args.num_types, launch.sort, room,
            [&](int32_t i) { return static_cast<int32_t>(args.types[args.edge_ids ? args.edge_ids[i] : i]); });

  int32_t *types = launch.sort.keys[0], *rows = launch.rows;
  for_items(count, [&](int32_t p) {
    const int32_t from = launch.sort.places[0][p];
    rows[p] = row_of_position(args.indptr, args.num_rows, from);
    args.to_indices[p] = args.indices[from];
    args.to_ids[p] = args.edge_ids ? args.edge_ids[from] : from;
    if (args.types[p] < 0 || args.types[p] >= args.num_types) args.facts[0] = 1;
  });
  sync_grid();

  const SortedEdges edges{types, rows, args.cut};
  SegmentsBefore segments = count_segments(edges, count, launch.sort.of_blocks);
  for_own_items(count, [&](int32_t p, bool inside) {
    const bool begins = inside && edges.begins_segment(p);
    const unsigned beginning = __ballot_sync(kFullWarp, begins);
    const int32_t segment = segments.before + __popc(beginning & ((1u << threadIdx.x % 32) - 1));
    segments.before += __popc(beginning);
    if (!begins) return;
    args.segment_rows[segment] = rows[p], args.ptr[segment] = p;
    if (!edges.begins_type(p)) return;
    const int32_t last = min(types[p], args.num_types);
    for (int32_t type = p ? max(types[p - 1] + 1, 0) : 0; type <= last; ++type) args.type_ptr[type] = segment;
  });
  const int32_t last_type = count ? types[count - 1] : -1;
  for_items(args.num_types + 1, [&](int32_t type) {
    if (type > last_type) args.type_ptr[type] = segments.all;
  });
  for_items(count + 1, [&](int32_t p) {
    if (p < segments.all) return;
    args.ptr[p] = count;
    if (p < count) args.segment_rows[p] = args.num_rows;
  });
  if (blockIdx.x == 0 && threadIdx.x == 0) args.facts[1] = segments.all;
  sync_grid();

  int32_t* by_rows = args.by_row + args.num_rows + 1;
  GridSortArgs sort = launch.sort;
  sort.places[0] = by_rows;
  grid_sort(segments.all, args.num_rows, sort, room, [&](int32_t i) { return args.segment_rows[i]; });
  find_rows(sort.keys[0], segments.all, args.num_rows, args.by_row);
  for_items(count, [&](int32_t p) {
    if (p >= segments.all) by_rows[p] = 0;
  });
}

}  // namespace edgeless::cuda::relational
