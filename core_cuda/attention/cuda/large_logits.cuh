// Weights of large logits. A float near 64 is known to 4e-6, one near 1e6 to 0.06, and so would be P = 2^(s - shift).
// Three things keep P right there, and cost next to nothing where logits are small:
//
//   - shift, the row's logsumexp in base 2, is kept as two numbers: itself, rounded, and the rest.
//   - A logit has to have the same bits in every pass, but passes lay rows over lanes in different ways, and GATv2's
//     is made of other terms from the source's side. Where a shift is large, logits are made again by
//     natural_logit(), whose order of additions depends neither on the side nor on the lanes.
//   - These are logits in base e, as they are defined; what is lost by the factor log2 e is kept as well.
//
// Whether any team of a warp is in need of that is asked once a batch.
#pragma once

#include "lane.cuh"
#include "over_norms.cuh"
#include "scores.cuh"

namespace edgeless::cuda {

// The forward pass knows a row's shift by the logits seen so far alone: it begins at half of what is_large() asks for,
// so that of a row whose shift is large no edge that counts is missed.
template <class A>
__device__ __forceinline__ bool is_large_in_forward(A top) {
  return fabs(top) > A(32) && fabs(top) != A(INFINITY);  // infinite before the first edge
}

// What the forward pass keeps of a row's softmax, of its maximum and log2 of its sum.
template <class A>
__device__ __forceinline__ void store_shift(const Args<A>& args, int64_t at, A top, A log_of_sum) {
  const A shift = top + log_of_sum;
  args.shift[at] = shift;
  args.shift_rest[at] = fabs(shift) == A(INFINITY) ? A(0) : (top - shift) + log_of_sum;
}

// A logit in base 2, and what its rounding left: nothing of 16-bit rows, whose logits are worth less, and nothing of
// numbers so large that a power of two of it could overflow.
template <class S>
struct BaseTwo {
  using A = Arithmetic<S>;
  A whole, rest = 0;

  __device__ __forceinline__ explicit BaseTwo(A natural) : whole(rounded_product(natural, A(kLog2e))) {
    if (sizeof(S) > 2 && fabs(whole) < A(1 << 28)) {
      rest = fma(natural, kLog2eRest<A>, fma(natural, A(kLog2e), -whole));
    }
  }
};

// The sum over the row in the order of its vectors: a vector's elements one after the other, then pairs of neighbouring
// vectors, pairs of pairs and so on. Vector v * lanes + lane is the lane's v-th: the lanes meet first, in `meet`.
template <int kVecs, class A, class F>
__device__ __forceinline__ A sum_of_vectors(F&& meet) {
  static_assert(kVecs == 1 || kVecs == 2 || kVecs == 4);
  A sums[kVecs];
#pragma unroll
  for (int v = 0; v < kVecs; ++v) sums[v] = meet(v);
#pragma unroll
  for (int step = 1; step < kVecs; step *= 2) {
#pragma unroll
    for (int v = 0; v < kVecs; v += 2 * step) sums[v] += sums[v + step];
  }
  return sums[0];
}

// The logit, in base e, of the edge that this lane owns; without Args::logit_term. Of the batch of n edges that ends
// where the walk stands. Whole warp.
template <class Fn, class S, int kMode, int kVecs, int kEdges, class P, class I>
__device__ __forceinline__ Arithmetic<S> natural_logit(const Args<Arithmetic<S>>& args, const P& place,
                                                       const Walk<I>& walk, int n,
                                                       const Arithmetic<S> (&own)[kVecs * kVec<S>],
                                                       const uint4 (&rows)[kEdges][kVecs],
                                                       const OverNorms<Arithmetic<S>, Fn::kOverNorms>& norms,
                                                       Arithmetic<S> own_over, Arithmetic<S> other_over) {
  using A = Arithmetic<S>;
  constexpr int kV = kVec<S>;
  A att[kVecs * kV], shares[kVecs][kEdges];
  if constexpr (Fn::kAtt) load_vector<S, kVecs>(args.att, place, args.key_vectors, att);
#pragma unroll
  for (int u = 0; u < kEdges; ++u) {
    A other[kVecs * kV];
    unpack_all<S, kVecs>(rows[u], other);
    if constexpr (kMode == kEdgeTerm) {  // added to the sum of both rows, so that neither has it
#pragma unroll
      for (int k = 0; k < kVecs * kV; ++k) other[k] -= own[k];
      if (n > 0 && args.proj) {
        add_edge_term<S, kVecs>(args, place, edge_id(args.graph, walk.edge - n + min(u, n - 1)), other);
      }
    }
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      shares[v][u] = 0;
#pragma unroll
      for (int k = v * kV; k < (v + 1) * kV; ++k) {
        const A mine = kMode == kEdgeTerm ? A(0) : own[k];
        shares[v][u] = Fn::symmetric(shares[v][u], mine, other[k], Fn::kAtt ? att[k] : A(0), args.coefficient);
      }
    }
  }
  const A sum =
      sum_of_vectors<kVecs, A>([&](int v) { return sum_of_own_edge<kEdges>(shares[v], place.lane, place.width()); });
  return norms.natural(args, Fn::natural(sum, args.coefficient), own_over, other_over);
}

}  // namespace edgeless::cuda
