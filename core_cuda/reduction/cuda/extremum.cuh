// Elementwise minimum or maximum over the in-neighbors, with its argument (args.h). common/segment_reduce.cuh describes
// how work is divided. Storage: float, half, bfloat16, double, each compared without conversion.
#pragma once

#include "../../common/segment_reduce.cuh"
#include "args.h"
#include "best.cuh"

namespace edgeless::cuda::reduction {

template <class S, class I, bool kShares, bool kMax>
struct BestReducer {
  using A = Arithmetic<S>;
  static constexpr int kPer = kNumbers<S, 4>;
  static constexpr int kBatch = 4;  // eight would cost more occupancy than the additional loads in flight gain
  static constexpr bool kCheapEnd = false;
  static constexpr bool kSources = Best<S, I, kShares, kMax>::kSources;
  struct Segment {
    A best[kPer];
    int at[kPer];  // positions within the row
    int count[kShares ? kPer : 1];
    I source[kSources ? kPer : 1];
    bool several[kSources ? kPer : 1];  // several sources tie
  };
  static_assert(sizeof(Segment) == best_segment_bytes(sizeof(S), sizeof(I) == 8, kShares));

  const ReduceArgs& args;
  const char* base;
  int vector;
  bool inside;
  Words<4> raw[kBatch];
  I source[kSources ? kBatch : 1];
  Best<S, I, kShares, kMax> state;
  I offset;  // offset of the segment within its row

  __device__ BestReducer(const ReduceArgs& args, int vector) : args(args), vector(vector) {
    inside = vector < args.vectors;
    base = args.x.base + (inside ? vector : 0) * 16;
  }

  __device__ __forceinline__ const Words<4>* words_of(I index) const {
    return reinterpret_cast<const Words<4>*>(row_address(base, index, args.x.row));
  }

  __device__ __forceinline__ void own(I, I) {}
  __device__ __forceinline__ void choose(int) {}
  __device__ __forceinline__ void load(int u, I index, I) {
    raw[u] = load_shared_words(words_of(index));
    if constexpr (kSources) source[u] = index;
  }
  __device__ __forceinline__ void take(int u, I at) {
    state.take(raw[u], static_cast<int>(at), source[kSources ? u : 0], {args.zero, args.one});
  }

  __device__ __forceinline__ void begin(I, I from) {
    offset = from;
    state.init();
  }

  __device__ __forceinline__ Segment segment(I first, I last) const {
    A best[kPer];
    int at[kPer], count[kPer];
    state.unpack(best, at, count);
    bool nan = false;
#pragma unroll
    for (int k = 0; k < kPer; ++k) nan |= best[k] != best[k];
    if (nan) find_nans(first, last, best, at);
    Segment p;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      p.best[k] = best[k], p.at[k] = at[k] + static_cast<int>(offset);
      if constexpr (kShares) p.count[k] = count[k];
      if constexpr (kSources) p.source[k] = state.source[k], p.several[k] = state.several(k);
    }
    return p;
  }

  // Finds the position of the first NaN of every element whose extremum is NaN.
  __device__ void find_nans(I first, I last, const A (&best)[kPer], int (&at)[kPer]) const {
    const I* indices = static_cast<const I*>(args.graph.indices);
    for (I edge = last; edge-- > first;) {
      A x[kPer];
      unpack_words<S, 4>(load_shared_words(words_of(indices[edge])), x);
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        if (best[k] != best[k] && x[k] != x[k]) at[k] = static_cast<int>(edge - first);
      }
    }
  }

  __device__ __forceinline__ void merge(Segment& segment, const Segment& later) const {
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const A x = later.best[k], best = segment.best[k];
      const bool wins = best == best && (is_better<kMax>(x, best) || x != x);
      if constexpr (kShares)
        segment.count[k] = wins ? later.count[k] : segment.count[k] + (x == best ? later.count[k] : 0);
      if constexpr (kSources) {
        if (x == best) segment.several[k] |= later.several[k] || segment.source[k] != later.source[k];
        if (wins) segment.several[k] = later.several[k], segment.source[k] = later.source[k];
      }
      segment.best[k] = wins ? x : best;
      segment.at[k] = wins ? later.at[k] : segment.at[k];
    }
  }

  template <class T>
  __device__ __forceinline__ void write_arg(int64_t first, const int (&codes)[kPer]) const {
    T* to = static_cast<T*>(args.arg) + first;
    constexpr int kBytes = kPer * static_cast<int>(sizeof(T));
    if (kBytes >= 4 && args.whole) {  // vectorized stores of the arguments of one vector of x
      constexpr int kStep = kBytes >= 16 ? 16 : kBytes >= 4 ? kBytes : 4;
#pragma unroll
      for (int part = 0; part < kBytes / kStep; ++part) {
        Words<kStep / 4> raw = {};
#pragma unroll
        for (int k = 0; k < kStep / static_cast<int>(sizeof(T)); ++k) {
          const uint32_t code = static_cast<T>(codes[part * kStep / static_cast<int>(sizeof(T)) + k]);
          raw.w[k * sizeof(T) / 4] |= code << (k * sizeof(T) % 4 * 8);
        }
        store_words_once(to + part * kStep / sizeof(T), raw);
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      if (vector * kPer + k < args.width) to[k] = static_cast<T>(codes[k]);
    }
  }

  __device__ __forceinline__ void write(int64_t row, const A (&best)[kPer], const int (&codes)[kPer]) const {
    if (!inside) return;
    const int at = vector * kPer;
    store_numbers<S, 4>(static_cast<S*>(args.out) + row * args.width, at, args.width, args.whole, best);
    const int64_t first = row * args.width + at;
    if (args.arg_size == 1) {
      write_arg<uint8_t>(first, codes);
    } else if (args.arg_size == 2) {
      write_arg<uint16_t>(first, codes);
    } else {
      write_arg<uint32_t>(first, codes);
    }
  }

  __device__ __forceinline__ void store(int64_t row, const Segment& segment) const {
    A best[kPer];
    int codes[kPer];
    bool tied = false;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      best[k] = segment.best[k];
      codes[k] = segment.at[k];
      if constexpr (kShares) {
        const bool zero = args.zero_shares && best[k] == A(0);
        const int count = segment.count[k] + zero;
        bool several = true;
        if constexpr (kSources) several = zero || segment.several[k];
        if ((count > 1 && several) || best[k] != best[k]) {
          codes[k] = static_cast<int>(1u << (8 * args.arg_size - 1)) | (count > 1 ? count - 1 : 0);
          tied |= vector * kPer + k < args.width;
        }
      }
    }
    write(row, best, codes);
    if (tied && inside) args.tied[row] = 1;
  }

  __device__ __forceinline__ void store_empty(int64_t row) const {
    A fill[kPer];
    const int none[kPer] = {};
#pragma unroll
    for (int k = 0; k < kPer; ++k) fill[k] = static_cast<A>(args.fill);
    write(row, fill, none);
  }

  __device__ __forceinline__ Segment* place(int64_t slot) const {
    return reinterpret_cast<Segment*>(args.carry) + slot * args.vectors + vector;
  }
  __device__ __forceinline__ void keep(int64_t slot, const Segment& segment) const {
    if (inside) *place(slot) = segment;
  }
  __device__ __forceinline__ Segment kept(int64_t slot) const { return *place(slot); }
};

template <class S, class I, bool kShares, bool kMax>
__global__ void __launch_bounds__(kReduceThreads, sizeof(I) == 8 ? 4
                                                  : kShares      ? 5
                                                                 : 6)
    reduce_kernel(const __grid_constant__ ReduceArgs args) {
  using Reducer = BestReducer<S, I, kShares, kMax>;
  const int lane = threadIdx.x & ((1 << args.plan.sub_warp_log2) - 1);
  const int first = static_cast<int>(blockIdx.y) * args.plan.slice_vectors;
  Reducer reducer(args, lane < args.plan.slice_vectors ? first + lane : args.vectors);
  reduce_segments<Reducer::kBatch, I>(args.graph, args.plan, reducer);
}

}  // namespace edgeless::cuda::reduction
