// Shared memory of the destination pass (by_dst.cuh): segments of rows, and the gradient of the attention vector.
#pragma once

#include "inverse_norms.cuh"
#include "lane.cuh"

namespace edgeless::cuda {

// Shared memory for the segment of a row that an earlier worker merges. kVector: the segment has a vector and a scalar,
// else only a scalar.
template <class A, int kPer, bool kVector = true>
struct BackwardSegments {
  A acc[kVector ? kPer : 1][kVector ? kBlockThreads : 1];
  A scalar[kMaxSubWarps];

  template <class P>
  __device__ __forceinline__ void leave(const P& place, const A (&sum)[kPer], A sum_scalar) {
    if constexpr (kVector) {
#pragma unroll
      for (int k = 0; k < kPer; ++k) acc[k][threadIdx.x] = sum[k];
    }
    if (place.lane == 0) scalar[place.sub_warp] = sum_scalar;
  }

  // Adds the segment that sub-warp `sub_warp` left; `thread` left the values of this lane.
  __device__ __forceinline__ void add_to(A (&sum)[kPer], A& sum_scalar, int sub_warp, int thread) const {
    sum_scalar += scalar[sub_warp];
    if constexpr (kVector) {
#pragma unroll
      for (int k = 0; k < kPer; ++k) sum[k] += acc[k][thread];
    }
  }
};

// The gradient of the attention vector. Every lane accumulates its part in its own entries of shared memory, which
// saves registers in the loop. store() adds up the parts of a block's workers in their order to one partial sum per
// block and head.
template <class A, int kPer>
struct AttShares {
  A at[kPer][kBlockThreads];

  __device__ void clear() {
#pragma unroll
    for (int k = 0; k < kPer; ++k) at[k][threadIdx.x] = 0;
  }

  // own: the negated row; sum: the row's sum of ds over the edges with derivative 1 (Fn::grad); sum_ds: over all edges
  template <class Fn>
  __device__ void add(const A (&own)[kPer], const A (&sum)[kPer], A sum_ds, A coefficient) {
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      at[k][threadIdx.x] = fma(Fn::raw(own[k]), Fn::finish(sum[k], sum_ds, coefficient), at[k][threadIdx.x]);
    }
  }

  // add() with `own` as paired 16-bit words (mma.cuh).
  template <class Fn, class S, int kVecs>
  __device__ void add_words(const uint4 (&own)[kVecs], const A (&sum)[kPer], A sum_ds, A coefficient) {
    uint4 words[kVecs];
    A x[kPer];
#pragma unroll
    for (int v = 0; v < kVecs; ++v) words[v] = uint4{own[v].x, own[v].z, own[v].y, own[v].w};
    unpack_all<S, kVecs>(words, x);
    add<Fn>(x, sum, sum_ds, coefficient);
  }

  template <class S, int kVecs, class P>
  __device__ void store(const Args<A>& args, const P& place) const {
    __syncthreads();
    if (!place.working || place.worker > 0) return;
    A total[kPer];
#pragma unroll
    for (int k = 0; k < kPer; ++k) total[k] = at[k][threadIdx.x];
    for (int worker = 1; worker < place.workers; ++worker) {
#pragma unroll
      for (int k = 0; k < kPer; ++k) total[k] += at[k][place.thread_ahead(worker * place.worker_distance)];
    }
    const int64_t width = args.key_vectors * kVec<S>;
    A* to = args.grad_att + (static_cast<int64_t>(blockIdx.x) * args.heads + place.head) * width;
    store_segment<S, kVecs>(to, place, args.key_vectors, total);
  }
};

struct NoShares {};

template <class Fn, class A, int kPer>
using RowShares =
    std::conditional_t<Fn::kAtt, AttShares<A, kPer>, std::conditional_t<Fn::kInverseNorms, FactorShares<A>, NoShares>>;

}  // namespace edgeless::cuda
