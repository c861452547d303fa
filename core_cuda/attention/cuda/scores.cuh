// What a score is, on the side of one row ("own") and the rows it gathers ("other"). Dot product and GATv2 do not care
// which side is the destination: one functor serves the pass by destination and the pass by source. To add a score,
// add a struct here and an instance in instances/.
//
//   kScalar       the logit is made of one number per node and head, no rows are gathered for it
//   kOwnValue     the values are other rows than the keys
//   own(x)        what is kept of a row's element;  raw(own) gives x back
//   hidden(o, x)  what an element contributes, before its weight in the logit; term: the edge term
//   logit         adds the element to the logit, which is in base 2 (times log2 e)
//   grad          adds ds * d logit / d own, up to finish(), which needs the sum of ds as well
//   att_grad      what the row adds to the gradient of the attention vector, given the sums of both sides
#pragma once

#include "../../common/vec.cuh"
#include "args.h"

namespace edgeless::cuda {

// s = scale * <q, k>
struct DotScore {
  static constexpr Score kScore = Score::dot;
  static constexpr bool kScalar = false, kOwnValue = true, kAtt = false;

  template <class A>
  static __device__ A own(A x, A scale) { return x * (scale * A(kLog2e)); }
  template <class A>
  static __device__ A raw(A own) { return own; }
  template <class A>
  static __device__ A hidden(A /*own*/, A other) { return other; }
  template <bool kAnySlope, class A>
  static __device__ A logit(A sum, A own, A hidden, A /*att*/, A /*scale*/, bool /*steep*/) {
    return fma(own, hidden, sum);
  }
  template <class A>
  static __device__ A grad(A sum, A hidden, A ds) { return fma(ds, hidden, sum); }
  template <class A>
  static __device__ A finish(A sum, A /*sum_ds*/, A scale) { return sum * scale; }
};

// s = <att, leaky_relu(x_l + x_r + t)> (Brody et al. 2022, equation 7)
//
// Kept: -x, so hidden is n = -(x_l + x_r + t) and leaky_relu(-n) = -min(n, slope n) for slopes up to 1. Its derivative
// is (1 + slope) / 2 plus (1 - slope) / 2 with the sign of -n, so ds is summed once as it is and once per element with
// the sign of n flipped in: no compare, no multiply. Zeros come out as +0, where the derivative is the slope.
//
// LeakyReLU(z) = z * its derivative, and z is x_l + x_r + t. So the gradient of att, a sum over all edges, is the sum
// over destinations of x_r times what the pass by destination has anyway, plus the same of x_l by source, plus the
// edge term's: nothing is done for it per edge.
struct Gatv2Score {
  static constexpr Score kScore = Score::gatv2;
  static constexpr bool kScalar = false, kOwnValue = false, kAtt = true;

  template <class A>
  static __device__ A own(A x, A /*slope*/) { return A(0) - x; }
  template <class A>
  static __device__ A raw(A own) { return -own; }
  template <class A>
  static __device__ A hidden(A own, A other) { return own - other; }
  // att is given times -log2 e; steep: the slope is over 1
  template <bool kAnySlope, class A>
  static __device__ A logit(A sum, A /*own*/, A n, A att, A slope, bool steep) {
    const A m = slope * n;
    return fma(att, kAnySlope && steep ? max(n, m) : min(n, m), sum);
  }
  template <class A>
  static __device__ A grad(A sum, A n, A ds) { return sum + flip_sign(ds, n); }
  template <class A>
  static __device__ A finish(A sum, A sum_ds, A slope) {
    return (1 + slope) / 2 * sum_ds + (slope - 1) / 2 * sum;
  }
};

// s = leaky_relu(a_l + a_r + t), numbers (Veličković et al. 2018, equation 3)
struct GatScore {
  static constexpr Score kScore = Score::gat;
  static constexpr bool kScalar = true, kOwnValue = true, kAtt = false;

  template <class A>
  static __device__ A leaky(A z, A slope) { return z > 0 ? z : slope * z; }
  template <class A>
  static __device__ A derivative(A z, A slope) { return z > 0 ? A(1) : slope; }
};

}  // namespace edgeless::cuda
