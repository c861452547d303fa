// The gradient of a minimum or maximum: each element of a row's gradient belongs to the neighbor at its argument.
//
// gather(): for each of its edges, a source reads the destination's gradient and argument and adds the elements whose
// argument is this edge. It runs over merge-path parts of the CSC, writes every row once and needs no zeroed output,
// but reads a gradient row per edge. scatter(): each element is added to its source, in a buffer with a feature tile of
// every source, so that random writes hit the caches; then the buffer is written out. It reads every gradient once,
// whatever the number of edges. Threads own columns.
// In rows with `tied` set the gradient is divided among equal values, which takes a second read of the row's neighbors.
// scatter() handles these rows in the same pass; after gather(), share() adds them. The order of summation does not
// depend on the number of threads. Included once per instruction set.

template <class A>
struct ReduceGradient {
  static constexpr int64_t W = kWidth<A>;
  static constexpr int kMost = EDGELESS_VECTOR_BYTES == 64 ? 8 : 4;
  typedef IntVec<A> IVec;
  typedef ReducePasses<A> Passes;

  struct Edges : Upcoming {
    int64_t position[kSize + kAhead];  // position of the edge within the destination's row; -1: a tied row, skip
  };

  static void locate(const ReduceArgs& a, int64_t begin, int64_t n, Edges& next) {
    next.reach(a.transposed, begin, n, [&](int64_t first, int64_t count) {
      load_nodes(a.transposed, first, count, next.offset);
      for (int64_t e = 0; e < count; ++e) {
        const int64_t edge = a.transposed.edge_id(first + e);
        const int64_t position = a.positions ? a.positions[edge] : edge - a.graph.row_begin(next.offset[e]);
        next.position[e] = a.tied && a.tied[next.offset[e]] ? -1 : position;
      }
    });
  }

  // Adds (Add) or assigns to `out` the gradient of NV vectors over n edges, beginning with edge `from` of `next`.
  template <int NV, bool Add, class S, class P>
  static void block(const S* grad, int64_t stride, const P* arg, int64_t width, const Edges& next, int64_t from,
                    int64_t n, A* out) {
    Vec<A> t[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) t[v] = Add ? load(out + v * W) : Vec<A>{};
    const int64_t *offset = next.offset + from, *position = next.position + from;
    const int64_t last = next.end - next.first - from - 1;
    for (int64_t e = 0; e < n; ++e) {
      const int64_t soon = offset[e + kAhead < last ? e + kAhead : last];
      prefetch_range(grad + soon * stride, NV * W * sizeof(S));
      prefetch_range(arg + soon * width, NV * W * sizeof(P));
      const S* row = grad + offset[e] * stride;
      const P* where = arg + offset[e] * width;
      const IVec here = IVec{} + static_cast<typename Passes::Int>(position[e]);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) {
        Lanes<A, P> narrow;
        __builtin_memcpy(&narrow, where + v * W, sizeof narrow);
        const IVec own = __builtin_convertvector(narrow, IVec) == here;
        t[v] += own ? Stored<A, S>::vector(row + v * W) : Vec<A>{};
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) store(out + v * W, t[v]);
  }

  template <bool Add, class S, class P>
  static void columns(const ReduceArgs& a, const Edges& next, int64_t from, int64_t n, A* state) {
    const S* grad = static_cast<const S*>(a.grad_out.data);
    const P* arg = static_cast<const P*>(a.arg);
    const int64_t whole = a.width / W * W, stride = a.grad_out.stride;
    int64_t at = 0;
    for (; at + kMost * W <= whole; at += kMost * W) {
      block<kMost, Add>(grad + at, stride, arg + at, a.width, next, from, n, state + at);
    }
    if (kMost > 4 && at + 4 * W <= whole) {
      block<4, Add>(grad + at, stride, arg + at, a.width, next, from, n, state + at);
      at += 4 * W;
    }
    if (at + 2 * W <= whole) {
      block<2, Add>(grad + at, stride, arg + at, a.width, next, from, n, state + at);
      at += 2 * W;
    }
    for (; at < a.width; at += W) {  // the last vector ends with the row
      const int64_t c = at < whole ? at : a.width - W;
      block<1, Add>(grad + c, stride, arg + c, a.width, next, from, n, state + at);
    }
  }

  template <class S, class P>
  static void gather_segment(const ReduceArgs& a, const Segment& segment, Edges& next, A* state, A* buffer) {
    if (segment.begin == segment.end || a.width < W) {
      for (int64_t i = 0; i < a.width; ++i) state[i] = A(0);
    }
    for (int64_t begin = segment.begin; begin < segment.end; begin += Upcoming::kSize) {
      const int64_t n = segment.end - begin < Upcoming::kSize ? segment.end - begin : Upcoming::kSize;
      locate(a, begin, n, next);
      const int64_t from = begin - next.first;
      if (a.width < W) {
        for (int64_t e = from; e < from + n; ++e) {
          const A* grad = row_of(a.grad_out, next.offset[e], 1, a.width, a.width, buffer);
          const P* arg = static_cast<const P*>(a.arg) + next.offset[e] * a.width;
          for (int64_t i = 0; i < a.width; ++i) state[i] += int64_t(arg[i]) == next.position[e] ? grad[i] : A(0);
        }
      } else if (begin == segment.begin) {
        columns<false, S, P>(a, next, from, n, state);
      } else {
        columns<true, S, P>(a, next, from, n, state);
      }
    }
    const int64_t whole = a.width / W * W, shift = whole + W - a.width;
    if (whole == 0 || segment.begin == segment.end) return;
    for (int64_t i = whole; i < a.width; ++i) state[i] = state[i + shift];
  }

  static A* slot(const ReduceArgs& a, int64_t part, int which) {
    return static_cast<A*>(a.carry) + (part * 2 + which) * a.width;
  }

  static void gather(const ReduceArgs& a, int64_t part, A* scratch) {
    Arena<A> arena(scratch);
    A *state = arena.take(Passes::padded(a)), *buffer = arena.take(Passes::padded(a));
    Edges next;
    Walk walk_over(a.transposed, a.items_per_part, part);
    Segment segment;
    while (walk_over.next(&segment)) {
      with_storage<A>(a.grad_out.dtype, [&](auto* s) {
        with_positions(a.arg_size, [&](auto* p) {
          typedef std::remove_cv_t<std::remove_pointer_t<decltype(s)>> S;
          typedef std::remove_cv_t<std::remove_pointer_t<decltype(p)>> P;
          gather_segment<S, P>(a, segment, next, state, buffer);
        });
      });
      if (segment.fresh && segment.finished) {
        write_row(a.grad_x, segment.row, 1, a.width, a.width, state);
      } else {
        __builtin_memcpy(slot(a, part, segment.fresh ? 1 : 0), state, a.width * sizeof(A));
      }
    }
    if (a.grad_x.bypass) fence_streams();
  }

  static void merge(const ReduceArgs& a, int64_t part, A* state) {
    Walk walk_over(a.transposed, a.items_per_part, part);
    Segment segment;
    if (!walk_over.next(&segment) || segment.fresh || !segment.finished) return;
    const int64_t first = first_part_of_row(a.transposed, segment.row, a.items_per_part);
    __builtin_memcpy(state, slot(a, first, 1), a.width * sizeof(A));
    for (int64_t p = first + 1; p <= part; ++p) {
      const A* other = slot(a, p, 0);
      for (int64_t i = 0; i < a.width; ++i) state[i] += other[i];
    }
    write_row(a.grad_x, segment.row, 1, a.width, a.width, state);
    if (a.grad_x.bypass) fence_streams();
  }

  struct Buffers {
    A *grad, *out, *row, *share;
  };

  static Buffers buffers(const ReduceArgs& a, Arena<A>& arena) {
    const int64_t n = Passes::padded(a);
    return {arena.take(n), arena.take(n), arena.take(n), arena.take(n)};
  }

  // Divides the gradient of a tied row among its extrema, for columns [first, last). The gradient of a node is at
  // target + node * stride + column.
  static void share_row(const ReduceArgs& a, int64_t row, int64_t first, int64_t last, const Buffers& b, A* target,
                        int64_t stride) {
    const int64_t begin = a.graph.row_begin(row), end = a.graph.row_begin(row + 1);
    const A* grad = row_of(a.grad_out, row, 1, a.width, a.width, b.grad);
    const A* out = row_of(a.saved_out, row, 1, a.width, a.width, b.out);
    A* share = b.share;
    for (int64_t i = first; i < last; ++i) share[i] = a.zero_shares && out[i] == A(0) ? A(1) : A(0);
    for (int64_t p = begin; p < end; ++p) {
      const A* x = row_of(a.x, a.graph.index(p), 1, a.width, a.width, b.row);
      for (int64_t i = first; i < last; ++i) share[i] += x[i] == out[i] ? A(1) : A(0);
    }
    for (int64_t i = first; i < last; ++i)
      share[i] = grad[i] / share[i];  // a NaN extremum divides by 0, but no value equals it below
    for (int64_t p = begin; p < end; ++p) {
      const int64_t node = a.graph.index(p);
      const A* x = row_of(a.x, node, 1, a.width, a.width, b.row);
      A* to = target + node * stride;
      for (int64_t i = first; i < last; ++i) to[i] += x[i] == out[i] ? share[i] : A(0);
    }
  }

  // Adds the tied rows, which gather() skips.
  static void share(const ReduceArgs& a, int64_t first, int64_t last, A* scratch) {
    Arena<A> arena(scratch);
    const Buffers b = buffers(a, arena);
    for (int64_t row = 0; row < a.graph.num_rows; ++row) {
      if (!a.tied[row]) continue;
      share_row(a, row, first, last, b, static_cast<A*>(a.grad_x.data), a.width);
    }
  }

  // Prefetches what scatter() reads of a row.
  template <class Index, class P>
  static void prefetch_row(const ReduceArgs& a, int64_t row, int64_t first, int64_t columns) {
    constexpr int64_t most = 1024;  // bytes of indices: scatter() reads only few indices of a hub
    const Index* indptr = static_cast<const Index*>(a.graph.indptr);
    const char* indices = reinterpret_cast<const char*>(static_cast<const Index*>(a.graph.indices) + indptr[row]);
    const int64_t size = (indptr[row + 1] - indptr[row]) * int64_t(sizeof(Index));
    prefetch_range(indices, size < most ? size : most);
    const int64_t element = size_of(a.grad_out.dtype);
    const char* grad = static_cast<const char*>(a.grad_out.data) + (row * a.grad_out.stride + first) * element;
    prefetch_range(grad, columns * element);
    prefetch_range(static_cast<const P*>(a.arg) + row * a.width + first, columns * int64_t(sizeof(P)));
  }

  template <class Index, class P>
  static void scatter_as(const ReduceArgs& a, int64_t first, int64_t last, const Buffers& b, A* sums) {
    constexpr int64_t ahead = 3;
    const Index* indptr = static_cast<const Index*>(a.graph.indptr);
    const int64_t columns = last - first, step = a.slice;
    for (int64_t row = 0; row < a.graph.num_rows; ++row) {
      if (row + ahead < a.graph.num_rows) prefetch_row<Index, P>(a, row + ahead, first, columns);
      const int64_t begin = indptr[row];
      if (begin == indptr[row + 1]) continue;
      if (a.tied && a.tied[row]) {
        share_row(a, row, first, last, b, sums - first, step);
        continue;
      }
      const A* grad;
      if (is_native<A>(a.grad_out.dtype)) {
        grad = static_cast<const A*>(a.grad_out.data) + row * a.grad_out.stride + first;
      } else {
        widen(b.grad, a.grad_out.data, a.grad_out.dtype, row * a.grad_out.stride + first, columns);
        grad = b.grad;
      }
      const P* arg = static_cast<const P*>(a.arg) + row * a.width + first;
      const Index* indices = static_cast<const Index*>(a.graph.indices) + begin;
      for (int64_t i = 0; i < columns; ++i) sums[indices[arg[i]] * step + i] += grad[i];
    }
  }

  // Processes columns [first, last), at most a.slice, of every row and source. The buffer of sums must be zero on entry
  // and is zero on return.
  static void scatter(const ReduceArgs& a, int64_t first, int64_t last, A* scratch) {
    Arena<A> arena(scratch);
    const Buffers b = buffers(a, arena);
    A* sums = arena.take(a.graph_columns * a.slice);
    with_positions(a.arg_size, [&](auto* null) {
      typedef std::remove_cv_t<std::remove_pointer_t<decltype(null)>> P;
      a.graph.wide ? scatter_as<int64_t, P>(a, first, last, b, sums) : scatter_as<int32_t, P>(a, first, last, b, sums);
    });
    for (int64_t node = 0; node < a.graph_columns; ++node) {
      const int64_t to = node * a.width + first;
      if (a.grad_x.bypass && is_native<A>(a.grad_x.dtype)) {
        copy_around_caches(static_cast<A*>(a.grad_x.data) + to, sums + node * a.slice, (last - first) * sizeof(A));
      } else {
        narrow(a.grad_x.data, a.grad_x.dtype, to, sums + node * a.slice, last - first);
      }
      __builtin_memset(sums + node * a.slice, 0, (last - first) * sizeof(A));
    }
    if (a.grad_x.bypass) fence_streams();
  }
};

template <class A>
ReduceKernels<A> reduce_kernels() {
  typedef ReducePasses<A> P;
  typedef ReduceGradient<A> G;
  return {P::scratch_size, P::run, P::merge, G::gather, G::merge, G::share, G::scatter};
}

template ReduceKernels<float> reduce_kernels<float>();
template ReduceKernels<double> reduce_kernels<double>();
