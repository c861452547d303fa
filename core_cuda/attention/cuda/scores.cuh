// What a score is, on the side of one row ("own") and the rows it gathers ("other"). Dot product and GATv2 do not care
// which side is the destination: one functor serves the pass by destination and the pass by source. To add a score,
// add a struct here and an instance in instances/.
//
//   kScalar    the logit is made of one number per node and head, no rows are gathered for it
//   kOwnValue  the values are other rows than the keys
//   kAtt       there is an attention vector, and the gradients are made of the sum of ds as well
//   kInverseNorms  the score divides by the norms of both rows, see inverse_norms.cuh: it is made of the rows as they
//              are, and the skeleton does the rest
//   own(x)     what is kept of an element of the own row; raw(own) gives x back
//   Partial    what a lane sums of an edge's logit: add() an element, then sum(). It begins with the lane's share of
//              what depends on the row alone
//   scaled     the logit, of what all lanes sum. Logits are in base 2: here they are multiplied by log2 e, or att was
//   grad       adds ds * d logit / d own, up to finish(), which needs the sum of ds as well

#pragma once

#include "../../common/vec.cuh"
#include "args.h"

namespace edgeless::cuda {

// s = scale * <q, k>
struct DotScore {
  static constexpr Score kScore = Score::dot;
  static constexpr bool kScalar = false, kOwnValue = true, kAtt = false, kInverseNorms = false;

  template <class A>
  static __device__ A own(A x) {
    return x;
  }
  // Not the own row is scaled: which of the two that is depends on the pass, and all passes have to come to the same
  // logit (docs/decisions/0007).
  template <class A>
  static __device__ A scaled(A sum, A base_two_coefficient) {
    return sum * base_two_coefficient;
  }

  template <class A, bool kLinear>
  struct Partial {
    A dot = 0;
    __device__ explicit Partial(A /*of_row*/) {}
    __device__ void add(A own, A other, A /*att*/) { dot = fma(own, other, dot); }
    __device__ A sum(A /*scale*/) const { return dot; }
  };

  template <class A>
  static __device__ void grad(A& sum, A /*own*/, A other, A ds) {
    sum = fma(ds, other, sum);
  }
  template <class A>
  static __device__ A finish(A sum, A /*sum_ds*/, A scale) {
    return sum * scale;
  }
};

// s = <att, leaky_relu(x + y)>, x the own row, y the other with the edge term (Brody et al. 2022, equation 7)
//
// With slope c:  leaky_relu(x + y) = c (x + y) + (1 - c) (max(y, -x) + x), for any c. So
//
//   s = <att, x> + c <att, y> + (1 - c) <att, max(y, -x)>
//
// The first term is a number of the row. In the pass by source, where y is a destination's row, so is the second: it
// is part of what the pass by destination leaves there (kLinear is false). An element costs a maximum and one or two
// multiply-adds. Its derivative is 1 where y > -x, else c (at 0 too, as in PyTorch): c is left to finish().
//
// leaky_relu(z) = z * its derivative, and z = x + y. So the gradient of att, a sum over all edges, is the sum over
// destinations of x_r times what the pass by destination has anyway, plus the same of x_l by source, plus the edge
// term's: nothing is done for it per edge.
struct Gatv2Score {
  static constexpr Score kScore = Score::gatv2;
  static constexpr bool kScalar = false, kOwnValue = false, kAtt = true, kInverseNorms = false;

  template <class A>
  static __device__ A own(A x) {
    return -x;
  }
  template <class A>
  static __device__ A raw(A own) {
    return -own;
  }

  template <class A, bool kLinear>
  struct Partial {
    A bent, linear;  // <att, x> comes in by either way
    __device__ explicit Partial(A of_row) : bent(kLinear ? of_row : A(0)), linear(of_row) {}
    __device__ void add(A own, A other, A att) {
      bent = fma(att, max(other, own), bent);
      if (kLinear) linear = fma(att, other, linear);
    }
    __device__ A sum(A slope) const { return kLinear ? fma(slope, linear - bent, bent) : fma(1 - slope, bent, linear); }
  };

  template <class A>
  static __device__ A scaled(A sum, A /*base_two_coefficient*/) {
    return sum;
  }

  template <class A>
  static __device__ void grad(A& sum, A own, A other, A ds) {
    if (other > own) sum += ds;
  }
  template <class A>
  static __device__ A finish(A sum, A sum_ds, A slope) {
    return fma(slope, sum_ds - sum, sum);
  }
};

// s = factor <x, y> / (max(|x|, least) max(|y|, least)) (Thekumparampil et al. 2018, equation 4). An edge gathers one
// row, which is key and value.
struct CosineScore {
  static constexpr Score kScore = Score::cosine;
  static constexpr bool kScalar = false, kOwnValue = false, kAtt = false, kInverseNorms = true;

  template <class A>
  static __device__ A own(A x) {
    return x;
  }
  template <class A>
  static __device__ A raw(A own) {
    return own;
  }

  template <class A, bool kLinear>
  struct Partial {
    A dot = 0;
    __device__ explicit Partial(A /*of_row*/) {}
    __device__ void add(A own, A other, A /*att*/) { dot = fma(own, other, dot); }
    __device__ A sum(A /*least*/) const { return dot; }
  };

  template <class A>
  static __device__ A scaled(A sum, A /*base_two_coefficient*/) {
    return sum;
  }

  template <class A>
  static __device__ void grad(A& sum, A /*own*/, A other, A ds) {
    sum = fma(ds, other, sum);
  }
  template <class A>
  static __device__ A finish(A sum, A /*sum_ds*/, A /*least*/) {
    return sum;
  }
};

// s = leaky_relu(a_l + a_r + t), numbers (Veličković et al. 2018, equation 3)
struct GatScore {
  static constexpr Score kScore = Score::gat;
  static constexpr bool kScalar = true, kOwnValue = true, kAtt = false, kInverseNorms = false;

  template <class A>
  static __device__ A leaky(A z, A slope) {
    return z > 0 ? z : slope * z;
  }
  template <class A>
  static __device__ A derivative(A z, A slope) {
    return z > 0 ? A(1) : slope;
  }
};

}  // namespace edgeless::cuda
