// The kernels of radix_sort.h. One kernel reads the keys once and counts the digits of all passes. A pass then reads
// and writes keys and positions once: its blocks process tiles in order, and a block finds how many keys of each digit
// precede its tile by looking back at the counts that the blocks of earlier tiles have published.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../common/warp.cuh"
#include "radix_sort.h"

namespace edgeless::cuda {

template <class K>
using SortIndex = std::conditional_t<sizeof(K) == 8, uint64_t, uint32_t>;

template <class K>
__device__ __forceinline__ uint32_t digit_of(K key, const SortDigit& of) {
  return static_cast<uint32_t>(static_cast<SortIndex<K>>(key) >> of.shift) & ((1u << of.width) - 1);
}

// counts [passes, kSortDigits], zero at first: receives the number of keys of each digit.
template <class K>
__global__ void __launch_bounds__(kSortThreads)
    sort_counts_kernel(const K* keys, int64_t count, int passes, int width, unsigned long long* counts) {
  constexpr int kMostPasses = 8 * sizeof(K) / kSortBits;
  __shared__ uint32_t own[kMostPasses][kSortDigits];
  for (int pass = 0; pass < passes; ++pass) own[pass][threadIdx.x] = 0;
  __syncthreads();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kSortThreads;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kSortThreads; first < count; first += step) {
    const int64_t at = first + threadIdx.x;
    const bool inside = at < count;
    const K key = inside ? keys[at] : K(0);
    const unsigned lanes = __ballot_sync(kFullWarp, inside);
    for (int pass = 0; pass < passes; ++pass) {
      const uint32_t digit = digit_of(key, {pass * width, width});
      // In nearly sorted keys, a whole warp often has the same digit, for which one atomic is enough.
      const uint32_t of_first = __shfl_sync(kFullWarp, digit, 0);
      if (__all_sync(kFullWarp, !inside || digit == of_first)) {
        if (threadIdx.x % 32 == 0 && lanes) atomicAdd(&own[pass][digit], __popc(lanes));
      } else if (inside) {
        atomicAdd(&own[pass][digit], 1u);
      }
    }
  }
  __syncthreads();
  for (int pass = 0; pass < passes; ++pass) {
    const uint32_t found = own[pass][threadIdx.x];
    if (found) atomicAdd(counts + pass * kSortDigits + threadIdx.x, static_cast<unsigned long long>(found));
  }
}

// The exclusive sum of x over the threads of a block of kSortThreads.
template <class T>
__device__ __forceinline__ T sum_before(T x, T (&of_warps)[kSortThreads / 32]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T below = __shfl_up_sync(kFullWarp, sum, step);
    if (lane >= step) sum += below;
  }
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  for (int w = 0; w < warp; ++w) sum += of_warps[w];
  return sum - x;
}

// Turns the counts of every pass into the index of the first key of each digit. One block per pass.
__global__ void __launch_bounds__(kSortThreads) sort_places_kernel(unsigned long long* counts) {
  __shared__ unsigned long long of_warps[kSortThreads / 32];
  unsigned long long& count = counts[blockIdx.x * kSortDigits + threadIdx.x];
  count = sum_before(count, of_warps);
}

// What a tile publishes for a digit: a count in the low bits of a word W, and the kind of the count in the two highest
// bits.
template <class W>
struct Published {
  static constexpr W kOfTile = W(1) << (8 * sizeof(W) - 2);  // count of keys in this tile
  static constexpr W kUpToTile = kOfTile << 1;               // count of keys in this tile and all before it
  static constexpr W kNumber = kOfTile - 1;
};

// The lanes of the warp that have the same digit.
__device__ __forceinline__ unsigned lanes_with(uint32_t digit) {
  unsigned same = kFullWarp;
#pragma unroll
  for (int bit = 0; bit < kSortBits; ++bit) {
    const bool set = digit >> bit & 1;
    const unsigned votes = __ballot_sync(kFullWarp, set);
    same &= set ? votes : ~votes;
  }
  return same;
}

// Sorts by one digit. places [kSortDigits]: index of the first key of each digit. next_tile and published [tiles,
// kSortDigits] are zero at first. from_order is null in the first pass, whose positions are 0, 1, 2, ...
template <class K, class W>
__global__ void __launch_bounds__(kSortThreads, 3)
    sort_pass_kernel(const K* from, const K* from_order, K* to, K* to_order, int64_t count, SortDigit of,
                     const unsigned long long* places, unsigned* next_tile, W* published) {
  using I = SortIndex<K>;
  constexpr int kKeys = sort_keys_of_thread(sizeof(K)), kTile = sort_tile(sizeof(K)), kWarps = kSortThreads / 32;
  __shared__ uint32_t of_warps[kWarps][kSortDigits];  // keys of each digit; then those of earlier warps
  __shared__ uint32_t starts[kSortDigits];            // first index of each digit in the sorted tile
  __shared__ I bases[kSortDigits];                    // index of a key in the result, less that in the sorted tile
  __shared__ K exchanged[kTile];
  __shared__ uint32_t sums[kWarps];
  __shared__ unsigned own_tile;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) own_tile = atomicAdd(next_tile, 1u);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) of_warps[w][threadIdx.x] = 0;
  __syncthreads();
  const int64_t tile = own_tile, first = tile * kTile;
  const int inside = static_cast<int>(min(static_cast<int64_t>(kTile), count - first));
  const int own_first = warp * 32 * kKeys + lane;  // a warp has consecutive keys, 32 of them at a time

  K keys[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int at = own_first + 32 * i;
    keys[i] = at < inside ? from[first + at] : K(0);
  }

  // The index of each key among the warp's keys of its digit. The padding behind the last key has the last digit, so it
  // is sorted to the end of the tile.
  const auto digit_at = [&](int i) {
    return own_first + 32 * i < inside ? digit_of(keys[i], of) : static_cast<uint32_t>(kSortDigits - 1);
  };
  uint32_t index[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const uint32_t own = digit_at(i);
    const unsigned same = lanes_with(own);
    index[i] = of_warps[warp][own] + __popc(same & ((1u << lane) - 1));
    __syncwarp();
    if (lane == __ffs(same) - 1) of_warps[warp][own] += __popc(same);
    __syncwarp();
  }
  __syncthreads();

  const int digit = threadIdx.x;
  uint32_t here = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const uint32_t of_warp = of_warps[w][digit];
    of_warps[w][digit] = here;
    here += of_warp;
  }
  const uint32_t real = digit == kSortDigits - 1 ? here - (kTile - inside) : here;
  volatile W* const row = published + tile * kSortDigits + digit;
  using Kinds = Published<W>;
  *row = static_cast<W>(real) | (tile == 0 ? Kinds::kUpToTile : Kinds::kOfTile);
  const uint32_t start = sum_before(here, sums);
  starts[digit] = start;
  W before = 0;
  if (tile > 0) {
    for (volatile const W* other = row - kSortDigits;; other -= kSortDigits) {
      W found = 0;
      while (found == 0) found = *other;
      before += found & Kinds::kNumber;
      if (found & Kinds::kUpToTile) break;
    }
    *row = (before + static_cast<W>(real)) | Kinds::kUpToTile;
  }
  bases[digit] = static_cast<I>(places[digit]) + static_cast<I>(before) - static_cast<I>(start);
  __syncthreads();

#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    index[i] += starts[digit_at(i)] + of_warps[warp][digit_at(i)];
    exchanged[index[i]] = keys[i];
  }
  __syncthreads();
  I place[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int at = i * kSortThreads + threadIdx.x;
    if (at >= inside) break;
    const K key = exchanged[at];
    place[i] = bases[digit_of(key, of)] + static_cast<I>(at);
    to[place[i]] = key;
  }
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {  // the keys' registers now hold the positions
    const int at = own_first + 32 * i;
    keys[i] = !from_order ? static_cast<K>(first + at) : at < inside ? from_order[first + at] : K(0);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kKeys; ++i) exchanged[index[i]] = keys[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    const int at = i * kSortThreads + threadIdx.x;
    if (at >= inside) break;
    to_order[place[i]] = exchanged[at];
  }
}

}  // namespace edgeless::cuda
