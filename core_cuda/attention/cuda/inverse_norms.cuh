// Scores that divide by the norms of both rows (kInverseNorms): s = factor * <own, other> / (norm of own * norm of
// other), with the head's factor in Args::att and 1 / norm per node and head in Args::dst_over_norm and src_over_norm.
// own and other: see scores.cuh.
//
// A pass sums over edges what is linear in the gathered rows: G = sum of ds / norm of other * other. The own norm is
// applied when a row ends: with r = 1 / norm of own, the row's gradient is factor * r (G - <G, r own> r own), and the
// factor's gradient is <G, r own>. A norm below the least norm is replaced by that constant: r is then stored negative,
// and the second term is left out. All this is linear in G, so each segment of a row may be closed separately.
//
// A constant times the row's sum of ds is subtracted from the factor's gradient. That sum is zero except for rounding:
// an error shared by all ds of a row, such as a rounded Delta, would otherwise be multiplied by the mean cosine of the
// row, which is nearly one for nonnegative features.
#pragma once

#include "edge_data.cuh"

namespace edgeless::cuda {

// The variant for scores without norms. Its functions do nothing, and the compiler removes their calls.
template <class A, bool kThere>
struct InverseNorms {
  __device__ InverseNorms(const Args<A>&, const A* /*own*/, const A* /*others*/, int /*head*/) {}
  template <class I>
  __device__ A own(I /*row*/) const {
    return 0;
  }
  template <class I>
  __device__ A other(I /*index*/) const {
    return 1;
  }
  __device__ A logit(A dot, A /*own*/, A /*other*/) const { return dot; }
  __device__ A of_edge(A ds, A /*other*/, bool /*valid*/) const { return ds; }
};

template <class A>
struct InverseNorms<A, true> {
  const A* own_base;     // read once per row, so not held in a register
  const char* other_at;  // offset to the head
  uint32_t stride;
  int heads, head;
  A factor;  // times log2 e: logits are in base 2

  __device__ InverseNorms(const Args<A>& args, const A* own, const A* others, int head)
      : own_base(own),
        other_at(held(reinterpret_cast<const char*>(others + head))),
        stride(static_cast<uint32_t>(args.heads * sizeof(A))),
        heads(args.heads),
        head(head),
        factor(static_cast<const A*>(args.att)[head] * A(kLog2e)) {}

  // 1 / norm of the own row, negative where the least norm replaces the norm. Callers use 0 where there is no row.
  template <class I>
  __device__ __forceinline__ A own(I row) const {
    return __ldg(own_base + (static_cast<int64_t>(row) * heads + head));
  }
  template <class I>
  __device__ __forceinline__ A other(I index) const {
    return fabs(__ldg(reinterpret_cast<const A*>(row_address(other_at, index, stride))));
  }
  __device__ __forceinline__ A logit(A dot, A own, A other) const { return dot * (factor * fabs(own) * other); }
  // The factor of the gathered row in G. Beyond a batch's end, `other` belongs to some other row and may be NaN.
  __device__ __forceinline__ A of_edge(A ds, A other, bool valid) const { return valid ? ds * other : A(0); }

  // Converts G (`sum`) to the gradient of the row and returns <G, r own>. Called by all lanes of a sub-warp.
  template <int kPer, class P>
  __device__ __forceinline__ A close(A (&sum)[kPer], const A (&own)[kPer], A over, const P& place) const {
    A dot = 0;
    if (over != 0) {
#pragma unroll
      for (int k = 0; k < kPer; ++k) dot = fma(sum[k], own[k], dot);
      dot = place.sum_of_row(dot, place.mask()) * fabs(over);
    }
    const A along = over > 0 ? dot * over : A(0), scale = factor * A(kLn2) * fabs(over);
#pragma unroll
    for (int k = 0; k < kPer; ++k) sum[k] = over != 0 ? fma(-own[k], along, sum[k]) * scale : A(0);
    return dot;
  }

  // Approximately the mean cosine of the row, times its sum of ds. logsumexp: of the row, in base 2; the mean cosine is
  // near log2 of the mean of 2^s, divided by the factor. Returns zero where the factor is too small for that.
  template <class I>
  __device__ __forceinline__ A center(const CompressedGraph& graph, I row, A logsumexp, A sum_ds) const {
    const I* indptr = static_cast<const I*>(graph.indptr);
    const float degree = static_cast<float>(indptr[row + 1] - indptr[row]);
    const float mean = __fdividef(static_cast<float>(logsumexp) - __log2f(degree), static_cast<float>(factor));
    return fabsf(mean) < 1.25f ? A(mean) * sum_ds : A(0);
  }

  // close() with `own` as paired 16-bit words (mma.cuh).
  template <class S, int kVecs, int kPer, class P>
  __device__ __forceinline__ A close_words(A (&sum)[kPer], const uint4 (&own)[kVecs], A over, const P& place) const {
    uint4 words[kVecs];
    A x[kPer];
#pragma unroll
    for (int v = 0; v < kVecs; ++v) words[v] = uint4{own[v].x, own[v].z, own[v].y, own[v].w};
    unpack_all<S, kVecs>(words, x);
    return close(sum, x, over, place);
  }
};

// The gradient of the factor. Every sub-warp accumulates its part in shared memory. store() adds up the parts of a
// block's workers in their order to one partial sum per block and head.
template <class A>
struct FactorShares {
  A at[kMaxSubWarps];

  template <class P>
  __device__ void clear(const P& place) {
    if (place.lane == 0) at[place.sub_warp] = 0;
  }
  template <class P>
  __device__ void add(const P& place, A share) {
    if (place.lane == 0) at[place.sub_warp] += share;
  }
  template <class P>
  __device__ void store(const Args<A>& args, const P& place) const {
    __syncthreads();
    if (!place.working || place.worker > 0 || place.lane > 0) return;
    A total = at[place.sub_warp];
    for (int worker = 1; worker < place.workers; ++worker) total += at[place.sub_warp + worker * place.worker_distance];
    args.grad_att[static_cast<int64_t>(blockIdx.x) * args.heads + place.head] = total;
  }
};

}  // namespace edgeless::cuda
