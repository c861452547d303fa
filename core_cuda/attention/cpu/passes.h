// The passes over a part of the graph: forward, attention weights, backward by destination and by source.
//
// With s the logits, m their maximum over a row, Z = sum exp(s - m), k = keep / (1 - p) and f = k * edge scale:
//   P = exp(s - m) / Z   w = P f   out = sum w (v + t)
//   dP = f <dO, v + t>  (or k * dA for the gradient of returned weights)   Delta = sum P dP = <out, dO>
//   ds = P (dP - Delta)
// m and Z are kept apart: the logsumexp m + log Z of large logits is rounded as coarsely as they are. For the same
// reason every pass must make the same bits of an edge's logit.
// Every pass only gathers: the pass by destination walks the CSR and owns what belongs to destinations and edges, the
// pass by source walks the CSC and owns what belongs to sources. A row that a part does not hold whole leaves its
// state in `carry`; merge() adds the states up in the order of the parts. Included once per instruction set.

template <class A, template <class, int> class ScoreOf, int NV>
struct Passes {
  using Score = ScoreOf<A, NV>;
  static constexpr int64_t W = kWidth<A>;

  // State of a row: forward [H max][H sum][H * padded_channels]; by_dst [keys]; by_src [keys][values]; delta [H].
  static int64_t keys_size(const Args<A>& a) { return round_up(a.heads * a.padded_dim, 16); }
  static int64_t values_size(const Args<A>& a) { return round_up(a.heads * a.padded_channels, 16); }
  static int64_t heads_size(const Args<A>& a) { return round_up(a.heads, 16); }

  static int64_t carry_size(Pass pass, const Args<A>& a) {
    switch (pass) {
      case Pass::forward: return 2 * heads_size(a) + values_size(a);
      case Pass::by_dst: return keys_size(a);
      case Pass::by_src: return keys_size(a) + values_size(a);
      case Pass::delta: return heads_size(a);
      default: return 0;
    }
  }

  static int64_t scratch_size(const Args<A>& a) {
    const int64_t rows = kChunk * (2 * widest_row(a) + 2 * term_stride(a) + a.edge_dim + 8 * a.heads);
    return rows + 8 * (keys_size(a) + values_size(a)) + 4 * heads_size(a) + a.edge_dim + 1024;
  }

  static void clear(Pass pass, const Args<A>& a, A* state) {
    const int64_t size = carry_size(pass, a);
    for (int64_t i = 0; i < size; ++i) state[i] = A(0);
    if (pass == Pass::forward) {
      for (int64_t h = 0; h < a.heads; ++h) state[h] = -__builtin_inf();
    }
  }

  // Chunks of one row ------------------------------------------------------------------------------------------

  static void destination_logits(const Args<A>& a, const A* own, int64_t begin, int64_t n, int64_t* prefetched,
                                 Chunk<A>& c) {
    gather(a, a.src, a.value, begin, n, prefetched, c);
    if (a.edge_in_value) join_term(a, c, c.value, c.values);
    score_logits(a, own, c, a.value ? c.keys : c.values);  // without a value tensor the values are the bare keys
  }

  // Of c.key; then the edge term is joined to it, in `copies`. Where it joins either side, the logit is made of the
  // bare rows and the term, so that it has the same bits whichever side is gathered.
  static void score_logits(const Args<A>& a, const A* own, Chunk<A>& c, A* copies) {
    const auto ask = [&]() __attribute__((always_inline)) { c.ahead.ask(0); };
    if constexpr (Score::kInverseNorms) {
      Score::logits(a, own, c.key, c.n, c.s, c.r, ask);
    } else if constexpr (Score::kTermJoinsRows) {
      Score::logits(a, own, c.key, a.edge_dim ? c.term : nullptr, c.n, c.s, ask);
      if (a.edge_dim) join_term(a, c, c.key, copies);
    } else {
      if (a.edge_dim) join_term(a, c, c.key, copies);
      Score::logits(a, own, c.key, c.n, c.s, ask);
    }
  }

  static void score_grad(const Args<A>& a, const A* own, Chunk<A>& c, A* grad_own, A* grad_att, A* term) {
    if constexpr (Score::kInverseNorms) {
      for (int64_t h = 0; h < a.heads; ++h) multiply(c.dp + h * kChunk, c.r + h * kChunk, c.n);
    }
    Score::grad(a, own, c.key, c.n, c.dp, grad_own, grad_att, term);
  }

  // Numbers of an edge and a head, for G <= 4 heads at a time: one after the other, each would wait for the sums and
  // maxima across the lanes of the one before. NE: vectors of the chunk, 0 where it has more than one.
  template <class F>
  static void by_heads(const Args<A>& a, int64_t n, F&& work) {
    const int64_t vectors = (n + W - 1) / W;
    int64_t h = 0;
    for (; h + 4 <= a.heads; h += 4) {
      if (vectors == 1) {
        work(h, Fixed<4>{}, Fixed<1>{});
      } else {
        work(h, Fixed<4>{}, Fixed<0>{});
      }
    }
    for (; h < a.heads; ++h) work(h, Fixed<1>{}, Fixed<0>{});
  }

  template <int N>
  struct Fixed {};

  template <int G>
  static void across_lanes(const Vec<A>* v, A* sums) {
    if constexpr (G == 4) {
      sum4<A>(v, sums);
    } else {
      sums[0] = sum<A>(v[0]);
    }
  }

  static void forward_chunk(const Args<A>& a, Chunk<A>& c, A* state) {
    by_heads(a, c.n, [&](int64_t h, auto heads, auto vectors) { forward_heads(a, c, h, heads, vectors, state); });
    accumulate<A, NV>(c.s, c.value, c.n, a.heads, a.padded_channels, A(1), state + 2 * heads_size(a),
                      [&]() __attribute__((always_inline)) { c.ahead.ask(1); });
  }

  template <int G, int NE>
  static void forward_heads(const Args<A>& a, Chunk<A>& c, int64_t h, Fixed<G>, Fixed<NE>, A* state) {
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
    across_lanes<G>(sums, added);
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

  static void multiply(A* s, const A* by, int64_t n) {
    for (int64_t e = 0; e < n; ++e) s[e] *= by[e];
  }

  // s becomes P, where the maximum and 1 / sum [H] belong to the row itself.
  static void softmax_of_row(const Args<A>& a, Chunk<A>& c, const A* maximum, const A* inverse_sum) {
    for (int64_t h = 0; h < a.heads; ++h) {
      A* s = c.s + h * kChunk;
      for (int64_t e = 0; e < c.n; e += W) {
        store(s + e, exp_vec<A>(load_fours(s + e) - maximum[h]) * inverse_sum[h]);
      }
    }
  }

  static void weights_chunk(const Args<A>& a, Chunk<A>& c) {
    for (int64_t e = 0; e < c.n; ++e) {
      for (int64_t h = 0; h < a.heads; ++h) {
        const int64_t at = h * kChunk + e;
        a.weights[c.edge[e] * a.heads + h] = c.factor ? c.s[at] * c.keep[at] : c.s[at];
      }
    }
  }

  static void load_weight_grads(const Args<A>& a, Chunk<A>& c) {
    for (int64_t e = 0; e < c.n; ++e) {
      for (int64_t h = 0; h < a.heads; ++h) {
        const int64_t at = h * kChunk + e;
        const A g = a.grad_weights[c.edge[e] * a.heads + h];
        c.dp[at] = c.factor ? g * c.keep[at] : g;
      }
    }
  }

  static void delta_chunk(const Args<A>& a, Chunk<A>& c, A* state) {
    load_weight_grads(a, c);
    for (int64_t h = 0; h < a.heads; ++h) {
      for (int64_t e = 0; e < c.n; ++e) state[h] += c.s[h * kChunk + e] * c.dp[h * kChunk + e];
    }
  }

  // delta = <out, dO>. By dots(), as dP is: the row of a single edge then has ds = P (dP - Delta) = 0 exactly, as it
  // should.
  static void delta_of_row(const Args<A>& a, int64_t row, const A* grad, A* out_buffer, A* s, A* delta) {
    const A* out = row_of(a.saved_out, row, a.heads, a.channels, a.padded_channels, out_buffer);
    const A* rows[4] = {out, out, out, out};
    dots<A, NV>(grad, rows, 1, a.heads, a.padded_channels, A(1), s);
    for (int64_t h = 0; h < a.heads; ++h) delta[h] = s[h * kChunk];
  }

  static void write_scale_grads(const Args<A>& a, const Chunk<A>& c) {
    for (int64_t e = 0; e < c.n; ++e) {
      for (int64_t h = 0; h < a.heads; ++h) {
        const int64_t at = h * kChunk + e;
        a.grad_scale[c.edge[e] * a.heads + h] = c.s[at] * c.keep[at] * c.top[at];  // by_dst_heads() left dp there
      }
    }
  }

  // From the logits (in s) and <dO, v> (in dp): P in s, w = P f, ds = P (f dp - Delta) in dp. `whole`: the chunk is the
  // row, whose Delta is then summed here, so that what cancels does so exactly: over the sum of P, which is 1 but for
  // rounding. `stats` are the row's, of head h.
  template <int G, int NE>
  static void by_dst_heads(const Args<A>& a, Chunk<A>& c, int64_t h, Fixed<G>, Fixed<NE>, const A* stats, bool whole,
                           A* delta) {
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
      across_lanes<G>(mass, all);
      across_lanes<G>(total, mean);
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

  // `whole`: the chunk is the row.
  static void by_dst_chunk(const Args<A>& a, Chunk<A>& c, int64_t row, const A* own, const A* grad_row, const A* stats,
                           A* delta, bool whole, A* grad_att, A* grad_proj, A* attr_row, A* state) {
    if (a.grad_out) {
      dots<A, NV>(grad_row, c.value, c.n, a.heads, a.padded_channels, A(1), c.dp,
                  [&]() __attribute__((always_inline)) { c.ahead.ask(1); });
    } else {
      load_weight_grads(a, c);
    }
    by_heads(a, c.n, [&](int64_t h, auto heads, auto vectors) {
      by_dst_heads(a, c, h, heads, vectors, stats + h, whole, delta + h);
    });
    if (a.grad_scale && a.grad_out) write_scale_grads(a, c);
    if constexpr (Score::kInverseNorms) {
      if (grad_att) Score::center(a, row, stats, c.dp, c.n, grad_att);
    }
    const bool wants_term = grad_proj || a.grad_attr;
    score_grad(a, own, c, state, grad_att, wants_term ? c.term : nullptr);
    if (!wants_term) return;
    if (a.edge_in_value && a.grad_out) add_value_term(a, c, grad_row);
    if (grad_proj) grad_of_proj(a, c.attr, c.term, c.n, grad_proj);
    if (a.grad_attr) grad_of_attr(a, c.term, c.edge, c.n, attr_row);
  }

  static void add_value_term(const Args<A>& a, Chunk<A>& c, const A* grad_row) {
    for (int64_t e = 0; e < c.n; ++e) {
      A* term = c.term + e * term_stride(a);
      for (int64_t h = 0; h < a.heads; ++h) {
        const A w = c.w[h * kChunk + e];
        for (int64_t i = h * a.padded_dim; i < (h + 1) * a.padded_dim; i += W) {
          store(term + i, load(term + i) + w * load(grad_row + i));
        }
      }
    }
  }

  static void by_src_chunk(const Args<A>& a, Chunk<A>& c, const A* own_key, const A* own_value, int64_t begin,
                           int64_t n, int64_t* prefetched, A* state) {
    gather(a, a.dst, a.grad_out, begin, n, prefetched, c, a.stats);
    const bool term_joins_own = a.edge_dim && !Score::kTermJoinsRows;
    if (!a.grad_out) load_weight_grads(a, c);
    if (term_joins_own) {
      // The same sums in the same order as by destination, see delta_of_row.
      const A *keys[kChunk], *values[kChunk];
      if (a.grad_out) {
        join_own(a, c, own_value, values, c.joined);
        dots_of_pairs<A, NV>(values, c.value, n, a.heads, a.padded_channels, A(1), c.dp);
      }
      join_own(a, c, own_key, keys, c.term);
      dots_of_pairs<A, NV>(keys, c.key, n, a.heads, a.padded_dim, a.coefficient, c.s);
    } else {
      score_logits(a, own_key, c, c.keys);
      if (a.grad_out) {
        dots<A, NV>(own_value, c.value, n, a.heads, a.padded_channels, A(1), c.dp,
                    [&]() __attribute__((always_inline)) { c.ahead.ask(1); });
      }
    }
    // P and ds, with the statistics of each destination
    const A* stats[kChunk];
    for (int64_t e = 0; e < n; ++e) stats[e] = a.stats + c.node[e] * a.heads * kStats;
    fill_up(stats, n);
    for (A* to : {c.top, c.inverse, c.w}) {
      spread_heads(stats, n, a.heads, to);
      for (int64_t e = 0; e < round_up(n, 4); ++e) stats[e] += a.heads;
    }
    for (int64_t h = 0; h < a.heads; ++h) {
      for (int64_t e = h * kChunk; e < h * kChunk + n; e += W) {
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
    // Without a value tensor both gradients are the key's, whose norm only one of them goes through.
    A* values = a.value || Score::kInverseNorms ? state + keys_size(a) : state;
    if (a.grad_out && (a.grad_value || !a.value)) {
      accumulate<A, NV>(c.w, c.value, n, a.heads, a.padded_channels, A(1), values);
    }
    if (a.grad_src) score_grad(a, own_key, c, state, nullptr, nullptr);
  }

  // Rows ---------------------------------------------------------------------------------------------------------

  // `buffer` has room for a row of keys; grad_att is the part's.
  static void finish(Pass pass, const Args<A>& a, int64_t row, A* state, A* buffer, A* grad_att) {
    if (pass == Pass::forward) {
      A *top = state, *total = state + heads_size(a), *acc = state + 2 * heads_size(a);
      for (int64_t h = 0; h < a.heads; ++h) {
        const bool empty = top[h] == -__builtin_inf() && total[h] == A(0);
        const A inverse = empty ? A(0) : A(1) / total[h];
        a.maximum[row * a.heads + h] = top[h];
        a.inverse_sum[row * a.heads + h] = inverse;
        for (int64_t i = h * a.padded_channels; i < (h + 1) * a.padded_channels; ++i) acc[i] *= inverse;
      }
      write_row(a.out, row, a.heads, a.channels, a.padded_channels, acc);
    } else if (pass == Pass::delta) {
      for (int64_t h = 0; h < a.heads; ++h) delta_of(a, row)[h] = state[h];
    } else if (pass == Pass::by_dst) {
      if constexpr (Score::kInverseNorms) {
        const A* own = row_of(a.dst, row, a.heads, a.dim, a.padded_dim, buffer);
        Score::through_norm(a, own, state, grad_att);
      }
      if (a.grad_dst) write_row(a.grad_dst, row, a.heads, a.dim, a.padded_dim, state);
    } else if (pass == Pass::by_src) {  // and of weights a row keeps nothing
      if constexpr (Score::kInverseNorms) {
        const A* own = row_of(a.src, row, a.heads, a.dim, a.padded_dim, buffer);
        Score::through_norm(a, own, state, nullptr);
        for (int64_t i = 0; i < keys_size(a); ++i) state[i] += state[keys_size(a) + i];
      }
      if (a.grad_src) write_row(a.grad_src, row, a.heads, a.dim, a.padded_dim, state);
      if (a.grad_value) write_row(a.grad_value, row, a.heads, a.channels, a.padded_channels, state + keys_size(a));
    }
  }

  static void combine(Pass pass, const Args<A>& a, A* state, const A* other) {
    const int64_t size = carry_size(pass, a);
    if (pass != Pass::forward) {
      for (int64_t i = 0; i < size; ++i) state[i] += other[i];
      return;
    }
    const int64_t heads = heads_size(a);
    for (int64_t h = 0; h < a.heads; ++h) {
      if (other[heads + h] == A(0)) continue;  // no edges in that piece
      const A now = other[h] > state[h] ? other[h] : state[h];
      const A mine = state[heads + h] == A(0) ? A(0) : exp_vec<A>(splat<A>(state[h] - now))[0];
      const A theirs = exp_vec<A>(splat<A>(other[h] - now))[0];
      state[h] = now;
      state[heads + h] = state[heads + h] * mine + other[heads + h] * theirs;
      for (int64_t i = 0; i < a.padded_channels; ++i) {
        const int64_t at = 2 * heads + h * a.padded_channels + i;
        state[at] = state[at] * mine + other[at] * theirs;
      }
    }
  }

  static A* delta_of(const Args<A>& a, int64_t row) { return a.stats + (row * kStats + kStats - 1) * a.heads; }

  static A* slot(Pass pass, const Args<A>& a, int64_t part, int which) {
    return a.carry + (part * 2 + which) * carry_size(pass, a);
  }

  // The rows of a row itself lie one after the other, but too far apart in time for the hardware to fetch them ahead.
  static void ask_for_own(Pass pass, const Args<A>& a, int64_t row) {
    if (row >= a.graph.num_rows) return;
    const int64_t keys = a.heads * a.dim, values = a.heads * a.channels;
    prefetch_rows(pass == Pass::by_src ? a.src : a.dst, &row, 1, keys);
    if (pass == Pass::by_src && a.value) prefetch_rows(a.value, &row, 1, values);
    if (pass == Pass::by_dst && a.grad_out) {
      prefetch_rows(a.grad_out, &row, 1, values);
      prefetch_rows(a.saved_out, &row, 1, values);
    }
  }

  static A* part_of_att(const Args<A>& a, int64_t part) {
    return a.grad_att ? a.grad_att + part * a.heads * a.padded_dim : nullptr;
  }

  static void run(Pass pass, const Args<A>& a, int64_t part, A* scratch) {
    Arena<A> arena(scratch);
    Chunk<A> c = make_chunk(a, arena);
    A* state = arena.take(2 * heads_size(a) + keys_size(a) + values_size(a));
    A* own_buffer = arena.take(keys_size(a));
    A* other_buffer = arena.take(values_size(a));
    A* attr_row = arena.take(a.edge_dim);
    A* delta = arena.take(heads_size(a));
    A* grad_att = part_of_att(a, part);
    A* grad_proj = a.grad_proj ? a.grad_proj + part * a.edge_dim * term_stride(a) : nullptr;
    int64_t prefetched = 0;
    Walk walk(a.graph, a.items_per_part, part);
    Piece piece;
    while (walk.next(&piece)) {
      const int64_t row = piece.row;
      if (pass == Pass::delta_of_out) {
        const A* grad = row_of(a.grad_out, row, a.heads, a.channels, a.padded_channels, other_buffer);
        if (piece.finished) delta_of_row(a, row, grad, state, c.s, delta_of(a, row));
        continue;
      }
      clear(pass, a, state);
      ask_for_own(pass, a, row + 2);
      const bool by_src = pass == Pass::by_src;
      const A* own = row_of(by_src ? a.src : a.dst, row, a.heads, a.dim, a.padded_dim, own_buffer);
      const A* own_value = own;
      if (by_src && a.value) own_value = row_of(a.value, row, a.heads, a.channels, a.padded_channels, other_buffer);
      const A *grad_row = nullptr, *stats = a.stats ? a.stats + row * a.heads * kStats : nullptr;
      if (pass == Pass::by_dst && a.grad_out) {
        grad_row = row_of(a.grad_out, row, a.heads, a.channels, a.padded_channels, other_buffer);
      }
      const bool whole = piece.fresh && piece.finished && piece.end - piece.begin <= kChunk;
      if (pass == Pass::by_dst && !a.grad_out) {
        for (int64_t h = 0; h < a.heads; ++h) delta[h] = delta_of(a, row)[h];
      } else if (pass == Pass::by_dst && !whole) {
        delta_of_row(a, row, grad_row, state, c.s, delta);
        clear(pass, a, state);
      }
      for (int64_t begin = piece.begin; begin < piece.end; begin += kChunk) {
        const int64_t n = piece.end - begin < kChunk ? piece.end - begin : kChunk;
        if (by_src) {
          by_src_chunk(a, c, own, own_value, begin, n, &prefetched, state);
          c.ahead.ask_rest();
          continue;
        }
        destination_logits(a, own, begin, n, &prefetched, c);
        if (pass == Pass::forward) {
          forward_chunk(a, c, state);
        } else if (pass == Pass::weights) {
          softmax_of_row(a, c, a.maximum + row * a.heads, a.inverse_sum + row * a.heads);
          weights_chunk(a, c);
        } else if (pass == Pass::delta) {
          softmax_of_row(a, c, stats, stats + a.heads);
          delta_chunk(a, c, state);
        } else {
          by_dst_chunk(a, c, row, own, grad_row, stats, delta, whole, grad_att, grad_proj, attr_row, state);
        }
        c.ahead.ask_rest();
      }
      if (pass == Pass::by_dst && piece.finished) {
        for (int64_t h = 0; h < a.heads; ++h) delta_of(a, row)[h] = delta[h];
      }
      if (piece.fresh && piece.finished) {
        finish(pass, a, row, state, own_buffer, grad_att);
      } else if (a.carry) {
        A* kept = slot(pass, a, part, piece.fresh ? 1 : 0);
        for (int64_t i = 0; i < carry_size(pass, a); ++i) kept[i] = state[i];
      }
    }
    fence_streams();
  }

  static void merge(Pass pass, const Args<A>& a, int64_t part, A* state) {
    if (!a.carry) return;
    Walk walk(a.graph, a.items_per_part, part);
    Piece piece;
    if (!walk.next(&piece) || piece.fresh || !piece.finished) return;
    const int64_t first = first_part_of_row(a.graph, piece.row, a.items_per_part);
    clear(pass, a, state);
    for (int64_t p = first; p <= part; ++p) combine(pass, a, state, slot(pass, a, p, p == first ? 1 : 0));
    finish(pass, a, piece.row, state, state + carry_size(pass, a), part_of_att(a, part));
    fence_streams();
  }

  static Kernels<A> table() { return {W, carry_size, scratch_size, run, merge}; }
};

template <class A, template <class, int> class ScoreOf>
static Kernels<A> kernels_for_width(int64_t vectors) {
  // On x86 a head is two or four 16-byte vectors only where there is no AVX2: not worth kernels of their own, which
  // take a quarter of a minute to compile.
  constexpr bool several = !EDGELESS_X86 || sizeof(A) * kWidth<A> > 16;
  if constexpr (sizeof(A) == 4) {
    if (vectors == 1) return Passes<A, ScoreOf, 1>::table();
    if constexpr (several) {
      if (vectors == 2) return Passes<A, ScoreOf, 2>::table();
      if (vectors == 4) return Passes<A, ScoreOf, 4>::table();
    }
  }
  return Passes<A, ScoreOf, 0>::table();
}

// `vectors`: of a head, when it is the same for keys and values; anything else is 0.
template <class A>
Kernels<A> kernels(edgeless::Score score, int64_t vectors) {
#define EDGELESS_CASE(name, functor) \
  case edgeless::Score::name: return kernels_for_width<A, functor>(vectors);
  switch (score) { EDGELESS_SCORES(EDGELESS_CASE) }
#undef EDGELESS_CASE
  __builtin_unreachable();
}

template Kernels<float> kernels<float>(edgeless::Score, int64_t);
template Kernels<double> kernels<double>(edgeless::Score, int64_t);
