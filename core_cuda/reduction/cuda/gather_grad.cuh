// The gradient of a minimum or maximum, gathered: grad_x[j] is the sum over the out-edges (j, i) of the elements of i's
// gradient that belong to that edge. This is a segment reduction over the CSC (common/segment_reduce.cuh), whose rows
// are nodes j.
//
// An edge reads i's gradient and arguments, and adds the elements whose argument is its position in i's row. Reading
// the gradient only where an argument matches was slower: the latency of the dependent load costs more than the bytes.
// Tied elements name no edge; for these, x[j] is compared with the extremum. Storage: float, half, bfloat16, with sums
// in float.
#pragma once

#include "../../common/segment_reduce.cuh"
#include "args.h"

namespace edgeless::cuda::reduction {

template <class S, class Arg, bool kShares, int kBatch>
struct GatherGradReducer {
  using I = int32_t;
  static constexpr int kPer = kNumbers<S, 4>, kArgWords = kPer * sizeof(Arg) / 4, kInWord = 4 / sizeof(Arg);
  static constexpr uint32_t kShared = 1u << (8 * sizeof(Arg) - 1);
  static constexpr uint32_t kSharedInWord = sizeof(Arg) == 1 ? 0x80808080u : sizeof(Arg) == 2 ? 0x80008000u : kShared;
  static constexpr bool kCheapEnd = false;
  using Segment = Sums<float, kPer>;

  const GatherArgs& args;
  int vector;
  bool inside;
  Words<4> grad[kBatch];
  uint32_t code_words[kBatch][kArgWords], position[kBatch];
  I index[kShares ? kBatch : 1];
  Words<4> best[kShares ? kBatch : 1];  // the extrema of i, for tied elements
  float mine[kShares ? kPer : 1];       // x[j]
  I own_position;
  Segment total;

  __device__ GatherGradReducer(const GatherArgs& args, int vector) : args(args), vector(vector) {
    inside = vector < args.vectors;
  }

  __device__ __forceinline__ const Words<4>* words_of(const ReduceRows& rows, I row) const {
    return reinterpret_cast<const Words<4>*>(
        row_address(rows.base + (inside ? vector : 0) * int64_t(kPer * sizeof(S)), row, rows.row));
  }

  __device__ __forceinline__ void own(I, I position) {
    const I* ids = static_cast<const I*>(args.graph.edge_ids);
    own_position = __ldg(static_cast<const I*>(args.positions) + (ids ? __ldcs(ids + position) : position));
  }

  __device__ __forceinline__ void load(int u, I row, I) {
    if constexpr (kShares) index[u] = row;
    grad[u] = load_shared_words(words_of(args.grad, row));
    const char* at =
        row_address(static_cast<const char*>(args.arg) + (inside ? vector : 0) * int64_t(kPer * sizeof(Arg)), row,
                    static_cast<uint32_t>(args.width * sizeof(Arg)));
    constexpr int kStep = kArgWords < 4 ? kArgWords : 4;
#pragma unroll
    for (int part = 0; part < kArgWords / kStep; ++part) {
      const Words<kStep> words = load_shared_words(reinterpret_cast<const Words<kStep>*>(at) + part);
#pragma unroll
      for (int i = 0; i < kStep; ++i) code_words[u][part * kStep + i] = words.w[i];
    }
  }

  __device__ __forceinline__ uint32_t code(int u, int k) const {
    const uint32_t word = code_words[u][k / kInWord];
    if constexpr (sizeof(Arg) == 4) return word;
    return word >> (k % kInWord * 8 * sizeof(Arg)) & ((1u << (8 * (sizeof(Arg) % 4))) - 1);
  }

  __device__ __forceinline__ void choose(int b) {
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      position[u] = static_cast<uint32_t>(__shfl_sync(0xffffffffu, own_position, b + u, 1 << args.plan.sub_warp_log2));
    }
    if constexpr (kShares) {  // the extrema of all edges are in flight before the first is used
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (shares_some(u)) best[u] = load_shared_words(words_of(args.out, index[u]));
      }
    }
  }

  __device__ __forceinline__ bool shares_some(int u) const {
    uint32_t codes = 0;
#pragma unroll
    for (int word = 0; word < kArgWords; ++word) codes |= code_words[u][word];
    return codes & kSharedInWord;
  }

  __device__ __forceinline__ void take(int u, I) {
    float x[kPer];
    unpack_words<S, 4>(grad[u], x);
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      if (code(u, k) == position[u]) total.sum[k] += x[k];
    }
    if constexpr (kShares) {
      if (!shares_some(u)) return;
      float extremum[kPer];
      unpack_words<S, 4>(best[u], extremum);
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        // No branch, because a warp would take it if one lane does. __fdividef has an error of at most 2 ulp.
        const float share = __fdividef(x[k], static_cast<float>((code(u, k) & ~kShared) + 1));
        total.sum[k] += code(u, k) & kShared && mine[k] == extremum[k] ? share : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void begin(I row, I) {
    total.clear();
    if constexpr (kShares) {
      if (row < args.graph.num_rows) unpack_words<S, 4>(load_shared_words(words_of(args.x, row)), mine);
    }
  }

  __device__ __forceinline__ Segment segment(I, I) const { return total; }
  __device__ __forceinline__ void merge(Segment& segment, const Segment& later) const { segment.add(later); }

  __device__ __forceinline__ void store(int64_t row, const Segment& segment) const {
    if (inside)
      store_words_once(static_cast<S*>(args.grad_x) + row * args.width + vector * kPer, pack_words<S, 4>(segment.sum));
  }

  __device__ __forceinline__ void store_empty(int64_t row) const { store(row, Segment{}); }

  __device__ __forceinline__ Segment* place(int64_t slot) const {
    return reinterpret_cast<Segment*>(args.carry) + slot * args.vectors + vector;
  }
  __device__ __forceinline__ void keep(int64_t slot, const Segment& segment) const {
    if (inside) *place(slot) = segment;
  }
  __device__ __forceinline__ Segment kept(int64_t slot) const { return *place(slot); }
};

// Target occupancy in blocks per SM, for __launch_bounds__.
template <class S, class Arg>
constexpr int gather_grad_blocks(bool shares) {
  if (shares) return sizeof(S) == 2 ? 4 : 5;
  return sizeof(Arg) == 4 ? 6 : 7;
}

template <class S, class Arg, bool kShares>
__global__ void __launch_bounds__(kReduceThreads, gather_grad_blocks<S, Arg>(kShares))
    gather_grad_kernel(const __grid_constant__ GatherArgs args) {
  const int lane = threadIdx.x & ((1 << args.plan.sub_warp_log2) - 1);
  const int first = static_cast<int>(blockIdx.y) * args.plan.slice_vectors;
  GatherGradReducer<S, Arg, kShares, kGatherBatch> reducer(
      args, lane < args.plan.slice_vectors ? first + lane : args.vectors);
  reduce_segments<kGatherBatch, int32_t>(args.graph, args.plan, reducer);
}

}  // namespace edgeless::cuda::reduction
