// Score functors. `own` is the row that a sub-warp reduces, `other` a row that it gathers: destination and source in
// the forward and the destination pass, source and destination in the source pass. A score is symmetric in the two, so
// one functor serves all passes. To add a score, add a struct here.
//
//   kScalar        the logit has one scalar per node and head: no rows are gathered for it
//   kOwnValue      values and keys are different rows
//   kAtt           there is an attention vector, and finish() needs the sum of ds
//   kInverseNorms  the score divides by the norms of both rows: the functor computes the dot product, and the passes
//                  apply the norms (inverse_norms.cuh)
//   own(x)         the form in which an element x of the own row is held in registers; raw(own(x)) is x
//   Partial        a lane's part of an edge's logit: add() an element, then sum(). Its initial value is the lane's part
//                  of the row's constant
//   scaled         the logit from the sum over all lanes. Logits are in base 2: scaled() or att includes log2 e
//   grad           adds ds * d logit / d own, except for the factors that finish() applies at the end of the row

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
  // Scales the sum and not the own row: which side is `own` depends on the pass, and all passes have to compute the
  // same logit (docs/decisions/0007).
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

// s = <att, leaky_relu(x + y)>, x the own row, y the gathered row with the edge term (Brody et al. 2022, equation 7)
//
// With slope c:  leaky_relu(x + y) = c (x + y) + (1 - c) (max(y, -x) + x), for any c. So
//
//   s = <att, x> + c <att, y> + (1 - c) <att, max(y, -x)>
//
// The first term is a constant of the row. In the source pass, where y is a destination's row, the second is a constant
// of the destination and part of the shift that the destination pass writes (kLinear is false). An element costs a
// maximum and one or two multiply-adds. The derivative is 1 where y > -x, else c (at 0 too, as in PyTorch); finish()
// applies c.
//
// leaky_relu(z) = z * its derivative, and z = x + y. So the gradient of att, a sum over all edges, is the sum over
// destinations of x_r times what the destination pass sums anyway, plus the sum over sources of x_l times what the
// source pass sums, plus the edge term's part: it needs no work per edge.
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
    A bent, linear;  // of_row is in both or only in `linear`, so that sum() has <att, x> once
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

// s = factor <x, y> / (max(|x|, least) max(|y|, least)) (Thekumparampil et al. 2018, equation 4). The gathered row is
// both key and value.
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

// s = leaky_relu(a_l + a_r + t), all scalars (Veličković et al. 2018, equation 3)
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
