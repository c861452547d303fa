// The kernel that multiplies the sums of segments by the matrix of their type (segment_products.cuh) for rows of up to
// 64 floats, if there are many segments with few edges each. (segment_products.cuh is faster for all others.)
//
// A segment has edges of one type and one row. A warp sums the edges of sixteen segments in registers (short_sums.cuh)
// and multiplies the sums by the weight of the type, which is in shared memory, split into float16 parts for tensor
// cores.
//
// The grid has as many blocks as the device holds at a time. They take chunks of tiles of one type from a queue,
// because neither the number of segments nor that of edges predicts the time of a tile well. The warps of a block
// synchronize once per chunk. Everything is prefetched: the bounds of a chunk two chunks ahead and its weight one chunk
// ahead; the ends of segments two sums ahead and the ids of their neighbours one sum ahead. A kernel that is launched
// before writes the list of chunks and the parts of the weights.
#pragma once

#include <climits>
#include <cstdint>

#include "../../common/search.h"
#include "../../projection/cuda/tiles.cuh"
#include "entries.cuh"
#include "short_segments.h"
#include "short_sums.cuh"

namespace edgeless::cuda::relational {

// Stands for an empty range of segments. It differs from every real segment, so that what is loaded for it is not taken
// for edges of a later chunk.
constexpr int kNoSegment = INT_MAX / 2;

template <int kWidth>
__global__ void __launch_bounds__(kPartThreads)
    prepare_products_kernel(const __grid_constant__ SegmentProductsArgs args, const ShortScratch scratch,
                            int num_chunks) {
  const int types = args.segments.types;
  if (static_cast<int>(blockIdx.x) < types) {
    auto* const parts = static_cast<uint4*>(scratch.parts);
    put_parts<kWidth, false>(parts + static_cast<int64_t>(blockIdx.x) * WeightParts<kWidth>::kVectors,
                             static_cast<const float*>(args.weight.numbers) + blockIdx.x * args.weight_type,
                             args.weight.row_numbers, args.in_width, args.out_width);
    return;
  }
  const int i = (blockIdx.x - types) * kPartThreads + threadIdx.x, share = args.share;
  if (i == 0) *scratch.taken = 0;
  if (i == num_chunks) scratch.chunks[i] = {-1, 0, 0, 0};
  if (i >= num_chunks) return;
  const int32_t *const ends = args.segments.type_tiles, *const tiles = args.segments.tiles;
  const auto behind = [=](int64_t t) { return ends[t] / share + t > i; };
  const int type = static_cast<int>(first_behind(1, types, behind)) - 1;  // as in range_of_tile
  const int first = ends[type], begin = first + (i - first / share - type) * share;
  const int end = min(begin + share, ends[type + 1]);
  scratch.chunks[i] = begin < end ? Chunk{type, tiles[begin], tiles[end], 0} : Chunk{type, 0, 0, 0};
}

template <int kWidth, Weights kWeights, bool kFull>
__global__ void __launch_bounds__(ShortProducts::kThreads, ShortProducts::kBlocks)
    short_products_kernel(const __grid_constant__ SegmentProductsArgs args, const ShortScratch scratch,
                          int num_chunks) {
  using Parts = WeightParts<kWidth>;
  extern __shared__ uint4 two_weights[];  // parts of two weights
  __shared__ Chunk known[kBegun];         // ring of the chunks of this round and of the next two
  const Neighbors& of = args.neighbors;
  const int begin_of_warp = threadIdx.x / 32 * kWarpSegments;
  const bool leads = threadIdx.x == 0;
  const auto prefetch_parts = [&](int type, int slot) {
    const auto* const from = static_cast<const uint4*>(scratch.parts) + static_cast<int64_t>(type) * Parts::kVectors;
    const uint32_t to = projection::shared_address(two_weights + slot * Parts::kVectors);
    for (int i = threadIdx.x; i < Parts::kVectors; i += ShortProducts::kThreads) copy_shared(to + i * 16, from + i);
  };
  const auto prefetch_chunk = [&](int turn, int i) {
    copy_shared(projection::shared_address(known + turn), scratch.chunks + min(i, num_chunks));
  };
  if (leads) prefetch_chunk(0, blockIdx.x), prefetch_chunk(1, blockIdx.x + gridDim.x);
  prefetch_parts(scratch.chunks[blockIdx.x].type, 0);
  int third = blockIdx.x + 2 * gridDim.x;  // the chunk of the round after the next
  Edges edges;
  Ends ends;
  int edges_at = -1, ends_at = -1;  // first segments of what `edges` and `ends` hold; -1: nothing
  for (int slot = 0, turn = 0;; turn = turn == 2 ? 0 : turn + 1) {
    await_all();
    __syncthreads();
    const Chunk& now = known[turn];
    const Chunk& then = known[turn == 2 ? 0 : turn + 1];
    if (now.type < 0) return;
    if (leads) {
      prefetch_chunk(turn == 0 ? 2 : turn - 1, third);
      third = kBegun * gridDim.x + atomicAdd(scratch.taken, 1);
    }
    const bool other = then.type != now.type && then.type >= 0;
    if (other) prefetch_parts(then.type, slot ^ 1);
    const uint4* const parts = two_weights + slot * Parts::kVectors;
    const int last = now.end;
    const auto edges_of = [&](int first, int last) {
      if (ends_at != first) ends = load_ends(args.segments.ptr, first, last);
      Edges edges = first_edges<kWeights>(of, ends);
      if constexpr (kWeights == Weights::of_segments) load_weights(of, first, last, edges);
      return edges;
    };
    int first = now.begin + begin_of_warp;
    if (first < last && edges_at != first) edges = edges_of(first, last);
#pragma unroll 1
    for (; first < last; first += ShortProducts::kStep) {
      int at = first + ShortProducts::kStep, until = last;
      const bool here = at < last;
      if (!here) at = then.begin + begin_of_warp, until = then.end;
      if (at >= until) at = kNoSegment;
      const Edges next = edges_of(at, until);
      edges_at = at;
      at += ShortProducts::kStep;
      if (here && at >= last) at = then.begin + begin_of_warp, until = then.end;
      if (at >= until) at = kNoSegment;
      ends = load_ends(args.segments.ptr, at, until);
      ends_at = at;
      WarpRows<kWidth> sum, product;
      sum_segments<kWidth, kWeights, kFull>(of, edges, sum);
      multiply_rows<kWidth>(sum, parts, product);
      const auto* const weight = static_cast<const float*>(args.weight.numbers) + now.type * args.weight_type;
      make_finite<kWidth>(args.segments, of, {weight, args.weight.row_numbers, false, args.in_width, args.out_width},
                          first, last, product);
      store_products<kWidth>(static_cast<float*>(args.out), args.out_width, first, last, product);
      edges = next;
      await_later<kWeights>(edges, product[0][0]);
    }
    if (other) slot ^= 1;
  }
}

}  // namespace edgeless::cuda::relational
