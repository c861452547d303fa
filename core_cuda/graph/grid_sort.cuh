// A stable LSD radix sort inside a kernel: all blocks of a cooperative launch take part, with a grid barrier between
// steps. It is profitable for few keys, where one launch per step would dominate. No torch.
//
// Each warp owns consecutive keys. It counts their digits; a scan over the warps of the block and over all blocks gives
// the offset of each digit for each warp, which then scatters its keys in order.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "../common/search.h"
#include "../common/warp.cuh"
#include "grid_sort.h"

namespace edgeless::cuda {

// Shared memory of the sort.
struct GridSortRoom {
  int32_t of_warps[kGridWarps][kDigits];
  int32_t sums[kDigits / 32];
};

__device__ __forceinline__ void sync_grid() { cooperative_groups::this_grid().sync(); }

// A grid-stride loop over `count` items.
template <class F>
__device__ __forceinline__ void for_items(int32_t count, F&& f) {
  const int32_t step = gridDim.x * kGridThreads;
  for (int32_t i = blockIdx.x * kGridThreads + threadIdx.x; i < count; i += step) f(i);
}

// Calls f(i, inside) with whole warps for the consecutive items of this warp, 32 at a time; inside is false for lanes
// behind the end.
template <class F>
__device__ __forceinline__ void for_own_items(int32_t count, F&& f) {
  const int32_t warps = gridDim.x * kGridWarps, warp = blockIdx.x * kGridWarps + threadIdx.x / 32;
  const int32_t share = ((count + 31) / 32 + warps - 1) / warps * 32, lane = threadIdx.x % 32;
  const int64_t begin = static_cast<int64_t>(warp) * share;
  const auto end = static_cast<int32_t>(min(begin + share, static_cast<int64_t>(count)));
  for (int64_t first = begin; first < end; first += 32) {
    f(static_cast<int32_t>(first) + lane, first + lane < end);
  }
}

__device__ __forceinline__ int32_t warp_scan(int32_t x) {  // inclusive
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int32_t below = __shfl_up_sync(kFullWarp, x, step);
    if (lane >= step) x += below;
  }
  return x;
}

// Sorts by one digit: calls put(to, i) for item i, whose new index is `to`.
template <class KeyOf, class Put>
__device__ void radix_pass(int32_t count, int shift, int bits, int32_t* of_blocks, GridSortRoom& room, KeyOf&& key_of,
                           Put&& put) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, digit = threadIdx.x;
  const bool has_digit = digit < kDigits;
  int32_t* own = room.of_warps[warp];
  const auto digit_of = [&](int32_t i, bool inside) { return inside ? (key_of(i) >> shift) & ((1 << bits) - 1) : -1; };
  for (int d = lane; d < kDigits; d += 32) own[d] = 0;
  __syncwarp();
  for_own_items(count, [&](int32_t i, bool inside) {
    const int d = digit_of(i, inside);
    const unsigned same = __match_any_sync(kFullWarp, d);
    if (inside && lane == __ffs(same) - 1) own[d] += __popc(same);
    __syncwarp();
  });
  __syncthreads();
  if (has_digit) {
    int32_t sum = 0;
    for (int w = 0; w < kGridWarps; ++w) {
      const int32_t here = room.of_warps[w][digit];
      room.of_warps[w][digit] = sum;
      sum += here;
    }
    of_blocks[blockIdx.x * kDigits + digit] = sum;
  }
  sync_grid();
  int32_t before = 0, all = 0;
  if (has_digit) {
#pragma unroll 8
    for (int b = 0; b < static_cast<int>(gridDim.x); ++b) {
      const int32_t there = of_blocks[b * kDigits + digit];
      before += b < static_cast<int>(blockIdx.x) ? there : 0;
      all += there;
    }
    const int32_t sum = warp_scan(all);
    if (lane == 31) room.sums[warp] = sum;
    before += sum - all;
  }
  __syncthreads();
  if (has_digit) {
    for (int w = 0; w < warp; ++w) before += room.sums[w];
    for (int w = 0; w < kGridWarps; ++w) room.of_warps[w][digit] += before;
  }
  __syncthreads();
  for_own_items(count, [&](int32_t i, bool inside) {
    const int d = digit_of(i, inside);
    const unsigned same = __match_any_sync(kFullWarp, d);
    const int32_t to = inside ? own[d] + __popc(same & ((1u << lane) - 1)) : 0;
    __syncwarp();
    if (inside && lane == __ffs(same) - 1) own[d] += __popc(same);
    if (inside) put(to, i);
    __syncwarp();
  });
  sync_grid();
}

// Sorts key_of(i), 0 <= i < count, by as many bits as num_keys needs. Keys out of range never cause writes out of
// bounds.
template <class KeyOf>
__device__ void grid_sort(int32_t count, int32_t num_keys, const GridSortArgs& args, GridSortRoom& room,
                          KeyOf&& key_of) {
  const int bits = num_keys > 1 ? 32 - __clz(num_keys - 1) : 1, passes = (bits + kDigitBits - 1) / kDigitBits;
  const int width = (bits + passes - 1) / passes;
  for (int pass = 0; pass < passes; ++pass) {
    const int to = (passes - 1 - pass) % 2, shift = pass * width;
    int32_t *keys = args.keys[to], *places = args.places[to];
    if (pass == 0) {
      radix_pass(count, shift, width, args.of_blocks, room, key_of, [&](int32_t at, int32_t i) {
        keys[at] = key_of(i);
        places[at] = i;
      });
    } else {
      const int32_t *from = args.keys[1 - to], *from_places = args.places[1 - to];
      radix_pass(
          count, shift, width, args.of_blocks, room, [&](int32_t i) { return from[i]; },
          [&](int32_t at, int32_t i) {
            keys[at] = from[i];
            places[at] = from_places[i];
          });
    }
  }
}

// indptr [num_rows + 1] of sorted keys.
__device__ __forceinline__ void find_rows(const int32_t* sorted, int32_t count, int32_t num_rows, int32_t* indptr) {
  for_items(num_rows + 1, [&](int32_t row) {
    indptr[row] = static_cast<int32_t>(first_behind(0, count, [&](int64_t p) { return sorted[p] >= row; }));
  });
}

// The row of the edge at this CSR index.
__device__ __forceinline__ int32_t row_of_position(const int32_t* indptr, int32_t num_rows, int32_t edge) {
  return static_cast<int32_t>(first_behind(1, num_rows, [&](int64_t row) { return indptr[row] > edge; })) - 1;
}

}  // namespace edgeless::cuda
