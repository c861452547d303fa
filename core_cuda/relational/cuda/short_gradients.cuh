// The kernel that computes the gradients of a typed product of sums (segment_gradients.cuh) for rows of up to 64
// floats.
//
// A segment has edges of one type and one row. A warp sums the gradients of the edges of sixteen segments in registers
// (short_sums.cuh), which gives sixteen rows of g, and multiplies them by the transposed weight of the type: g W^T.
// Then it stores g to shared memory, to which the segments' rows x have been copied meanwhile, and four warps compute a
// square each of x^T g over 64 segments (squares.cuh). The squares stay in registers for all segments of the thread
// block.
//
// A kernel that is launched before splits the weight of every type into float16 parts for tensor cores.
#pragma once

#include <cstdint>

#include "../../projection/cuda/tiles.cuh"
#include "entries.cuh"
#include "short_sums.cuh"
#include "squares.cuh"

namespace edgeless::cuda::relational {

static_assert(kMostShortWidth == 2 * kSquare && ShortGradients::kStep == kTileSegments);

// Shared memory of a block: x and g of 64 segments, and the parts of the weight.
struct Memory {
  float4 x[ShortGradients::kStep * kSquareVectors], g[ShortGradients::kStep * kSquareVectors];
  uint4 parts[WeightParts<kMostShortWidth>::kVectors];
};
static_assert(sizeof(Memory) == kShortGradientsBytes);

// Copies the warp's rows of x, or stores those of g, to shared memory.
__device__ __forceinline__ void prefetch_own(Memory& tile, const Rows& x, int width, int row_of_lane) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kWarpSegments, vector = lane % kSquareVectors;
#pragma unroll
  for (int i = 0; i < kWarpSegments; i += 2) {
    const int segment = i + lane / kSquareVectors, row = __shfl_sync(kAllLanes, row_of_lane, segment);
    const bool there = row >= 0 && vector * 4 < width;
    const float* const from = static_cast<const float*>(x.numbers) + (there ? row * x.row_numbers + vector * 4 : 0);
    copy_shared(projection::shared_address(tile.x + place_of(first + segment, vector)), from, there);
  }
}
__device__ __forceinline__ void put_sums(Memory& tile, const WarpRows<kMostShortWidth>& sum) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kWarpSegments;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int m = 0; m < kMostShortWidth / 16; ++m) {
      const float* const four = sum[i] + 4 * m;
      tile.g[place_of(first + lane / 4 + 8 * i, m * 4 + lane % 4)] = make_float4(four[0], four[1], four[2], four[3]);
    }
  }
}

__global__ void __launch_bounds__(kPartThreads)
    prepare_gradients_kernel(const __grid_constant__ SegmentGradientsArgs args, uint4* parts) {
  put_parts<kMostShortWidth, true>(parts + static_cast<int64_t>(blockIdx.x) * WeightParts<kMostShortWidth>::kVectors,
                                   static_cast<const float*>(args.weight.numbers) + blockIdx.x * args.weight_type,
                                   args.weight.row_numbers, args.out_width, args.in_width);
}

template <Weights kWeights, bool kFull>
__global__ void __launch_bounds__(ShortGradients::kThreads, ShortGradients::kBlocks)
    short_gradients_kernel(const __grid_constant__ SegmentGradientsArgs args, const uint4* parts) {
  extern __shared__ float4 memory[];
  Memory& tile = *reinterpret_cast<Memory*>(memory);
  const Neighbors& of = args.neighbors;
  const SegmentTiles& segments = args.segments;
  const Range range = range_of_block(segments.by_type(), args.share);
  if (range.begin >= range.end) return;
  const int in = args.in_width, out = args.out_width;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int down = warp / 2 * kSquare, side = warp % 2 * kSquare;
  const int begin = segments.tiles[range.begin], last = segments.tiles[range.end];
  const auto row_of = [&](int first) {
    const int segment = first + lane % kWarpSegments;
    return segment < last ? __ldcs(segments.rows + segment) : -1;
  };
  const int first_of_warp = begin + warp * kWarpSegments;
  if (args.out) {
    for (int i = threadIdx.x; i < WeightParts<kMostShortWidth>::kVectors; i += ShortGradients::kThreads) {
      copy_shared(projection::shared_address(tile.parts + i),
                  parts + static_cast<int64_t>(range.type) * WeightParts<kMostShortWidth>::kVectors + i);
    }
  }
  Ends ends = load_ends(segments.ptr, first_of_warp, last);
  int row = row_of(first_of_warp);
  Edges edges = first_edges<kWeights>(of, ends);
  ends = load_ends(segments.ptr, first_of_warp + ShortGradients::kStep, last);
  Square outer = {};
#pragma unroll 1
  for (int at = begin; at < last; at += ShortGradients::kStep) {
    const int first = at + warp * kWarpSegments;
    if (args.partial) prefetch_own(tile, args.x, in, row);
    row = row_of(first + ShortGradients::kStep);
    Edges next = first_edges<kWeights>(of, ends);
    ends = load_ends(segments.ptr, first + 2 * ShortGradients::kStep, last);
    WarpRows<kMostShortWidth> sum;
    sum_segments<kMostShortWidth, kWeights, kFull>(of, edges, sum);
    if (args.partial) put_sums(tile, sum);
    if (at == begin) {  // waits for the parts of the weight
      await_all();
      __syncthreads();
    }
    if (args.out && first < last) {
      WarpRows<kMostShortWidth> product;
      multiply_rows<kMostShortWidth>(sum, tile.parts, product);
      const auto* const weight = static_cast<const float*>(args.weight.numbers) + range.type * args.weight_type;
      make_finite<kMostShortWidth>(segments, of, {weight, args.weight.row_numbers, true, out, in}, first, last,
                                   product);
      store_products<kMostShortWidth>(static_cast<float*>(args.out), in, first, last, product);
    }
    edges = next;
    await_later<kWeights>(edges, sum[0][0]);
    if (!args.partial) continue;
    await_all();
    __syncthreads();
    if (down < in && side < out)
      add_square(tile.x, tile.g, down, side, min(last - at, ShortGradients::kStep), outer, [](const float4&) {});
    __syncthreads();
  }
  if (!args.partial) return;
  store_square(args.partial + static_cast<int64_t>(blockIdx.x) * in * out, in, out, down, side, outer);
}

}  // namespace edgeless::cuda::relational
