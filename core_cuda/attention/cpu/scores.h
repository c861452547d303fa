// Score functors: the logit and its gradient, for one query-side row (`own`) and the gathered rows of a chunk. The
// functions are symmetric in the two sides, so one functor serves the destination pass and the source pass. Included
// once per instruction set. To add a score, add a struct with these two functions and its line in common/score.h.
//
//   logits(args, own, rows, n, s, prefetch)
//       s[h, e] = score of own and rows[e], with the same bits if own and rows[e] are exchanged; calls prefetch() about
//       once per edge
//   grad(args, own, rows, n, ds, grad_own, grad_att, term)
//       grad_own += sum over e of ds[h, e] * d score / d own
//       grad_att += the same for the attention vector (null: not needed)
//       term[e]   = ds[h, e] * d score / d rows[e], [n, term_stride] (null: not needed)
//   kTermJoinsRows: the edge term may be added to the gathered rows of either side. logits() then takes the rows
//       without the term and, between rows and n, the argument term, [n, term_stride] (null: no edge term).
//   kInverseNorms: the score divides by the norms of both rows. logits() then also returns r[h, e] = 1 / norm of
//       rows[e], the passes multiply ds by it before grad(), and grad() sums the gradient of own's unit row
//   through_norm(args, own, grad, grad_att)
//       converts the gradient of own's unit row to the gradient of own, in place, and adds to the gradient of the
//       attention vector (null: not needed)
//   center(args, row, stats, ds, n, grad_att)
//       reduces rounding errors: subtracts a constant of the row times the sum of ds, which is zero in exact
//       arithmetic, from the gradient of the attention vector

template <class A>
static inline int64_t term_stride(const Args<A>& args) {
  return round_up(args.heads * args.padded_dim, kWidth<A>);
}

// s = scale * <q, k>
template <class A, int NV>
struct DotScore {
  static constexpr bool kTermJoinsRows = false, kInverseNorms = false;

  template <class Prefetch>
  static void logits(const Args<A>& args, const A* own, const A* const* rows, int64_t n, A* s, Prefetch prefetch) {
    dots<A, NV>(own, rows, n, args.heads, args.padded_dim, args.coefficient, s, prefetch);
  }

  static void grad(const Args<A>& args, const A* own, const A* const* rows, int64_t n, const A* ds, A* grad_own,
                   A* /*grad_att*/, A* term) {
    const int64_t heads = args.heads, padded = args.padded_dim;
    if (grad_own) accumulate<A, NV>(ds, rows, n, heads, padded, args.coefficient, grad_own);
    if (!term) return;
    for (int64_t e = 0; e < n; ++e) {
      for (int64_t h = 0; h < heads; ++h) {
        const Vec<A> x = splat<A>(args.coefficient * ds[h * kChunk + e]);
        for (int64_t at = h * padded; at < (h + 1) * padded; at += kWidth<A>) {
          store(term + e * term_stride(args) + at, x * load(own + at));
        }
      }
    }
  }
};

// s = <att, leaky_relu(x_l + x_r)> (Brody et al. 2022, equation 7)
template <class A, int NV>
struct Gatv2Score {
  static constexpr bool kTermJoinsRows = true, kInverseNorms = false;
  static constexpr int64_t W = kWidth<A>;

  template <class Prefetch>
  static void logits(const Args<A>& args, const A* own, const A* const* rows, const A* term, int64_t n, A* s,
                     Prefetch prefetch) {
    if (term) {
      logits<true>(args, own, rows, term, n, s, prefetch);
    } else {
      logits<false>(args, own, rows, term, n, s, prefetch);
    }
  }

  template <bool kTerm, class Prefetch>
  static void logits(const Args<A>& args, const A* own, const A* const* rows, const A* term, int64_t n, A* s,
                     Prefetch prefetch) {
    const int64_t heads = args.heads, padded = args.padded_dim, vectors = NV ? NV : padded / W;
    const int64_t stride = term_stride(args);
    // att leaky(z) = att (1 + slope) / 2 z + att (1 - slope) / 2 |z|: no compare, and any slope
    const Vec<A> linear = splat<A>((1 + args.coefficient) / 2), absolute = splat<A>((1 - args.coefficient) / 2);
    for (int64_t e = 0; e < n; e += 4) {
      const A *r0 = rows[e], *r1 = rows[e + 1], *r2 = rows[e + 2], *r3 = rows[e + 3];
      for (int64_t h = heads; h < 4; ++h) prefetch();
      for (int64_t h = 0; h < heads; ++h) {
        if (h < 4) prefetch();
        Vec<A> t[4] = {};
#pragma GCC unroll 8
        for (int64_t v = 0; v < vectors; ++v) {
          const int64_t at = h * padded + v * W;
          const Vec<A> o = load(own + at), att = load(args.att + at);
          const Vec<A> a = att * linear, b = att * absolute;
          Vec<A> z0 = o + load(r0 + at), z1 = o + load(r1 + at);
          Vec<A> z2 = o + load(r2 + at), z3 = o + load(r3 + at);
          if constexpr (kTerm) {
            const A* t0 = term + e * stride + at;
            z0 += load(t0), z1 += load(t0 + stride), z2 += load(t0 + 2 * stride), z3 += load(t0 + 3 * stride);
          }
          t[0] = (t[0] + a * z0) + b * abs_vec<A>(z0);
          t[1] = (t[1] + a * z1) + b * abs_vec<A>(z1);
          t[2] = (t[2] + a * z2) + b * abs_vec<A>(z2);
          t[3] = (t[3] + a * z3) + b * abs_vec<A>(z3);
        }
        sum4<A>(t, s + h * kChunk + e);
      }
    }
  }

  static void grad(const Args<A>& args, const A* own, const A* const* rows, int64_t n, const A* ds, A* grad_own,
                   A* grad_att, A* term) {
    const int64_t heads = args.heads;
    if (grad_own || grad_att) {
      constexpr int HB = NV == 0 || NV >= 4 ? 1 : 4 / NV, VB = NV == 0 ? 1 : NV;
      int64_t h = 0;
      for (; h + HB <= heads; h += HB) block<HB, VB>(args, own, rows, n, h, ds, grad_own, grad_att);
      for (; h < heads; ++h) block<1, VB>(args, own, rows, n, h, ds, grad_own, grad_att);
    }
    if (!term) return;
    const int64_t padded = args.padded_dim;
    const A slope = args.coefficient;
    for (int64_t e = 0; e < n; ++e) {
      for (int64_t h = 0; h < heads; ++h) {
        const Vec<A> x = splat<A>(ds[h * kChunk + e]), y = x * slope;
        for (int64_t at = h * padded; at < (h + 1) * padded; at += W) {
          const Vec<A> z = load(own + at) + load(rows[e] + at);
          store(term + e * term_stride(args) + at, load(args.att + at) * (z > Vec<A>{} ? x : y));
        }
      }
    }
  }

 private:
  template <int HB, int VB>
  static void block(const Args<A>& args, const A* own, const A* const* rows, int64_t n, int64_t h, const A* ds,
                    A* grad_own, A* grad_att) {
    const int64_t padded = args.padded_dim;
    for (int64_t first = 0; first < padded; first += VB * W) {
      const int64_t base = h * padded + first;
      if (grad_att) {
        chunk<HB, VB, true>(args, own + base, rows, n, h, base, ds, grad_own, grad_att);
      } else {
        chunk<HB, VB, false>(args, own + base, rows, n, h, base, ds, grad_own, grad_att);
      }
    }
  }

  // With z = own + row and t = ds leaky'(z): d own = att * sum t, d att = sum t z.
  template <int HB, int VB, bool WithAtt>
  static void chunk(const Args<A>& args, const A* own, const A* const* rows, int64_t n, int64_t h, int64_t base,
                    const A* ds, A* grad_own, A* grad_att) {
    const int64_t padded = args.padded_dim;
    Vec<A> o[HB * VB], sum_t[HB * VB] = {}, sum_tz[HB * VB] = {};
#pragma GCC unroll 8
    for (int i = 0; i < HB * VB; ++i) o[i] = load(own + (i / VB) * padded + (i % VB) * W);
    for (int64_t e = 0; e < n; ++e) {
      const A* row = rows[e] + base;
#pragma GCC unroll 8
      for (int b = 0; b < HB; ++b) {
        const Vec<A> x = splat<A>(ds[(h + b) * kChunk + e]), y = x * args.coefficient;
#pragma GCC unroll 8
        for (int v = 0; v < VB; ++v) {
          const int i = b * VB + v;
          const Vec<A> z = o[i] + load(row + b * padded + v * W);
          const Vec<A> t = z > Vec<A>{} ? x : y;
          sum_t[i] += t;
          if (WithAtt) sum_tz[i] += t * z;
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < HB * VB; ++i) {
      const int64_t at = base + (i / VB) * padded + (i % VB) * W;
      if (grad_own) store(grad_own + at, load(grad_own + at) + load(args.att + at) * sum_t[i]);
      if (WithAtt) store(grad_att + at, load(grad_att + at) + sum_tz[i]);
    }
  }
};

// s = leaky_relu(a_l + a_r), with one value per node and head (Veličković et al. 2018, equation 3)
template <class A, int NV>
struct GatScore {
  static constexpr bool kTermJoinsRows = true, kInverseNorms = false;

  template <class Prefetch>
  static void logits(const Args<A>& args, const A* own, const A* const* rows, const A* term, int64_t n, A* s,
                     Prefetch prefetch) {
    spread_heads(rows, n, args.heads, s);
    for (int64_t e = 0; e < n; ++e) prefetch();
    for (int64_t h = 0; h < args.heads; ++h) {
      A* mine = s + h * kChunk;
      for (int64_t e = 0; term && e < n; ++e) mine[e] = (mine[e] + own[h]) + term[e * term_stride(args) + h];
      for (int64_t e = 0; e < n; e += kWidth<A>) {
        const Vec<A> z = term ? load(mine + e) : load(mine + e) + own[h];
        store(mine + e, z > Vec<A>{} ? z : z * args.coefficient);
      }
    }
  }

  static void grad(const Args<A>& args, const A* own, const A* const* rows, int64_t n, const A* ds, A* grad_own,
                   A* /*grad_att*/, A* term) {
    A z[4 * kChunk];
    for (int64_t h = 0; h < args.heads; ++h) {
      if (h % 4 == 0 && h + 4 <= args.heads) {
        four_heads(rows, n, h, z);
      } else if (h % 4 == 0) {
        for (int64_t i = h; i < args.heads; ++i) {
          for (int64_t e = 0; e < n; ++e) z[(i - h) * kChunk + e] = rows[e][i];
        }
      }
      const A *zs = z + h % 4 * kChunk, *mine = ds + h * kChunk;
      Vec<A> total = {};
      for (int64_t e = 0; e < n; e += kWidth<A>) {
        const Vec<A> dz = load(mine + e);
        total += first_lanes<A>(load(zs + e) + own[h] > Vec<A>{} ? dz : dz * args.coefficient, n - e);
      }
      if (grad_own) grad_own[h] += sum<A>(total);
      for (int64_t e = 0; term && e < n; ++e) {
        term[e * term_stride(args) + h] = own[h] + zs[e] > A(0) ? mine[e] : mine[e] * args.coefficient;
      }
    }
  }
};

// s = beta <own, row> / (max(|own|, least) max(|row|, least)), with beta_h in att[h, 0] (Thekumparampil et al. 2018,
// equation 4). The gathered row is both key and value.
template <class A, int NV>
struct CosineScore {
  static constexpr bool kTermJoinsRows = true, kInverseNorms = true;
  static constexpr int64_t W = kWidth<A>;

  template <class Prefetch>
  static void logits(const Args<A>& args, const A* own, const A* const* rows, int64_t n, A* s, A* r,
                     Prefetch prefetch) {
    const int64_t heads = args.heads, padded = args.padded_dim, vectors = NV ? NV : padded / W;
    for (int64_t e = 0; e < n; e += 4) {
      const A *r0 = rows[e], *r1 = rows[e + 1], *r2 = rows[e + 2], *r3 = rows[e + 3];
      for (int64_t h = heads; h < 4; ++h) prefetch();
      for (int64_t h = 0; h < heads; ++h) {
        if (h < 4) prefetch();
        Vec<A> dot[4] = {}, square[4] = {};
#pragma GCC unroll 8
        for (int64_t v = 0; v < vectors; ++v) {
          const int64_t at = h * padded + v * W;
          const Vec<A> o = load(own + at);
          const Vec<A> x0 = load(r0 + at), x1 = load(r1 + at), x2 = load(r2 + at), x3 = load(r3 + at);
          dot[0] += o * x0, square[0] += x0 * x0;
          dot[1] += o * x1, square[1] += x1 * x1;
          dot[2] += o * x2, square[2] += x2 * x2;
          dot[3] += o * x3, square[3] += x3 * x3;
        }
        sum4<A>(dot, s + h * kChunk + e);
        sum4<A>(square, r + h * kChunk + e);
      }
    }
    for (int64_t h = 0; h < heads; ++h) {
      const Vec<A> mine = over(args, splat<A>(norm(args, own, h)));
      for (int64_t e = h * kChunk; e < h * kChunk + n; e += W) {
        const Vec<A> other = over(args, sqrt_vec<A>(load(r + e)));
        store(r + e, other);
        store(s + e, load(s + e) * (mine * other) * args.att[h * padded]);  // same bits if the sides are exchanged
      }
    }
  }

  static void grad(const Args<A>& args, const A* /*own*/, const A* const* rows, int64_t n, const A* ds, A* grad_own,
                   A* /*grad_att*/, A* /*term*/) {
    if (grad_own) accumulate<A, NV>(ds, rows, n, args.heads, args.padded_dim, A(1), grad_own);
  }

  // The gradient of beta is a sum of ds cos. An error common to all ds of a row, such as the rounding of Delta, is
  // multiplied in it by the mean cosine of the row, which is nearly 1 for nonnegative features. So the cosines are
  // centered: log(mean of exp(s)) / beta approximates their mean. Where beta is almost 0 that quotient is unusable and
  // nothing is subtracted.
  static void center(const Args<A>& args, int64_t row, const A* stats, const A* ds, int64_t n, A* grad_att) {
    const auto degree = static_cast<float>(args.graph.row_begin(row + 1) - args.graph.row_begin(row));
    for (int64_t h = 0; h < args.heads; ++h) {
      const auto top = static_cast<float>(stats[h]), inverse = static_cast<float>(stats[args.heads + h]);
      const A mean = (top - __builtin_logf(inverse * degree)) / args.att[h * args.padded_dim];
      Vec<A> total = {};
      for (int64_t e = 0; e < n; e += W) total += first_lanes<A>(load(ds + h * kChunk + e), n - e);
      if (mean > A(-1.25) && mean < A(1.25)) grad_att[h * args.padded_dim] -= mean * sum<A>(total);
    }
  }

  // With r = 1 / max(|x|, least) and G = grad, the gradient of x is beta r (G - <G, rx> rx); where |x| < least, r is
  // constant and the gradient is beta r G.
  static void through_norm(const Args<A>& args, const A* own, A* grad, A* grad_att) {
    const int64_t padded = args.padded_dim;
    for (int64_t h = 0; h < args.heads; ++h) {
      const A length = norm(args, own, h), r = over(args, splat<A>(length))[0], scale = args.att[h * padded] * r;
      Vec<A> products = {};
      for (int64_t at = h * padded; at < (h + 1) * padded; at += W) products += load(grad + at) * load(own + at);
      const A dot = sum<A>(products) * r;
      if (grad_att) grad_att[h * padded] += dot;
      const A along = length < args.coefficient ? A(0) : dot * r;
      for (int64_t at = h * padded; at < (h + 1) * padded; at += W) {
        store(grad + at, (load(grad + at) - load(own + at) * along) * scale);
      }
    }
  }

 private:
  static Vec<A> over(const Args<A>& args, Vec<A> norms) {
    const Vec<A> least = splat<A>(args.coefficient);
    return splat<A>(A(1)) / (norms < least ? least : norms);
  }

  // Sums in the order of sum4(), for the same bits as in logits().
  static A norm(const Args<A>& args, const A* own, int64_t h) {
    Vec<A> square[4] = {};
    for (int64_t at = h * args.padded_dim; at < (h + 1) * args.padded_dim; at += W) {
      const Vec<A> x = load(own + at);
      square[0] += x * x;
    }
    A four[4];
    sum4<A>(square, four);
    return sqrt_vec<A>(splat<A>(four[0]))[0];
  }
};
