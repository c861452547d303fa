// SpMM: out[r] = row_scale[r] * sum over the edges of r of weight[e] column_scale[c] x[c], and SDDMM:
// products[e] = <own[r], x[c]> row_scale[r] column_scale[c], each over a merge-path part of the graph (partition.h).
// The transposed product is the same pass over the other direction of the graph with the scales exchanged. A row that
// a part does not hold whole leaves its sum in `carry`, and merge() adds these up in the order of the parts.
// Included once per instruction set.

template <class A>
struct SpmmPasses {
  static constexpr int64_t W = kWidth<A>;

  struct Chunk {
    const A* rows[kChunk];
    A* copies;   // [kChunk, heads * width] where rows are not of type A
    A* weights;  // [heads, kChunk]
    int64_t nodes[kChunk + kAhead];
  };

  static int64_t row_size(const SpmmArgs<A>& a) { return a.heads * a.width; }

  static int64_t scratch_size(const SpmmArgs<A>& a) {
    const int64_t copies = is_native<A>(a.x.dtype) ? 0 : kChunk * row_size(a);
    return copies + 4 * row_size(a) + kChunk * a.heads + 1024;
  }

  static void gather_chunk(const SpmmArgs<A>& a, int64_t begin, int64_t n, int64_t* prefetched, Chunk& c) {
    const int64_t known = load_nodes_ahead(a.graph, begin, n, c.nodes);
    const int64_t first = *prefetched > begin ? *prefetched - begin : 0;
    if (first < known) {
      prefetch_rows(a.x, c.nodes + first, known - first, row_size(a));
      *prefetched = begin + known;
    }
    gather_rows(a.x, c.nodes, n, 1, row_size(a), row_size(a), c.copies, row_size(a), c.rows);
  }

  static void load_weights(const SpmmArgs<A>& a, int64_t begin, int64_t n, Chunk& c) {
    for (int64_t e = 0; e < n; ++e) {
      const A scale = a.column_scale ? a.column_scale[c.nodes[e]] : A(1);
      if (!a.weight) {
        for (int64_t h = 0; h < a.heads; ++h) c.weights[h * kChunk + e] = scale;
        continue;
      }
      const A* weight = a.weight + a.graph.edge_id(begin + e) * a.weight_edge_stride;
      for (int64_t h = 0; h < a.heads; ++h) c.weights[h * kChunk + e] = scale * weight[h * a.weight_head_stride];
    }
  }

  // out = alpha * sum over e of w[e] rows[e], plus what `out` held where Add is set; NV vectors stay in registers.
  template <int NV, bool Add>
  static void block(const A* w, const A* const* rows, int64_t n, int64_t at, A alpha, A* out) {
    Vec<A> t[NV] = {};
    for (int64_t e = 0; e < n; ++e) {
      const Vec<A> x = splat<A>(w[e]);
      const A* row = rows[e] + at;
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) t[v] += x * load(row + v * W);
    }
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      const Vec<A> sum = alpha * t[v];
      store(out + at + v * W, Add ? load(out + at + v * W) + sum : sum);
    }
  }

  template <bool Add>
  static void head(const A* w, const A* const* rows, int64_t n, int64_t begin, int64_t end, A alpha, A* out) {
    int64_t at = begin;
    for (; at + 8 * W <= end; at += 8 * W) block<8, Add>(w, rows, n, at, alpha, out);
    if (at + 4 * W <= end) block<4, Add>(w, rows, n, at, alpha, out), at += 4 * W;
    if (at + 2 * W <= end) block<2, Add>(w, rows, n, at, alpha, out), at += 2 * W;
    if (at + W <= end) block<1, Add>(w, rows, n, at, alpha, out), at += W;
    for (; at < end; ++at) {
      A t = 0;
      for (int64_t e = 0; e < n; ++e) t += w[e] * rows[e][at];
      out[at] = Add ? out[at] + alpha * t : alpha * t;
    }
  }

  template <bool Add>
  static void accumulate(const SpmmArgs<A>& a, const Chunk& c, int64_t n, A alpha, A* out) {
    for (int64_t h = 0; h < a.heads; ++h) {
      head<Add>(c.weights + h * kChunk, c.rows, n, h * a.width, (h + 1) * a.width, alpha, out);
    }
  }

  static A row_scale(const SpmmArgs<A>& a, int64_t row) { return a.row_scale ? a.row_scale[row] : A(1); }

  static void finish(const SpmmArgs<A>& a, int64_t row, A* state) {
    const A scale = row_scale(a, row);
    for (int64_t i = 0; i < row_size(a); ++i) state[i] *= scale;
    narrow(a.out.data, a.out.dtype, row * row_size(a), state, row_size(a));
  }

  static A* slot(const SpmmArgs<A>& a, int64_t part, int which) { return a.carry + (part * 2 + which) * row_size(a); }

  static void product_piece(const SpmmArgs<A>& a, const Piece& piece, int64_t part, int64_t* prefetched, Chunk& c,
                            A* state) {
    const bool whole = piece.fresh && piece.finished;
    const int64_t size = piece.end - piece.begin;
    if (whole && size > 0 && size <= kChunk) {  // one chunk: no sum has to be kept
      gather_chunk(a, piece.begin, size, prefetched, c);
      load_weights(a, piece.begin, size, c);
      const bool in_place = is_native<A>(a.out.dtype);
      A* out = in_place ? static_cast<A*>(a.out.data) + piece.row * row_size(a) : state;
      accumulate<false>(a, c, size, row_scale(a, piece.row), out);
      if (!in_place) narrow(a.out.data, a.out.dtype, piece.row * row_size(a), out, row_size(a));
      return;
    }
    for (int64_t i = 0; i < row_size(a); ++i) state[i] = A(0);
    for (int64_t begin = piece.begin; begin < piece.end; begin += kChunk) {
      const int64_t n = piece.end - begin < kChunk ? piece.end - begin : kChunk;
      gather_chunk(a, begin, n, prefetched, c);
      load_weights(a, begin, n, c);
      accumulate<true>(a, c, n, A(1), state);
    }
    if (whole) {
      finish(a, piece.row, state);
    } else {
      __builtin_memcpy(slot(a, part, piece.fresh ? 1 : 0), state, row_size(a) * sizeof(A));
    }
  }

  static void sampled_piece(const SpmmArgs<A>& a, const Piece& piece, int64_t* prefetched, Chunk& c, A* buffer) {
    if (piece.begin == piece.end) return;
    const A* own = row_of(a.own, piece.row, 1, row_size(a), row_size(a), buffer);
    const A scale = row_scale(a, piece.row);
    for (int64_t begin = piece.begin; begin < piece.end; begin += kChunk) {
      const int64_t n = piece.end - begin < kChunk ? piece.end - begin : kChunk;
      gather_chunk(a, begin, n, prefetched, c);
      for (int64_t e = 0; e < n; ++e) {
        A* out = a.products + a.graph.edge_id(begin + e) * a.heads;
        const A both = a.column_scale ? scale * a.column_scale[c.nodes[e]] : scale;
        for (int64_t h = 0; h < a.heads; ++h) out[h] = both * dot(own, c.rows[e], h * a.width, (h + 1) * a.width);
      }
    }
  }

  static A dot(const A* x, const A* y, int64_t begin, int64_t end) {
    Vec<A> t[4] = {};
    int64_t at = begin;
    for (; at + 4 * W <= end; at += 4 * W) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) t[v] += load(x + at + v * W) * load(y + at + v * W);
    }
    for (; at + W <= end; at += W) t[0] += load(x + at) * load(y + at);
    A total = sum<A>((t[0] + t[1]) + (t[2] + t[3]));
    for (; at < end; ++at) total += x[at] * y[at];
    return total;
  }

  static void run(SpmmPass pass, const SpmmArgs<A>& a, int64_t part, A* scratch) {
    Arena<A> arena(scratch);
    Chunk c;
    c.copies = is_native<A>(a.x.dtype) ? nullptr : arena.take(kChunk * row_size(a));
    c.weights = arena.take(kChunk * a.heads);
    A* state = arena.take(row_size(a));
    int64_t prefetched = 0;
    Walk walk(a.graph, a.items_per_part, part);
    Piece piece;
    while (walk.next(&piece)) {
      if (pass == SpmmPass::sampled) {
        sampled_piece(a, piece, &prefetched, c, state);
      } else {
        product_piece(a, piece, part, &prefetched, c, state);
      }
    }
  }

  static void merge(const SpmmArgs<A>& a, int64_t part, A* state) {
    Walk walk(a.graph, a.items_per_part, part);
    Piece piece;
    if (!walk.next(&piece) || piece.fresh || !piece.finished) return;
    const int64_t first = first_part_of_row(a.graph, piece.row, a.items_per_part);
    __builtin_memcpy(state, slot(a, first, 1), row_size(a) * sizeof(A));
    for (int64_t p = first + 1; p <= part; ++p) {
      const A* other = slot(a, p, 0);
      for (int64_t i = 0; i < row_size(a); ++i) state[i] += other[i];
    }
    finish(a, piece.row, state);
  }
};

template <class A>
SpmmKernels<A> spmm_kernels() {
  return {SpmmPasses<A>::scratch_size, SpmmPasses<A>::run, SpmmPasses<A>::merge};
}
