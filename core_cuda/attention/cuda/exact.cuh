// Rows with large logits, in the backward. A float32 logsumexp near 4,000 has an error of 2e-4, and all weights of its
// row would have this relative error and not sum to one. Such rows are recomputed in double: logits, the softmax's sum
// and Delta. The tile loops do next to nothing for this. Where a row's logsumexp is large, the destination pass stores
// NaN as the row's statistics, and the NaN reaches, in the source pass, the sums of every row that gathers them. A
// block with such a row processes its range again (walk_again) with the functions below. These are not inlined, so that
// the loops keep their registers, and slow: one function for all widths and options (docs/decisions/0007).
//
// Where the gradients of sources overwrite their rows, the source pass cannot process a quota twice. In that case the
// destination pass records whether it has found such a row (Args::some_large), and if so, the source pass computes all
// its rows by the functions below.
#pragma once

#include "edge_data.cuh"
#include "inverse_norms.cuh"
#include "scores.cuh"

namespace edgeless::cuda {

// Returns whether a base-2 logit is large: above 355 in base e, where rounding to float has an error of 1.5e-5.
template <class A>
__device__ __forceinline__ bool is_large(A logit) {
  return fabs(logit) > 512;
}

// True if rows of a storage type are recomputed. float64 is accurate enough, and 16-bit logits have only three accurate
// digits.
template <class S>
constexpr bool kMakesExact = std::is_same_v<S, float>;

struct SubWarpOfHead {
  int head, lane, width;
  unsigned mask;  // the sub-warp's lanes in its warp
  bool fives;

  template <class P>
  __device__ explicit SubWarpOfHead(const P& place)
      : head(place.head), lane(place.row_lane()), width(place.row_width()), mask(place.mask()), fives(P::kFives) {}
};

// A row and the range of its edges in the sub-warp's quota.
template <class I>
struct RowOfSubWarp {
  I row, first, last;
  bool begins;  // the range begins with the row's first edge
  int size;     // values per lane
};

template <class Fn, class I>
struct ExactWalk : SubWarpOfHead {
  static constexpr int kMostColumns = 16;  // per lane

  const Args<float>& args;
  bool by_src;  // rows are sources
  uint64_t seed = 0;

  __device__ ExactWalk(const Args<float>& args, const SubWarpOfHead& sub_warp, bool by_src)
      : SubWarpOfHead(sub_warp), args(args), by_src(by_src) {
    if (args.has_dropout) seed = static_cast<uint64_t>(*args.seed);
  }

  struct Edge {
    int64_t dst, src, at;  // at: index in [E, H] arrays
    double logit, derivative, keep, scale;
    double dp;  // <grad_out, value> + value_term
  };

  template <class T>
  __device__ static T number(const Rows& rows, int64_t row, int head, int column) {
    return *(reinterpret_cast<const T*>(rows.base + row * rows.row + head * rows.head) + column);
  }
  __device__ double sub_warp_sum_of(double x) const {
    if (!fives) return sub_warp_sum(x, width, mask);
    double sum = 0;
    for (int i = 0; i < width; ++i) sum += __shfl_sync(mask, x, __ffs(mask) - 1 + i);
    return sum;
  }

  // Calls f(column, index of the column among the lane's own).
  template <class F>
  __device__ void for_columns(int vectors, F&& f) const {
    int own = 0;
    for (int vector = lane; vector < vectors; vector += width) {
      for (int k = 0; k < 4; ++k) f(4 * vector + k, own++);
    }
  }

  // The source's value in a column, with the edge term.
  __device__ double key(const Edge& edge, int column) const {
    double x = number<float>(args.src, edge.src, head, column);
    if (args.proj) {
      const float* attr =
          reinterpret_cast<const float*>(args.edge_attr.base + edge.at / args.heads * args.edge_attr.row);
      const int columns = 4 * args.key_vectors;
      const float* proj = args.proj + static_cast<int64_t>(head) * args.edge_dim * columns + column;
      for (int d = 0; d < args.edge_dim; ++d) x = fma(double(attr[d]), double(proj[int64_t(d) * columns]), x);
    }
    return x;
  }

  __device__ Edge edge(I row, I position) const {
    Edge e{};
    const int64_t other = static_cast<const I*>(args.graph.indices)[position], id = edge_id(args.graph, position);
    e.dst = by_src ? other : row, e.src = by_src ? row : other;
    e.at = id * args.heads + head;
    e.keep = args.has_dropout ? dropout_factor(args, seed, id, head) : 1.0f;
    e.scale = args.scale ? args.scale[id * args.scale_edge + head * args.scale_head] : 1.0f;
    e.derivative = 1;
    if (args.grad_out) {
      const Rows& values = Fn::kOwnValue ? args.value : args.src;
      for_columns(args.value_vectors, [&](int column, int) {
        e.dp = fma(double(number<float>(args.grad_out, e.dst, head, column)),
                   double(number<float>(values, e.src, head, column)), e.dp);
      });
      e.dp = sub_warp_sum_of(e.dp);
    }
    if (args.value_term) e.dp += args.value_term[e.at];

    if constexpr (Fn::kScalar) {
      if (args.dst) e.logit += number<float>(args.dst, e.dst, head, 0);
      if (args.src) e.logit += number<float>(args.src, e.src, head, 0);
    } else {
      for_columns(args.key_vectors, [&](int column, int) {
        const double x = number<float>(args.dst, e.dst, head, column), y = key(e, column);
        if constexpr (Fn::kAtt) {
          const double z = x + y;
          e.logit = fma(att(column), z > 0 ? z : args.coefficient * z, e.logit);
        } else {
          e.logit = fma(x, y, e.logit);
        }
      });
      e.logit = sub_warp_sum_of(e.logit);
    }
    if constexpr (Fn::kScore == Score::dot) e.logit *= args.coefficient;
    if constexpr (Fn::kInverseNorms) {
      const double factor = static_cast<const float*>(args.att)[head];
      e.logit *= factor * fabs(double(over(args.dst_over_norm, e.dst)) * over(args.src_over_norm, e.src));
    }
    if (args.logit_term) e.logit += args.logit_term[e.at];
    if constexpr (Fn::kScalar) {
      e.derivative = e.logit > 0 ? 1 : args.coefficient;
      e.logit *= e.derivative;
    }
    return e;
  }

  __device__ double att(int column) const {
    return static_cast<const float*>(args.att)[head * 4 * args.key_vectors + column];
  }

  __device__ float over(const float* norms, int64_t row) const { return norms[row * args.heads + head]; }

  // dP: the gradient of the weight before dropout and scale.
  __device__ double of_weight(const Edge& e) const {
    return e.keep * (e.dp * e.scale + (args.grad_weights ? args.grad_weights[e.at] : 0.0f));
  }

  // Writes the statistics of a destination for the source pass. kEdgeTerm: the source pass computes the whole logit,
  // see scores.cuh.
  template <bool kEdgeTerm>
  __device__ void leave(I row, double logsumexp, double delta) const {
    const int64_t at = static_cast<int64_t>(row) * args.heads + head;
    double constant = 0;
    if constexpr (Fn::kAtt) {
      for_columns(args.key_vectors, [&](int column, int) {
        constant = fma(att(column), double(number<float>(args.dst, row, head, column)), constant);
      });
      constant = sub_warp_sum_of(constant);
    }
    if (lane > 0) return;
    if (is_large(args.logsumexp[at] * kLog2e) || is_large(constant * kLog2e)) {
      if (args.stats) args.stats[2 * at] = args.stats[2 * at + 1] = NAN;
      if (args.delta) args.delta[at] = NAN;
      if (args.exact) {
        args.exact[2 * at] = static_cast<float>(logsumexp - args.logsumexp[at]);
        args.exact[2 * at + 1] = static_cast<float>(delta);
      }
    } else {
      const double shift = (kEdgeTerm ? logsumexp : logsumexp - args.coefficient * constant) * kLog2e;
      if (args.stats)
        args.stats[2 * at] = static_cast<float>(shift), args.stats[2 * at + 1] = static_cast<float>(delta);
      if (args.delta) args.delta[at] = static_cast<float>(delta);
    }
  }

  // Adds an edge's part of the row's key gradient, as Fn::grad() does in the loops.
  __device__ void add_key(const Edge& e, double ds, double (&sums)[kMostColumns]) const {
    if constexpr (!Fn::kScalar) {
      for_columns(args.key_vectors, [&](int column, int k) {
        const double x = number<float>(args.dst, e.dst, head, column), y = key(e, column);
        if constexpr (Fn::kAtt) {
          if (x + y > 0) sums[k] += ds;
        } else if constexpr (Fn::kInverseNorms) {
          const float other = by_src ? over(args.dst_over_norm, e.dst) : over(args.src_over_norm, e.src);
          sums[k] = fma(ds * fabs(double(other)), by_src ? x : y, sums[k]);
        } else {
          sums[k] = fma(ds, by_src ? x : y, sums[k]);
        }
      });
    }
  }
};

// The two functions below compute the sums of the tile loops. They store the vectors to `keys` and `values` and return
// the scalar. Called by a whole sub-warp.

// The sums of the destination pass. Also writes the row's statistics for the source pass.
template <class Fn, bool kEdgeTerm, class I>
__device__ __noinline__ float exact_by_dst(const Args<float>& args, SubWarpOfHead sub_warp, RowOfSubWarp<I> row,
                                           float* keys) {
  using Walk = ExactWalk<Fn, I>;
  __syncwarp(sub_warp.mask);  // per-edge outputs are written again, by other lanes
  const Walk walk(args, sub_warp, false);
  double logsumexp = 0, delta = 0;
  if (row.first < row.last) {
    const I* indptr = static_cast<const I*>(args.graph.indptr);
    double most = -INFINITY, sum = 0;
    for (I position = indptr[row.row]; position < indptr[row.row + 1]; ++position) {
      const auto e = walk.edge(row.row, position);
      if (e.logit > most) {
        const double shrink = exp(most - e.logit);
        most = e.logit, sum *= shrink, delta *= shrink;
      }
      const double p = e.logit == -INFINITY ? 0 : exp(e.logit - most);  // `most` may still be -infinity
      sum += p, delta = fma(p, walk.of_weight(e), delta);
    }
    logsumexp = most + log(sum), delta /= sum;
    if (row.begins) walk.template leave<kEdgeTerm>(row.row, logsumexp, delta);
  }

  double sums[Walk::kMostColumns] = {}, scalar = 0;
  for (I position = row.first; position < row.last; ++position) {
    const auto e = walk.edge(row.row, position);
    const double p = exp(e.logit - logsumexp), ds = p * (walk.of_weight(e) - delta);
    if (sub_warp.lane == 0) {
      if (args.grad_scale) args.grad_scale[e.at] = static_cast<float>(p * e.keep * e.dp);
      if (args.weights_out)
        args.weights_out[e.at] = static_cast<float>(p * e.keep * (args.weights_scaled ? e.scale : 1));
      if (args.ds_out) {
        const int64_t at = args.ds_in_order ? static_cast<int64_t>(position) * args.heads + sub_warp.head : e.at;
        args.ds_out[at] = static_cast<float>(ds * e.derivative);
      }
    }
    scalar = fma(ds, e.derivative, scalar);
    walk.add_key(e, ds, sums);
  }
  for (int k = 0; k < row.size; ++k) keys[k] = static_cast<float>(sums[k]);
  return static_cast<float>(scalar);
}

// The sums of the source pass.
template <class Fn, class I>
__device__ __noinline__ float exact_by_src(const Args<float>& args, SubWarpOfHead sub_warp, RowOfSubWarp<I> row,
                                           float* keys, float* values) {
  using Walk = ExactWalk<Fn, I>;
  const Walk walk(args, sub_warp, true);
  double sums[Walk::kMostColumns] = {}, value_sums[Walk::kMostColumns] = {}, scalar = 0;
  for (I position = row.first; position < row.last; ++position) {
    const auto e = walk.edge(row.row, position);
    const int64_t at = e.dst * args.heads + sub_warp.head;
    double logsumexp = args.logsumexp[at], delta = args.stats ? args.stats[2 * at + 1] : args.delta[at];
    // Tests the shift, since a Delta that is NaN may be the user's.
    if (args.stats ? isnan(args.stats[2 * at]) : is_large(logsumexp * kLog2e)) {
      logsumexp += args.exact[2 * at], delta = args.exact[2 * at + 1];
    }
    const double p = exp(e.logit - logsumexp), ds = p * (walk.of_weight(e) - delta), w = p * e.keep * e.scale;
    scalar = fma(ds, e.derivative, scalar);
    walk.add_key(e, ds, sums);
    if (args.grad_out) {
      walk.for_columns(args.value_vectors, [&](int column, int k) {
        const float grad = Walk::template number<float>(args.grad_out, e.dst, sub_warp.head, column);
        value_sums[k] = fma(w, double(grad), value_sums[k]);
      });
    }
  }
  for (int k = 0; k < row.size; ++k)
    keys[k] = static_cast<float>(sums[k]), values[k] = static_cast<float>(value_sums[k]);
  return static_cast<float>(scalar);
}

}  // namespace edgeless::cuda
