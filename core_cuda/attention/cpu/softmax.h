// The softmax and its backward: the work of the passes per edge and head. Nothing here depends on the score or on the
// width of a head, so all kernels of an opmath type share it. Included once per instruction set.

template <int N>
struct Fixed {};

// Calls work(h, Fixed<G>, Fixed<NE>) for G heads at a time, 4 or 1: heads processed one by one would each wait for the
// cross-lane sums and maxima of the head before. NE: 1 if G is 4 and the n edges fit one vector, else 0.
template <class A, class F>
static EDGELESS_INLINE void by_heads(const Args<A>& a, int64_t n, F&& work) {
  int64_t h = 0;
  for (; h + 4 <= a.heads; h += 4) {
    if (n <= kWidth<A>) {
      work(h, Fixed<4>{}, Fixed<1>{});
    } else {
      work(h, Fixed<4>{}, Fixed<0>{});
    }
  }
  for (; h < a.heads; ++h) work(h, Fixed<1>{}, Fixed<0>{});
}

template <class A, int G>
static inline void across_lanes(const Vec<A>* v, A* sums) {
  if constexpr (G == 4) {
    sum4<A>(v, sums);
  } else {
    sums[0] = sum<A>(v[0]);
  }
}

// Online softmax: merges the logits of a chunk, in s, into the maxima and sums of the row, and rescales the row's
// accumulators where a maximum grew. s becomes exp(s - maximum) times the factors.
template <class A, int G, int NE>
static inline void join_softmax(const Args<A>& a, Chunk<A>& c, int64_t h, Fixed<G>, Fixed<NE>, A* state) {
  constexpr int64_t W = kWidth<A>;
  const int64_t n = c.n, vectors = NE ? NE : (n + W - 1) / W;
  A *top = state + h, *total = top + heads_size(a), *s = c.s + h * kChunk;
  Vec<A> most[G], p[G];
  for (int g = 0; g < G; ++g) most[g] = splat<A>(-__builtin_inf());
  for (int64_t v = 0; v < vectors; ++v) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      p[g] = first_lanes<A>(load_fours(s + g * kChunk + v * W), n - v * W, -__builtin_inf());
      most[g] = p[g] > most[g] ? p[g] : most[g];
      if (NE != 1) store(s + g * kChunk + v * W, p[g]);
    }
  }
  A peak[4], now[G], added[4];
  if constexpr (G == 4) {
    largest4<A>(most, peak);
  } else {
    peak[0] = largest<A>(most[0]);
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) now[g] = peak[g] > top[g] ? peak[g] : top[g];
  Vec<A> sums[G] = {};
  for (int64_t v = 0; v < vectors; ++v) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const Vec<A> x = exp_vec<A>((NE == 1 ? p[g] : load(s + g * kChunk + v * W)) - now[g]);
      sums[g] += x;
      store(s + g * kChunk + v * W, c.factor ? x * load(c.factor + (h + g) * kChunk + v * W) : x);
    }
  }
  across_lanes<A, G>(sums, added);
  for (int g = 0; g < G; ++g) {
    if (now[g] != top[g] && total[g] != A(0)) {
      const A shrink = exp_vec<A>(splat<A>(top[g] - now[g]))[0];
      total[g] *= shrink;
      A* row = state + 2 * heads_size(a) + (h + g) * a.padded_channels;
      for (int64_t i = 0; i < a.padded_channels; i += W) store(row + i, load(row + i) * shrink);
    }
    top[g] = now[g];
    total[g] += added[g];
  }
}

template <class A>
static inline void join_softmax(const Args<A>& a, Chunk<A>& c, A* state) {
  by_heads(a, c.n, [&](int64_t h, auto heads, auto vectors) { join_softmax(a, c, h, heads, vectors, state); });
}

// Replaces s by P. maximum, inverse_sum: [H], of the query-side row.
template <class A>
static inline void softmax_of_row(const Args<A>& a, Chunk<A>& c, const A* maximum, const A* inverse_sum) {
  for (int64_t h = 0; h < a.heads; ++h) {
    A* s = c.s + h * kChunk;
    for (int64_t e = 0; e < c.n; e += kWidth<A>) {
      store(s + e, exp_vec<A>(load_fours(s + e) - maximum[h]) * inverse_sum[h]);
    }
  }
}

template <class A>
static inline void write_weights(const Args<A>& a, Chunk<A>& c) {
  for (int64_t e = 0; e < c.n; ++e) {
    for (int64_t h = 0; h < a.heads; ++h) {
      const int64_t at = h * kChunk + e;
      a.weights[c.edge[e] * a.heads + h] = c.factor ? c.s[at] * c.keep[at] : c.s[at];
    }
  }
}

template <class A>
static inline void load_weight_grads(const Args<A>& a, Chunk<A>& c) {
  for (int64_t e = 0; e < c.n; ++e) {
    for (int64_t h = 0; h < a.heads; ++h) {
      const int64_t at = h * kChunk + e;
      const A g = a.grad_weights[c.edge[e] * a.heads + h];
      c.dp[at] = c.factor ? g * c.keep[at] : g;
    }
  }
}

template <class A>
static inline void add_delta(const Args<A>& a, Chunk<A>& c, A* state) {
  load_weight_grads(a, c);
  for (int64_t h = 0; h < a.heads; ++h) {
    for (int64_t e = 0; e < c.n; ++e) state[h] += c.s[h * kChunk + e] * c.dp[h * kChunk + e];
  }
}

template <class A>
static inline void write_scale_grads(const Args<A>& a, const Chunk<A>& c) {
  for (int64_t e = 0; e < c.n; ++e) {
    for (int64_t h = 0; h < a.heads; ++h) {
      const int64_t at = h * kChunk + e;
      a.grad_scale[c.edge[e] * a.heads + h] = c.s[at] * c.keep[at] * c.top[at];  // top: <dO, v>, see softmax_backward()
    }
  }
}

// Inputs: the logits in s and <dO, v> in dp. Results: P in s, w = P f, and ds = P (f dp - Delta) in dp. whole: the
// chunk holds all edges of the row. Then Delta is computed here as sum P dP / sum P, so that the row's ds sum to zero
// although the rounded sum P is not exactly 1. stats: the row's statistics from head h on.
template <class A, int G, int NE>
static inline void softmax_backward(const Args<A>& a, Chunk<A>& c, int64_t h, Fixed<G>, Fixed<NE>, const A* stats,
                                    bool whole, A* delta) {
  constexpr int64_t W = kWidth<A>;
  const int64_t n = c.n, vectors = NE ? NE : (n + W - 1) / W;
  A *s = c.s + h * kChunk, *dp = c.dp + h * kChunk;
  const A* factor = c.factor ? c.factor + h * kChunk : nullptr;
  Vec<A> mass[G] = {}, total[G] = {}, p[G], d[G];
  for (int64_t v = 0; v < vectors; ++v) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const int64_t at = g * kChunk + v * W;
      p[g] = exp_vec<A>(load_fours(s + at) - stats[g]) * stats[a.heads + g];
      d[g] = load_fours(dp + at);
      store(s + at, p[g]);
      if (a.grad_scale) store(c.top + h * kChunk + at, d[g]);
      if (factor) {
        const Vec<A> f = load(factor + at);
        store(c.w + h * kChunk + at, p[g] * f);
        if (a.grad_out) d[g] *= f;
      } else if (a.edge_in_value) {
        store(c.w + h * kChunk + at, p[g]);
      }
      if (NE != 1) store(dp + at, d[g]);
      mass[g] += first_lanes<A>(p[g], n - v * W);
      total[g] += first_lanes<A>(p[g] * d[g], n - v * W);
    }
  }
  if (whole) {
    A all[4], mean[4];
    across_lanes<A, G>(mass, all);
    across_lanes<A, G>(total, mean);
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) delta[g] = mean[g] / all[g];
  }
  for (int64_t v = 0; v < vectors; ++v) {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
      const int64_t at = g * kChunk + v * W;
      store(dp + at, NE == 1 ? p[g] * (d[g] - delta[g]) : load(s + at) * (load(dp + at) - delta[g]));
    }
  }
}

template <class A>
static inline void softmax_backward(const Args<A>& a, Chunk<A>& c, const A* stats, bool whole, A* delta) {
  by_heads(a, c.n, [&](int64_t h, auto heads, auto vectors) {
    softmax_backward(a, c, h, heads, vectors, stats + h, whole, delta + h);
  });
}

// softmax_backward() of the source pass, with the statistics of each gathered destination: w = P f, and ds in dp.
template <class A>
static inline void softmax_backward_by_src(const Args<A>& a, Chunk<A>& c) {
  const int64_t n = c.n;
  const A* stats[kChunk];
  for (int64_t e = 0; e < n; ++e) stats[e] = a.stats + c.node[e] * a.heads * kStats;
  fill_up(stats, n);
  for (A* to : {c.top, c.inverse, c.w}) {
    spread_heads(stats, n, a.heads, to);
    for (int64_t e = 0; e < round_up(n, 4); ++e) stats[e] += a.heads;
  }
  for (int64_t h = 0; h < a.heads; ++h) {
    for (int64_t e = h * kChunk; e < h * kChunk + n; e += kWidth<A>) {
      const Vec<A> p = exp_vec<A>(load_fours(c.s + e) - load_fours(c.top + e)) * load_fours(c.inverse + e);
      const Vec<A> delta = load_fours(c.w + e);
      Vec<A> dp = load_fours(c.dp + e), w = p;
      if (c.factor) {
        const Vec<A> f = load(c.factor + e);
        w *= f;
        if (a.grad_out) dp *= f;
      }
      store(c.w + e, w);
      store(c.dp + e, p * (dp - delta));
    }
  }
}
