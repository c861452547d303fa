// SpMM: out[r] = row_scale[r] * sum over the edges of r of weight[e] column_scale[c] x[c], and SDDMM:
// products[e] = <own[r], x[c]> row_scale[r] column_scale[c], each over a merge-path part of the graph (partition.h).
// The transposed product is the same pass over the other direction of the graph with the scales exchanged. Where parts
// share a row, each writes its partial sum to the fix-up workspace `carry`, and merge() adds them in the order of the
// parts. Included once per instruction set.

template <class A>
struct SpmmPasses {
  static constexpr int64_t W = kWidth<A>;

  static int64_t row_size(const SpmmArgs<A>& a) { return a.heads * a.width; }

  static int64_t scratch_size(const SpmmArgs<A>& a) { return 3 * row_size(a) + 256; }

  // Prefetches the source row of the edge kAhead positions later.
  static EDGELESS_INLINE void prefetch_row(const SpmmArgs<A>& a, int64_t edge) {
    if (edge + kAhead >= a.graph.num_edges) return;
    const int64_t size = size_of(a.x.dtype), first = a.graph.index(edge + kAhead) * a.x.stride * size;
    prefetch_range(static_cast<const char*>(a.x.data) + first, row_size(a) * size);
  }

  // The factor of an edge for head h: weight * column_scale.
  static EDGELESS_INLINE A factor(const SpmmArgs<A>& a, int64_t edge, int64_t node, int64_t h) {
    const A scale = a.column_scale ? a.column_scale[node] : A(1);
    return a.weight ? scale * a.weight[a.graph.edge_id(edge) * a.weight_edge_stride + h * a.weight_head_stride] : scale;
  }

  // Sums the edges of a segment. Rows are prefetched kAhead edges early, one per iteration: a burst of prefetches would
  // stall the loads until memory had accepted its last line. `at` is the first element of head h to sum.
  template <class I, class S, bool kScaled>
  struct Stream {
    static constexpr int64_t kFlush = 64;  // edges per partial sum: long sums would lose digits

    const SpmmArgs<A>& a;
    const I* nodes = static_cast<const I*>(a.graph.indices);
    const S* x = static_cast<const S*>(a.x.data);

    EDGELESS_INLINE void prefetch(int64_t edge, int64_t at, int64_t n) const {
      if (edge + kAhead >= a.graph.num_edges) return;
      prefetch_range(x + nodes[edge + kAhead] * a.x.stride + at, n * sizeof(S));
      if constexpr (kScaled) {
        if (a.weight) __builtin_prefetch(a.weight + a.graph.edge_id(edge + kAhead) * a.weight_edge_stride);
      }
    }

    // out = alpha * sum over NV vectors and, with kRest, over the `rest` elements behind them, fewer than a vector.
    template <int NV, bool kRest>
    void vectors(int64_t begin, int64_t end, int64_t at, int64_t h, A alpha, A* out, int64_t rest) const {
      constexpr int kSums = NV + (kRest ? 1 : 0);
      for (int64_t e = begin; e < end;) {
        const bool first = e == begin;
        const int64_t stop = end - e < kFlush ? end : e + kFlush;
        Vec<A> t[kSums] = {};
        for (; e < stop; ++e) {
          prefetch(e, at, kSums * W);
          const int64_t node = nodes[e];
          const S* row = x + node * a.x.stride + at;
          const Vec<A> by = splat<A>(kScaled ? factor(a, e, node, h) : A(1));
#pragma GCC unroll 9
          for (int v = 0; v < kSums; ++v) {
            const Vec<A> of = v < NV ? Stored<A, S>::vector(row + v * W) : Stored<A, S>::first(row + v * W, rest);
            t[v] += kScaled ? by * of : of;
          }
        }
        A* to = out + at;
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v, to += W) {
          const Vec<A> sum = alpha * t[v];
          store(to, first ? sum : load(to) + sum);
        }
        if constexpr (kRest) {
          const Vec<A> sum = alpha * t[NV];
          store_first(to, first ? sum : load_first(to, rest) + sum, rest);
        }
      }
    }

    void head(int64_t begin, int64_t end, int64_t h, A alpha, A* out) const {
      int64_t at = h * a.width, left = a.width / W;
      const int64_t rest = a.width % W;
      // The elements after the whole vectors join the last loop: a loop of their own would look up the edges again.
      const auto walk = [&](auto number) {
        constexpr int NV = decltype(number)::value;
        left -= NV;
        if (left == 0 && rest > 0) {
          vectors<NV, true>(begin, end, at, h, alpha, out, rest);
        } else {
          vectors<NV, false>(begin, end, at, h, alpha, out, 0);
        }
        at += NV * W;
      };
      if (left == 0 && rest > 0) vectors<0, true>(begin, end, at, h, alpha, out, rest);
      while (left >= 8) walk(std::integral_constant<int, 8>());
      if (left >= 4) walk(std::integral_constant<int, 4>());
      if (left >= 2) walk(std::integral_constant<int, 2>());
      if (left >= 1) walk(std::integral_constant<int, 1>());
    }

    void row_of_sums(int64_t begin, int64_t end, A alpha, A* out) const {
      for (int64_t h = 0; h < a.heads; ++h) head(begin, end, h, alpha, out);
    }
  };

  template <class I>
  static void sum_indexed(const SpmmArgs<A>& a, int64_t begin, int64_t end, A alpha, A* out) {
    with_storage<A>(a.x.dtype, [&](auto* null) {
      typedef std::remove_cv_t<std::remove_pointer_t<decltype(null)>> S;
      if (a.weight || a.column_scale) {
        Stream<I, S, true>{a}.row_of_sums(begin, end, alpha, out);
      } else {
        Stream<I, S, false>{a}.row_of_sums(begin, end, alpha, out);
      }
    });
  }

  // out [heads * width] = alpha * sum over the edges [begin, end).
  static void sum_edges(const SpmmArgs<A>& a, int64_t begin, int64_t end, A alpha, A* out) {
    if (begin == end) {
      for (int64_t i = 0; i < row_size(a); ++i) out[i] = A(0);
    } else if (a.graph.wide) {
      sum_indexed<int64_t>(a, begin, end, alpha, out);
    } else {
      sum_indexed<int32_t>(a, begin, end, alpha, out);
    }
  }

  static A row_scale(const SpmmArgs<A>& a, int64_t row) { return a.row_scale ? a.row_scale[row] : A(1); }

  static void finish(const SpmmArgs<A>& a, int64_t row, A* state) {
    const A scale = row_scale(a, row);
    for (int64_t i = 0; i < row_size(a); ++i) state[i] *= scale;
    narrow(a.out.data, a.out.dtype, row * row_size(a), state, row_size(a));
  }

  static A* slot(const SpmmArgs<A>& a, int64_t part, int which) { return a.carry + (part * 2 + which) * row_size(a); }

  static void product_segment(const SpmmArgs<A>& a, const Segment& segment, int64_t part, A* state) {
    const bool whole = segment.fresh && segment.finished, in_place = is_native<A>(a.out.dtype);
    const int64_t first = segment.row * row_size(a);
    if (!whole) {
      sum_edges(a, segment.begin, segment.end, A(1), slot(a, part, segment.fresh ? 1 : 0));
    } else if (in_place) {
      sum_edges(a, segment.begin, segment.end, row_scale(a, segment.row), static_cast<A*>(a.out.data) + first);
    } else {
      sum_edges(a, segment.begin, segment.end, row_scale(a, segment.row), state);
      narrow(a.out.data, a.out.dtype, first, state, row_size(a));
    }
  }

  // `buffer` has space for two rows.
  static void sampled_segment(const SpmmArgs<A>& a, const Segment& segment, A* buffer) {
    if (segment.begin == segment.end) return;
    const A* own = row_of(a.own, segment.row, 1, row_size(a), row_size(a), buffer);
    const A scale = row_scale(a, segment.row);
    for (int64_t edge = segment.begin; edge < segment.end; ++edge) {
      prefetch_row(a, edge);
      const int64_t node = a.graph.index(edge);
      const A* row = row_of(a.x, node, 1, row_size(a), row_size(a), buffer + row_size(a));
      A* out = a.products + a.graph.edge_id(edge) * a.heads;
      const A both = a.column_scale ? scale * a.column_scale[node] : scale;
      for (int64_t h = 0; h < a.heads; ++h) out[h] = both * dot(own, row, h * a.width, (h + 1) * a.width);
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
    if (at < end) t[1] += load_first(x + at, end - at) * load_first(y + at, end - at);
    return sum<A>((t[0] + t[1]) + (t[2] + t[3]));
  }

  static void run(SpmmPass pass, const SpmmArgs<A>& a, int64_t part, A* scratch) {
    Walk walk(a.graph, a.items_per_part, part);
    Segment segment;
    while (walk.next(&segment)) {
      if (pass == SpmmPass::sampled) {
        sampled_segment(a, segment, scratch);
      } else {
        product_segment(a, segment, part, scratch);
      }
    }
  }

  static void merge(const SpmmArgs<A>& a, int64_t part, A* state) {
    Walk walk(a.graph, a.items_per_part, part);
    Segment segment;
    if (!walk.next(&segment) || segment.fresh || !segment.finished) return;
    const int64_t first = first_part_of_row(a.graph, segment.row, a.items_per_part);
    __builtin_memcpy(state, slot(a, first, 1), row_size(a) * sizeof(A));
    for (int64_t p = first + 1; p <= part; ++p) {
      const A* other = slot(a, p, 0);
      for (int64_t i = 0; i < row_size(a); ++i) state[i] += other[i];
    }
    finish(a, segment.row, state);
  }
};

template <class A>
SpmmKernels<A> spmm_kernels() {
  return {SpmmPasses<A>::scratch_size, SpmmPasses<A>::run, SpmmPasses<A>::merge};
}
