// Sums the edges of a tile's segments: float rows here, into rows of shared memory, and 16-bit rows in tensor_sums.cuh.
// The sums of rows use the same code, with rows as segments and neighbours as edges.
//
// A sub-warp, mostly a whole warp, holds one neighbour's row. The edges of a tile are contiguous, and all sub-warps
// have the same quota of them, whatever segments these belong to: a hub's segment is divided among many sub-warps, and
// one sub-warp sums several short segments. If several sub-warps sum a segment, the first one stores its sum to the
// tile and the others store theirs as leads, which the second one adds in order.
//
// Instructions are the limit here, not bytes. So each lane looks up one edge, its row and the address of its segment's
// sum, and stores them in shared memory, from which all lanes read four edges at once; rows are copied to shared memory
// by cp.async, up to sixteen ahead; and the end of a segment takes no branch.
//
// A sub-warp has few edges of a tile, so it also prefetches across tiles. The first rows of the next tile are in flight
// while a tile is multiplied; the ids of the next tile's edges, and the begins of segments in the tile after it, are in
// flight while a tile is summed.
#pragma once

#include <climits>

#include "../../common/words.cuh"
#include "../../projection/cuda/tiles.cuh"
#include "entries.cuh"
#include "segment_tiles.h"
#include "shared_access.cuh"
#include "shared_layout.h"

namespace edgeless::cuda::relational {

constexpr unsigned kAllLanes = 0xffffffffu;

// Elements in shared memory: floats, or the bits of a 16-bit type.
template <class S>
using TileNumber = std::conditional_t<std::is_same_v<S, float>, float, uint16_t>;

// Walks the tiles of a block's quota.
struct TileWalk {
  const int32_t *tiles, *ptr;
  TileBegins& begins;
  int tile, last, slot = 0;
  int bounds[5];      // first segments of this tile and the next ones; tiles behind the quota are empty
  int ahead = 0;      // first edge of the thread's segment in the tile after the next
  int ahead_end = 0;  // end of that tile's edges

  // A barrier must follow.
  __device__ __forceinline__ TileWalk(const int32_t* tiles, const int32_t* ptr, int first, int last, TileBegins& begins)
      : tiles(tiles), ptr(ptr), begins(begins), tile(first), last(last) {
#pragma unroll
    for (int i = 0; i < 5; ++i) bounds[i] = tiles[min(first + i, last)];
    if (threadIdx.x <= kTileSegments) {
      const int i = threadIdx.x;
      const int now = ptr[min(bounds[0] + i, bounds[1])], next = ptr[min(bounds[1] + i, bounds[2])];
      begins[0][i] = now, begins[1][i] = next;
    }
  }

  __device__ __forceinline__ int first() const { return bounds[0]; }
  __device__ __forceinline__ int count() const { return bounds[1] - bounds[0]; }
  __device__ __forceinline__ int next_count() const { return bounds[2] - bounds[1]; }
  __device__ __forceinline__ bool more() const { return tile + 1 < last; }
  __device__ __forceinline__ const int* now() const { return begins[slot]; }
  __device__ __forceinline__ const int* next() const { return begins[slot == 2 ? 0 : slot + 1]; }

  __device__ __forceinline__ void prefetch_ahead() {
    ahead_end = ptr[bounds[3]];
    if (threadIdx.x <= kTileSegments) ahead = ptr[min(bounds[2] + static_cast<int>(threadIdx.x), bounds[3])];
  }
  // Overwrites the begins of the tile before this one, so no thread may still read them.
  __device__ __forceinline__ void put_ahead() {
    if (threadIdx.x <= kTileSegments) begins[slot == 0 ? 2 : slot - 1][threadIdx.x] = ahead;
  }
  __device__ __forceinline__ void advance() {
    ++tile, slot = slot == 2 ? 0 : slot + 1;
#pragma unroll
    for (int i = 0; i < 4; ++i) bounds[i] = bounds[i + 1];
    bounds[4] = tiles[min(tile + 4, last)];
  }
};

// Waits for all asynchronous copies of this thread.
__device__ __forceinline__ void await_all() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;");
#endif
}

// Waits until at most the last kStages stages of this thread's copies are in flight.
template <int kStages>
__device__ __forceinline__ void await_all_but() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kStages));
#endif
}

__device__ __forceinline__ float weight_of(const Neighbors& of, int edge) {
  if (!of.weights) return 1;
  return of.ids ? __ldg(of.weights + __ldcs(of.ids + edge)) : __ldcs(of.weights + edge);
}

// Sums tile after tile into rows that are kToStride elements apart. For 16-bit rows see tensor_sums.cuh.
template <class S, int kWidth, int kColumns, int kToStride = kTileStride<S, kWidth>>
struct TileSums;

constexpr int kSumBatch = 4;  // edges whose rows are prefetched together

template <int kWidth, int kColumns, int kToStride>
struct TileSums<float, kWidth, kColumns, kToStride> {
  using Layout = FloatSumsLayout<kWidth, kColumns>;
  static constexpr int kThreads = Layout::kThreads, kPer = Layout::kPer, kAhead = Layout::kAhead;
  static constexpr int kLeads = Layout::kLeads, kBytes = Layout::kBytes;
  static constexpr int kTogether = 4 / kPer;  // rows that the lanes copy at a time, 16 bytes each
  struct Edge {
    int row;  // of the neighbour, -1: none
    float weight;
    int segment;
    uint32_t to;  // shared memory address of the sum that ends here; 0 (never such an address) if it goes on
  };
  const Neighbors& of;
  TileWalk& walk;
  float* tile;
  // The sub-warp's shared memory: its part of a segment that begins in an earlier sub-warp; kAhead rows; for 2 width()
  // edges the row ids, the weights and the addresses of sums.
  uint32_t leads, rows, edges;
  int begin = 0, end = 0, share = 0;  // edges [begin, end), at most `share`, the quota of all sub-warps
  int lead = -1;                      // the segment at `begin` if it begins in an earlier sub-warp, else -1
  const char* from;                   // the 16 bytes of row 0 that the lane copies
  uint32_t row_bytes;                 // bytes from row to row
  int least;  // the lane copies rows from this one on: 0, or INT_MAX if its 16 bytes are behind the end of a row

  // `tile` receives the sums; `memory` has kBytes.
  __device__ __forceinline__ TileSums(const Neighbors& of, TileWalk& walk, float* tile, void* memory)
      : of(of), walk(walk), tile(tile) {
    leads = projection::shared_address(memory) + (sub_warp() << width_log2()) * kPer * 4;
    rows = projection::shared_address(memory) + kLeads + (sub_warp() << width_log2()) * kPer * kAhead * 4;
    edges =
        projection::shared_address(memory) + kLeads + kThreads * kAhead * kPer * 4 + (sub_warp() << width_log2()) * 24;
    const int in_row = lane() & ((1 << row_lanes_log2()) - 1);
    from = reinterpret_cast<const char*>(in_register(reinterpret_cast<uintptr_t>(of.rows + in_row * 16)));
    row_bytes = in_register(of.row_bytes + threadIdx.y);  // adds 0, which the compiler does not know
    least = in_register(in_row < of.vectors ? 0 : INT_MAX);
    if (of.vectors * 4 < width() * kPer) {  // lanes behind a row's end add zeros
      const float zeros[kPer] = {};
      for (int i = 0; i < kAhead; ++i) store_shared(row_at(i) + lane() * kPer * 4, zeros);
    }
  }

  // Prefetches the first tile's rows. To be called first, by the whole block, which it synchronizes once.
  __device__ __forceinline__ void start() {
    __syncthreads();
    begin_tile(walk.now(), walk.count(), first_edge(walk.now(), walk.count()));
  }

  // Stores the sums of a tile as rows of `tile`, with zeros behind the last and, if kEmpty, for segments without edges.
  // On return all sums are stored, the rows that prefetch_others() requested have arrived, and rows of the next tile
  // are in flight. Columns behind the end of rows are zero or not written. To be called by the whole block.
  template <bool kEmpty, class PrefetchOthers>
  __device__ __forceinline__ void to_tile(PrefetchOthers&& prefetch_others) {
    const int count = walk.count();
    const int* now = walk.now();
    prefetch_others();  // behind the rows in flight, for which sum() waits first
    walk.prefetch_ahead();
    const Edge next = first_edge(walk.next(), walk.next_count());
    constexpr int kInLine = kWidth / 4, kLines = kThreads / kInLine;
    for (int row = threadIdx.x / kInLine + (kEmpty ? 0 : count); row < min(count + 8, kTileSegments); row += kLines) {
      if (row < count && now[row] < now[row + 1]) continue;
      *reinterpret_cast<float4*>(tile + row * kToStride + threadIdx.x % kInLine * 4) = make_float4(0, 0, 0, 0);
    }
    sum(now, count);
    __syncthreads();
    if (lead >= 0 && now[lead] >= begin - share) add_leads(now);
    await_all();
    __syncthreads();
    walk.put_ahead();
    begin_tile(walk.next(), walk.next_count(), next);
  }

  // Moves to the next tile when this one's sums are no longer needed. To be called by the whole block.
  __device__ __forceinline__ void advance() {
    walk.advance();
    __syncthreads();
  }

  // Lanes per row: a warp, except in the kernel for wide rows if it sums narrow ones; at least kAhead.
  __device__ __forceinline__ int width_log2() const { return kPer < 4 ? 5 : max(of.sub_warp_log2, 4); }
  __device__ __forceinline__ int width() const { return 1 << width_log2(); }
  __device__ __forceinline__ int row_lanes_log2() const { return width_log2() - (kTogether == 4 ? 2 : kTogether / 2); }
  __device__ __forceinline__ int lane() const { return threadIdx.x & (width() - 1); }
  __device__ __forceinline__ int sub_warp() const { return threadIdx.x >> width_log2(); }
  __device__ __forceinline__ uint32_t row_at(int i) const { return rows + (i << width_log2()) * kPer * 4; }
  __device__ __forceinline__ uint32_t tile_at(int segment) const {
    return projection::shared_address(tile) + segment * kToStride * 4;
  }

  // Looks up an edge of the sub-warp that has edges [begin, end).
  __device__ __forceinline__ Edge edge_at(const int* begins, int count, int begin, int end, int edge) const {
    if (edge >= end) return {-1, 1, 0, 0};
    const int row = __ldcs(of.indices + edge);
    const float weight = weight_of(of, edge);
    int segment = 0;  // the last segment that begins at or before the edge
#pragma unroll
    for (int step = kTileSegments / 2; step > 0; step /= 2) {
      if (segment + step < count && begins[segment + step] <= edge) segment += step;
    }
    const bool last = edge + 1 == begins[segment + 1] || edge + 1 == end;
    return {row, weight, segment, !last ? 0 : begins[segment] < begin ? leads : tile_at(segment)};
  }

  // Stores the lane's edge, which is edge i + lane() of the sub-warp, where all lanes read it. i: a multiple of
  // width().
  __device__ __forceinline__ void put_edge(int i, const Edge& edge) const {
    const uint32_t at = edges + ((i & width()) + lane()) * 4, step = width() * 8;
    // The ids of the rows that one lane copies are adjacent.
    const int in_batch = lane() % 4, place = in_batch / kTogether + in_batch % kTogether * (4 / kTogether);
    store_shared(at + (place - in_batch) * 4, edge.row), store_shared(at + step, __float_as_uint(edge.weight));
    store_shared(at + 2 * step, edge.to);
  }

  // Edges of a tile per sub-warp.
  __device__ __forceinline__ int share_of(const int* begins, int count) const {
    const int sub_warps = kThreads >> width_log2();
    return (begins[count] - begins[0] + sub_warps - 1) >> (__ffs(kThreads) - 1 - width_log2());
  }

  __device__ __forceinline__ Edge first_edge(const int* begins, int count) const {
    const int of_sub_warp = share_of(begins, count), begin = begins[0] + of_sub_warp * sub_warp();
    return edge_at(begins, count, begin, min(begin + of_sub_warp, begins[count]), begin + lane());
  }

  // Prefetches a tile's first rows.
  __device__ __forceinline__ void begin_tile(const int* begins, int count, const Edge& first) {
    share = share_of(begins, count);
    begin = min(begins[0] + share * sub_warp(), begins[count]), end = min(begin + share, begins[count]);
    put_edge(0, first);
    if (share + kAhead > width()) {  // otherwise these edges are not read
      put_edge(width(), edge_at(begins, count, begin, end, begin + width() + lane()));
    }
    const int segment = __shfl_sync(kAllLanes, first.segment, 0, width());
    lead = begin < end && begins[segment] < begin ? segment : -1;
    __syncwarp();
    Numbers numbers[kAhead / kSumBatch];
#pragma unroll
    for (int i = 0; i < kAhead / kSumBatch; ++i) find(i * kSumBatch, numbers[i]);
#pragma unroll
    for (int i = 0; i < kAhead / kSumBatch; ++i) prefetch(i * kSumBatch, numbers[i]);
  }

  // Among the kSumBatch edges from `at` on, whose rows are copied together, loads the row ids of those that the lane
  // copies.
  using Numbers = uint32_t[kSumBatch / kTogether];
  __device__ __forceinline__ void find(int at, Numbers& numbers) const {
    const int which = lane() >> row_lanes_log2();
    load_shared(edges + ((at & (2 * width() - 1)) + which * (kSumBatch / kTogether)) * 4, numbers);
  }
  __device__ __forceinline__ void prefetch(int at, const Numbers& numbers) const {
    const int which = lane() >> row_lanes_log2(), in_row = lane() & ((1 << row_lanes_log2()) - 1);
    const uint32_t to = row_at((at & (kAhead - 1)) + which) + in_row * 16;
#pragma unroll
    for (int u = 0; u < kSumBatch / kTogether; ++u) {
      const int row = static_cast<int>(numbers[u]);
      if (row >= least) copy_shared(to + (u * kTogether << width_log2()) * kPer * 4, row_address(from, row, row_bytes));
    }
    projection::commit_stage();
  }

  // Sums the sub-warp's edges segment by segment, into the tile, or into its lead if a segment begins in an earlier
  // sub-warp.
  __device__ __forceinline__ void sum(const int* begins, int count) {
    float sum[kPer] = {};
    const uint32_t lane_at = lane() * kPer * 4, step = width() * 8;
    for (int done = 0; done < share; done += kSumBatch) {
      await_all_but<kAhead / kSumBatch - 1>();
      __syncwarp();
      const uint32_t of_edges = edges + (done & (2 * width() - 1)) * 4 + step;
      uint32_t to[4];
      float by[4];
      Numbers numbers;
      load_shared(of_edges, by), load_shared(of_edges + step, to), find(done + kAhead, numbers);
      const uint32_t from = row_at(done & (kAhead - 1)) + lane_at;
      float x[4][kPer];
#pragma unroll
      for (int u = 0; u < kSumBatch; ++u) load_shared(from + (u << width_log2()) * kPer * 4, x[u]);
#pragma unroll
      for (int u = 0; u < kSumBatch; ++u) {
#pragma unroll
        for (int k = 0; k < kPer; ++k) sum[k] = fmaf(by[u], x[u][k], sum[k]);
        if (to[u]) store_shared(to[u] + lane_at, sum);
#pragma unroll
        for (int k = 0; k < kPer; ++k) sum[k] = to[u] ? 0 : sum[k];
      }
      __syncwarp();
      prefetch(done + kAhead, numbers);
      if (((done + kSumBatch) & (width() - 1)) == 0) {
        const int next = done + kSumBatch + width();
        put_edge(next, edge_at(begins, count, begin, end, begin + next + lane()));
        __syncwarp();
      }
    }
  }

  // Adds the leads of a segment to its sum, in the sub-warp that has the second part of the segment.
  __device__ __forceinline__ void add_leads(const int* begins) {
    const uint32_t lane_at = lane() * kPer * 4, at = tile_at(lead) + lane_at;
    float sum[kPer];
    load_shared(at, sum);
    for (int other = sub_warp(); begins[0] + other * share < begins[lead + 1]; ++other) {
      float x[kPer];
      load_shared(leads + ((other - sub_warp()) << width_log2()) * kPer * 4 + lane_at, x);
#pragma unroll
      for (int k = 0; k < kPer; ++k) sum[k] += x[k];
    }
    store_shared(at, sum);
  }
};

}  // namespace edgeless::cuda::relational
