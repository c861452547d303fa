// The passes over a part of the graph: forward, attention weights, and the destination and source passes of the
// backward.
//
// With s the logits, m their maximum over a row, Z = sum exp(s - m), k = keep / (1 - p) and f = k * edge scale:
//   P = exp(s - m) / Z   w = P f   out = sum w (v + t)
//   dP = f <dO, v + t>  (or k * dA for the gradient of returned weights)   Delta = sum P dP = <out, dO>
//   ds = P (dP - Delta)
// m and Z are saved separately: the logsumexp m + log Z of large logits would be rounded as coarsely as the logits. For
// the same reason every pass must compute an edge's logit to the same bits. Passes only gather, so they need no
// atomics: the destination pass reads the CSR and writes the gradients of destinations and edges, the source pass reads
// the CSC and writes the gradients of sources. The state of a row segment that parts share is stored in the fix-up
// workspace (`carry`); merge() adds up these states in the order of the parts. Included once per instruction set.

template <class A, template <class, int> class ScoreOf, int NV>
struct Passes {
  using Score = ScoreOf<A, NV>;

  static int64_t scratch_size(const Args<A>& a) {
    const int64_t rows = kChunk * (2 * widest_row(a) + 2 * term_stride(a) + a.edge_dim + 8 * a.heads);
    return rows + 8 * (keys_size(a) + values_size(a)) + 4 * heads_size(a) + a.edge_dim + 1024;
  }

  // Chunks of one row ------------------------------------------------------------------------------------------------

  static void destination_logits(const Args<A>& a, const A* own, int64_t begin, int64_t n, int64_t* prefetched,
                                 Chunk<A>& c) {
    gather(a, a.src, a.value, begin, n, prefetched, c);
    if (a.edge_in_value) join_term(a, c, c.value, c.values);
    score_logits(a, own, c, a.value ? c.keys : c.values);  // without a value tensor, values are keys without the term
  }

  // Computes the logits of c.key and adds the edge term to the keys, in `copies`. With kTermJoinsRows the logit is
  // computed from the rows and the term separately, so that it has the same bits whichever side is gathered.
  static void score_logits(const Args<A>& a, const A* own, Chunk<A>& c, A* copies) {
    const PrefetchLane<0> prefetch{&c.ahead};
    if constexpr (Score::kInverseNorms) {
      Score::logits(a, own, c.key, c.n, c.s, c.r, prefetch);
    } else if constexpr (Score::kTermJoinsRows) {
      Score::logits(a, own, c.key, a.edge_dim ? c.term : nullptr, c.n, c.s, prefetch);
      if (a.edge_dim) join_term(a, c, c.key, copies);
    } else {
      if (a.edge_dim) join_term(a, c, c.key, copies);
      Score::logits(a, own, c.key, c.n, c.s, prefetch);
    }
  }

  static void score_grad(const Args<A>& a, const A* own, Chunk<A>& c, A* grad_own, A* grad_att, A* term) {
    if constexpr (Score::kInverseNorms) {
      for (int64_t h = 0; h < a.heads; ++h) {
        for (int64_t e = h * kChunk; e < h * kChunk + c.n; ++e) c.dp[e] *= c.r[e];
      }
    }
    Score::grad(a, own, c.key, c.n, c.dp, grad_own, grad_att, term);
  }

  // delta = <out, dO>, computed by dots() like dP, so that a row of a single edge has ds = P (dP - Delta) = 0 exactly.
  static void delta_of_row(const Args<A>& a, int64_t row, const A* grad, A* out_buffer, A* s, A* delta) {
    const A* out = row_of(a.saved_out, row, a.heads, a.channels, a.padded_channels, out_buffer);
    const A* rows[4] = {out, out, out, out};
    dots<A, NV>(grad, rows, 1, a.heads, a.padded_channels, A(1), s);
    for (int64_t h = 0; h < a.heads; ++h) delta[h] = s[h * kChunk];
  }

  // whole: the chunk holds all edges of the row.
  static void by_dst_chunk(const Args<A>& a, Chunk<A>& c, int64_t row, const A* own, const A* grad_row, const A* stats,
                           A* delta, bool whole, A* grad_att, A* grad_proj, A* attr_row, A* state) {
    if (a.grad_out) {
      dots<A, NV>(grad_row, c.value, c.n, a.heads, a.padded_channels, A(1), c.dp, PrefetchLane<1>{&c.ahead});
    } else {
      load_weight_grads(a, c);
    }
    softmax_backward(a, c, stats, whole, delta);
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

  static void by_src_chunk(const Args<A>& a, Chunk<A>& c, const A* own_key, const A* own_value, int64_t begin,
                           int64_t n, int64_t* prefetched, A* state) {
    gather(a, a.dst, a.grad_out, begin, n, prefetched, c, a.stats);
    const bool term_joins_own = a.edge_dim && !Score::kTermJoinsRows;
    if (!a.grad_out) load_weight_grads(a, c);
    if (term_joins_own) {
      // Sums in the order of the destination pass, for the reason given at delta_of_row().
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
        dots<A, NV>(own_value, c.value, n, a.heads, a.padded_channels, A(1), c.dp, PrefetchLane<1>{&c.ahead});
      }
    }
    softmax_backward_by_src(a, c);
    // Without a value tensor both gradients belong to the key. With kInverseNorms they are summed separately, since
    // only the score's gradient passes through the norm.
    A* values = a.value || Score::kInverseNorms ? state + keys_size(a) : state;
    if (a.grad_out && (a.grad_value || !a.value)) {
      accumulate<A, NV>(c.w, c.value, n, a.heads, a.padded_channels, A(1), values);
    }
    if (a.grad_src) score_grad(a, own_key, c, state, nullptr, nullptr);
  }

  // Rows -------------------------------------------------------------------------------------------------------------

  // Finishes a complete row. buffer: memory for a row of keys; grad_att: the partial sums of the part.
  static void finish(Pass pass, const Args<A>& a, int64_t row, A* state, A* buffer, A* grad_att) {
    if constexpr (Score::kInverseNorms) {
      if (pass == Pass::by_dst) {
        Score::through_norm(a, row_of(a.dst, row, a.heads, a.dim, a.padded_dim, buffer), state, grad_att);
      } else if (pass == Pass::by_src) {
        Score::through_norm(a, row_of(a.src, row, a.heads, a.dim, a.padded_dim, buffer), state, nullptr);
        for (int64_t i = 0; i < keys_size(a); ++i) state[i] += state[keys_size(a) + i];
      }
    }
    write_state(pass, a, row, state);
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
    Segment segment;
    while (walk.next(&segment)) {
      const int64_t row = segment.row;
      if (pass == Pass::delta_of_out) {
        const A* grad = row_of(a.grad_out, row, a.heads, a.channels, a.padded_channels, other_buffer);
        if (segment.finished) delta_of_row(a, row, grad, state, c.s, delta_of(a, row));
        continue;
      }
      clear_state(pass, a, state);
      prefetch_own(pass, a, row + 2);
      const bool by_src = pass == Pass::by_src;
      const A* own = row_of(by_src ? a.src : a.dst, row, a.heads, a.dim, a.padded_dim, own_buffer);
      const A* own_value = own;
      if (by_src && a.value) own_value = row_of(a.value, row, a.heads, a.channels, a.padded_channels, other_buffer);
      const A *grad_row = nullptr, *stats = a.stats ? a.stats + row * a.heads * kStats : nullptr;
      if (pass == Pass::by_dst && a.grad_out) {
        grad_row = row_of(a.grad_out, row, a.heads, a.channels, a.padded_channels, other_buffer);
      }
      const bool whole = segment.fresh && segment.finished && segment.end - segment.begin <= kChunk;
      if (pass == Pass::by_dst && !a.grad_out) {
        for (int64_t h = 0; h < a.heads; ++h) delta[h] = delta_of(a, row)[h];
      } else if (pass == Pass::by_dst && !whole) {
        delta_of_row(a, row, grad_row, state, c.s, delta);
        clear_state(pass, a, state);
      }
      for (int64_t begin = segment.begin; begin < segment.end; begin += kChunk) {
        const int64_t n = segment.end - begin < kChunk ? segment.end - begin : kChunk;
        if (by_src) {
          by_src_chunk(a, c, own, own_value, begin, n, &prefetched, state);
          c.ahead.prefetch_rest();
          continue;
        }
        destination_logits(a, own, begin, n, &prefetched, c);
        if (pass == Pass::forward) {
          join_softmax(a, c, state);
          accumulate<A, NV>(c.s, c.value, c.n, a.heads, a.padded_channels, A(1), state + 2 * heads_size(a),
                            PrefetchLane<1>{&c.ahead});
        } else if (pass == Pass::weights) {
          softmax_of_row(a, c, a.maximum + row * a.heads, a.inverse_sum + row * a.heads);
          write_weights(a, c);
        } else if (pass == Pass::delta) {
          softmax_of_row(a, c, stats, stats + a.heads);
          add_delta(a, c, state);
        } else {
          by_dst_chunk(a, c, row, own, grad_row, stats, delta, whole, grad_att, grad_proj, attr_row, state);
        }
        c.ahead.prefetch_rest();
      }
      if (pass == Pass::by_dst && segment.finished) {
        for (int64_t h = 0; h < a.heads; ++h) delta_of(a, row)[h] = delta[h];
      }
      if (segment.fresh && segment.finished) {
        finish(pass, a, row, state, own_buffer, grad_att);
      } else if (a.carry) {
        A* kept = carried(pass, a, part, segment.fresh ? 1 : 0);
        for (int64_t i = 0; i < carry_size(pass, a); ++i) kept[i] = state[i];
      }
    }
    fence_streams();
  }

  static void merge(Pass pass, const Args<A>& a, int64_t part, A* state) {
    if (!a.carry) return;
    Walk walk(a.graph, a.items_per_part, part);
    Segment segment;
    if (!walk.next(&segment) || segment.fresh || !segment.finished) return;
    const int64_t first = first_part_of_row(a.graph, segment.row, a.items_per_part);
    clear_state(pass, a, state);
    for (int64_t p = first; p <= part; ++p) combine_states(pass, a, state, carried(pass, a, p, p == first ? 1 : 0));
    finish(pass, a, segment.row, state, state + carry_size(pass, a), part_of_att(a, part));
    fence_streams();
  }

  static Kernels<A> table() { return {kWidth<A>, carry_size<A>, scratch_size, run, merge}; }
};

template <class A, template <class, int> class ScoreOf>
static Kernels<A> kernels_for_width(int64_t vectors) {
  // On x86, kernels for heads of two or four 16-byte vectors would run only without AVX2, which does not justify their
  // compile time.
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

// vectors: vectors per head if keys and values have the same number, else 0.
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
