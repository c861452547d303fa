// A chunk of edges: its gathered rows, the edge term added to them, dropout and edge scale. Included once per
// instruction set.

template <class A>
struct Chunk {
  int64_t n = 0;
  int64_t node[kChunk + kAhead], edge[kChunk];  // node: gathered ends, also those of the next kAhead edges (prefetch)
  Ahead ahead;                                  // stream 0 serves the loop over keys, stream 1 that over values
  const A* key[kChunk];                         // gathered rows that the score reads
  const A* value[kChunk];  // gathered rows that w multiplies: values or, in the source pass, grad_out
  A *keys, *values;        // copies of rows that cannot be read in place
  A *attr, *term;          // edge features and their projection
  A* joined;               // source pass: the query-side (source) rows plus the edge term
  A *s, *dp, *w;           // [H, kChunk]
  A *top, *inverse;        // [H, kChunk], source pass: maximum and 1 / sum of the gathered destinations' softmax
  A* r;                    // [H, kChunk]: 1 / norm of the gathered rows, for scores with kInverseNorms
  A* keep;                 // [H, kChunk]: dropout factors, 0 or 1 / (1 - p); null without dropout and edge scale
  A* factor;               // [H, kChunk]: keep times the edge scale; the same array as keep without an edge scale
};

template <class A>
static inline int64_t widest_row(const Args<A>& args) {
  const int64_t key = term_stride(args), value = args.heads * args.padded_channels;
  return key > value ? key : value;
}

template <class A>
static inline Chunk<A> make_chunk(const Args<A>& args, Arena<A>& arena) {
  Chunk<A> c;
  const int64_t per_head = args.heads * kChunk;
  c.keys = arena.take(kChunk * widest_row(args));
  c.values = arena.take(kChunk * widest_row(args));
  c.term = arena.take(kChunk * term_stride(args));
  c.joined = arena.take(args.edge_in_value ? kChunk * term_stride(args) : 0);
  c.attr = arena.take(kChunk * args.edge_dim);
  for (int64_t i = 0; i < kChunk * args.edge_dim; ++i) c.attr[i] = A(0);
  c.s = arena.take(per_head);
  c.dp = arena.take(per_head);
  c.w = arena.take(per_head);
  c.top = arena.take(per_head);
  c.inverse = arena.take(per_head);
  c.r = arena.take(per_head);
  c.keep = args.has_dropout || args.edge_scale ? arena.take(per_head) : nullptr;
  c.factor = args.edge_scale ? arena.take(per_head) : c.keep;
  return c;
}

// Computes keep and factor. Fills up to a multiple of kDraws edges, repeating the first edge.
template <class A>
static inline void draw_factors(const Args<A>& args, Chunk<A>& c) {
  const int64_t filled = round_up(c.n, kDraws);
  for (int64_t e = c.n; e < filled; ++e) c.edge[e] = c.edge[0];
  // With p = 1 the threshold is 2^32, beyond any draw; it may be clamped since keep_scale is then 0.
  const uint64_t least64 = args.has_dropout ? args.threshold : 0;
  const uint32_t least = static_cast<uint32_t>(least64 < 0xffffffffu ? least64 : 0xffffffffu);
  for (int64_t h = 0; h < args.heads; h += 4) {
    const int64_t heads = args.heads - h < 4 ? args.heads - h : 4;
    for (int64_t first = 0; first < filled; first += kDraws) {
      const Draws drawn = args.has_dropout ? draw(args.seed, c.edge + first, static_cast<uint32_t>(h / 4)) : Draws{};
      for (int64_t i = 0; i < heads; ++i) {
        keep(drawn.of[i], least, args.keep_scale, c.keep + (h + i) * kChunk + first);
      }
    }
  }
  if (!args.edge_scale) return;
  for (int64_t h = 0; h < args.heads; ++h) {
    const A *keep = c.keep + h * kChunk, *scale = args.edge_scale + h * args.scale_head_stride;
    A* factor = c.factor + h * kChunk;
    for (int64_t e = 0; e < filled; ++e) factor[e] = keep[e] * scale[c.edge[e] * args.scale_edge_stride];
  }
}

// Gathers the rows of positions [begin, begin + n): `keys` for the score, and `values`, which may be null if they are
// the keys. Sets up c.ahead to prefetch the rows of the next positions, and prefetches the next nodes' `stats` [N,
// kStats, H] immediately if the pass reads them.
template <class A>
static inline void gather(const Args<A>& args, const Rows& keys, const Rows& values, int64_t begin, int64_t n,
                          int64_t* prefetched, Chunk<A>& c, const A* stats = nullptr) {
  const Compressed& g = args.graph;
  c.n = n;
  const int64_t known = load_nodes_ahead(g, begin, n, c.node);
  const int64_t first = *prefetched > begin ? *prefetched - begin : 0;
  c.ahead.nodes = c.node + first;
  c.ahead.count = known - first;
  const int64_t key_size = args.heads * args.dim;
  if (values) {
    c.ahead.set_rows(0, keys, 0, key_size);
    c.ahead.set_rows(1, values, 0, args.heads * args.channels);
  } else {
    c.ahead.set_rows(0, keys, 0, key_size / 2);
    c.ahead.set_rows(1, keys, key_size / 2, key_size - key_size / 2);
  }
  c.ahead.lanes[0].next = c.ahead.lanes[1].next = 0;
  if (stats) {
    const Rows rows{stats, kStats * args.heads, sizeof(A) == 4 ? Dtype::f32 : Dtype::f64};
    prefetch_rows(rows, c.node + first, known - first, kStats * args.heads);
  }
  *prefetched = begin + known;
  gather_rows(keys, c.node, n, args.heads, args.dim, args.padded_dim, c.keys, term_stride(args), c.key);
  if (values) {
    gather_rows(values, c.node, n, args.heads, args.channels, args.padded_channels, c.values,
                args.heads * args.padded_channels, c.value);
  } else {
    for (int64_t e = 0; e < round_up(n, 4); ++e) c.value[e] = c.key[e];
  }
  if (args.edge_dim || args.weights || c.factor || args.grad_weights || args.grad_scale) {
    for (int64_t e = 0; e < n; ++e) c.edge[e] = g.edge_id(begin + e);
  }
  if (args.edge_dim) {
    load_edge_attr(args, c.edge, n, c.attr);
    project_edges(args, c.attr, n, c.term);
  }
  if (c.factor) draw_factors(args, c);
}

// rows[e] += term[e], in a copy
template <class A>
static inline void join_term(const Args<A>& args, const Chunk<A>& c, const A** rows, A* copies) {
  const int64_t stride = term_stride(args), size = args.heads * args.padded_dim;
  for (int64_t e = 0; e < c.n; ++e) {
    A* out = copies + e * stride;
    const A *row = rows[e], *term = c.term + e * stride;
    for (int64_t i = 0; i < size; ++i) out[i] = row[i] + term[i];
    rows[e] = out;
  }
  fill_up(rows, c.n);
}

// rows[e] = own + term[e], in a copy that may be the term itself
template <class A>
static inline void join_own(const Args<A>& args, const Chunk<A>& c, const A* own, const A** rows, A* copies) {
  const int64_t stride = term_stride(args), size = args.heads * args.padded_dim;
  for (int64_t e = 0; e < c.n; ++e) {
    A* out = copies + e * stride;
    const A* term = c.term + e * stride;
    for (int64_t i = 0; i < size; ++i) out[i] = own[i] + term[i];
    rows[e] = out;
  }
  fill_up(rows, c.n);
}

// term[e] += w[e] * grad_row, where the edge term is in the values too
template <class A>
static inline void add_value_term(const Args<A>& args, Chunk<A>& c, const A* grad_row) {
  for (int64_t e = 0; e < c.n; ++e) {
    A* term = c.term + e * term_stride(args);
    for (int64_t h = 0; h < args.heads; ++h) {
      const A w = c.w[h * kChunk + e];
      for (int64_t i = h * args.padded_dim; i < (h + 1) * args.padded_dim; i += kWidth<A>) {
        store(term + i, load(term + i) + w * load(grad_row + i));
      }
    }
  }
}

// Prefetches the query-side rows of `row`. They are read in order, but too far apart in time for the hardware
// prefetcher.
template <class A>
static inline void prefetch_own(Pass pass, const Args<A>& args, int64_t row) {
  if (row >= args.graph.num_rows) return;
  const int64_t keys = args.heads * args.dim, values = args.heads * args.channels;
  prefetch_rows(pass == Pass::by_src ? args.src : args.dst, &row, 1, keys);
  if (pass == Pass::by_src && args.value) prefetch_rows(args.value, &row, 1, values);
  if (pass == Pass::by_dst && args.grad_out) {
    prefetch_rows(args.grad_out, &row, 1, values);
    prefetch_rows(args.saved_out, &row, 1, values);
  }
}
