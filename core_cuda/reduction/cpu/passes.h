// Minimum or maximum over the in-neighbours, element by element, with the position of the extremum within its row.
//
// Forward walks merge-path parts (partition.h); a row that a part does not hold whole leaves its state in `carry`, and
// merge() combines these in the order of the parts, so the first of equal values wins, as in one sweep. NaN wins over
// every number and stays. Backward scatters row by row, and threads own columns, so each element is added in one order
// whatever the number of threads. Where ties share the gradient, rows that have some are read again.
// Included once per instruction set.

template <class A>
struct ReducePasses {
  static constexpr int64_t W = kWidth<A>;
  typedef typename ExpTraits<A>::Int Int;
  typedef Int IVec __attribute__((vector_size(EDGELESS_VECTOR_BYTES)));

  struct State {
    A* best;   // [width]
    Int* arg;  // [width]
    Int ties;
  };

  static int64_t padded(const ReduceArgs& a) { return round_up(a.width, W); }

  static int64_t scratch_size(const ReduceArgs& a) { return (kChunk + 6) * padded(a) + 1024; }

  static bool beats(const ReduceArgs& a, A x, A best) {
    if (best != best) return false;
    return (a.is_min ? x < best : x > best) || x != x;
  }

  // NV vectors of best values over a chunk; `position` is that of the chunk within its row.
  template <int NV, bool Min>
  static Int block(const A* const* rows, int64_t n, int64_t at, Int position, State s) {
    Vec<A> best[NV];
    IVec arg[NV], tie[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      best[v] = load(s.best + at + v * W);
      __builtin_memcpy(&arg[v], s.arg + at + v * W, sizeof(IVec));
      tie[v] = IVec{};
    }
    for (int64_t e = 0; e < n; ++e) {
      const IVec here = IVec{} + (position + static_cast<Int>(e));
      const A* row = rows[e] + at;
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) {
        const Vec<A> x = load(row + v * W);
        const IVec win = ~(Min ? x >= best[v] : x <= best[v]) & (best[v] == best[v]);  // NaN wins and stays
        tie[v] |= x == best[v];  // maybe of a value that is beaten later: says "look again", no more
        best[v] = win ? x : best[v];
        arg[v] = win ? here : arg[v];
      }
    }
    Int any = 0;
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      store(s.best + at + v * W, best[v]);
      __builtin_memcpy(s.arg + at + v * W, &arg[v], sizeof(IVec));
      for (int64_t i = 0; i < W; ++i) any |= tie[v][i];
    }
    return any;
  }

  template <bool Min>
  static void chunk(const ReduceArgs& a, const A* const* rows, int64_t n, Int position, State& s) {
    int64_t at = 0;
    const int64_t end = a.width;
    for (; at + 4 * W <= end; at += 4 * W) s.ties |= block<4, Min>(rows, n, at, position, s);
    for (; at + W <= end; at += W) s.ties |= block<1, Min>(rows, n, at, position, s);
    for (; at < end; ++at) {
      for (int64_t e = 0; e < n; ++e) take(a, s, at, rows[e][at], position + static_cast<Int>(e));
    }
  }

  static void take(const ReduceArgs& a, State& s, int64_t at, A x, Int position) {
    if (x == s.best[at]) s.ties = 1;
    if (!beats(a, x, s.best[at])) return;
    s.best[at] = x;
    s.arg[at] = position;
  }

  static void clear(const ReduceArgs& a, State& s) {
    for (int64_t i = 0; i < a.width; ++i) {
      s.best[i] = a.is_min ? __builtin_inf() : -__builtin_inf();
      s.arg[i] = 0;  // right for a row of nothing but that infinity, too
    }
    s.ties = 0;
  }

  static void finish(const ReduceArgs& a, int64_t row, State& s) {
    if (a.graph.row_begin(row) == a.graph.row_begin(row + 1)) {
      for (int64_t i = 0; i < a.width; ++i) s.best[i] = static_cast<A>(a.fill);
    }
    narrow(a.out.data, a.out.dtype, row * a.width, s.best, a.width);
    const int64_t first = row * a.width;
    for (int64_t i = 0; i < a.width; ++i) {
      if (a.arg_size == 1) {
        static_cast<uint8_t*>(a.arg)[first + i] = static_cast<uint8_t>(s.arg[i]);
      } else if (a.arg_size == 2) {
        static_cast<uint16_t*>(a.arg)[first + i] = static_cast<uint16_t>(s.arg[i]);
      } else {
        static_cast<int32_t*>(a.arg)[first + i] = static_cast<int32_t>(s.arg[i]);
      }
    }
    if (!a.tied) return;
    if (a.zero_shares) {
      for (int64_t i = 0; i < a.width; ++i) s.ties |= s.best[i] == A(0);
    }
    a.tied[row] = s.ties != 0;
  }

  // A piece's state in `carry`: width of A, width of Int and one Int, [part, which].
  static State slot(const ReduceArgs& a, int64_t part, int which) {
    const int64_t bytes = padded(a) * (sizeof(A) + sizeof(Int)) + 64;
    char* p = static_cast<char*>(a.carry) + (part * 2 + which) * bytes;
    return {reinterpret_cast<A*>(p), reinterpret_cast<Int*>(p + padded(a) * sizeof(A)), 0};
  }

  static Int* slot_ties(const ReduceArgs& a, const State& s) { return s.arg + padded(a); }

  static void run(const ReduceArgs& a, int64_t part, A* scratch) {
    Arena<A> arena(scratch);
    A* copies = arena.take(kChunk * padded(a));
    State s{arena.take(padded(a)), reinterpret_cast<Int*>(arena.take(padded(a))), 0};
    const A* rows[kChunk];
    int64_t nodes[kChunk + kAhead], prefetched = 0;
    Walk walk(a.graph, a.items_per_part, part);
    Piece piece;
    while (walk.next(&piece)) {
      clear(a, s);
      const int64_t row_begin = a.graph.row_begin(piece.row);
      for (int64_t begin = piece.begin; begin < piece.end; begin += kChunk) {
        const int64_t n = piece.end - begin < kChunk ? piece.end - begin : kChunk;
        const int64_t known = load_nodes_ahead(a.graph, begin, n, nodes);
        const int64_t first = prefetched > begin ? prefetched - begin : 0;
        if (first < known) {
          prefetch_rows(a.x, nodes + first, known - first, a.width);
          prefetched = begin + known;
        }
        gather_rows(a.x, nodes, n, 1, a.width, a.width, copies, padded(a), rows);
        const Int position = static_cast<Int>(begin - row_begin);
        if (a.is_min) {
          chunk<true>(a, rows, n, position, s);
        } else {
          chunk<false>(a, rows, n, position, s);
        }
      }
      if (piece.fresh && piece.finished) {
        finish(a, piece.row, s);
      } else {
        State kept = slot(a, part, piece.fresh ? 1 : 0);
        for (int64_t i = 0; i < a.width; ++i) {
          kept.best[i] = s.best[i];
          kept.arg[i] = s.arg[i];
        }
        *slot_ties(a, kept) = s.ties;
      }
    }
  }

  static void merge(const ReduceArgs& a, int64_t part, A* scratch) {
    Walk walk(a.graph, a.items_per_part, part);
    Piece piece;
    if (!walk.next(&piece) || piece.fresh || !piece.finished) return;
    Arena<A> arena(scratch);
    State s{arena.take(padded(a)), reinterpret_cast<Int*>(arena.take(padded(a))), 0};
    clear(a, s);
    const int64_t first = first_part_of_row(a.graph, piece.row, a.items_per_part);
    for (int64_t p = first; p <= part; ++p) {
      const State other = slot(a, p, p == first ? 1 : 0);
      s.ties |= *slot_ties(a, other);
      for (int64_t i = 0; i < a.width; ++i) {
        take(a, s, i, other.best[i], other.arg[i]);
      }
    }
    finish(a, piece.row, s);
  }

  static int64_t arg_at(const ReduceArgs& a, int64_t i) {
    if (a.arg_size == 1) return static_cast<const uint8_t*>(a.arg)[i];
    if (a.arg_size == 2) return static_cast<const uint16_t*>(a.arg)[i];
    return static_cast<const int32_t*>(a.arg)[i];
  }

  static void backward(const ReduceArgs& a, int64_t first, int64_t last, A* scratch) {
    Arena<A> arena(scratch);
    A* grad_buffer = arena.take(padded(a));
    A* out_buffer = arena.take(padded(a));
    A* row_buffer = arena.take(padded(a));
    A* share = arena.take(padded(a));
    A* grad_x = static_cast<A*>(a.grad_x);
    for (int64_t row = 0; row < a.graph.num_rows; ++row) {
      const int64_t begin = a.graph.row_begin(row), end = a.graph.row_begin(row + 1);
      if (begin == end) continue;
      const A* grad = row_of(a.grad_out, row, 1, a.width, a.width, grad_buffer);
      if (!a.tied || !a.tied[row]) {
        for (int64_t i = first; i < last; ++i) {
          const int64_t node = a.graph.index(begin + arg_at(a, row * a.width + i));
          grad_x[node * a.width + i] += grad[i];
        }
        continue;
      }
      const A* out = row_of(a.saved_out, row, 1, a.width, a.width, out_buffer);
      for (int64_t i = first; i < last; ++i) share[i] = a.zero_shares && out[i] == A(0) ? A(1) : A(0);
      for (int64_t p = begin; p < end; ++p) {
        const A* x = row_of(a.x, a.graph.index(p), 1, a.width, a.width, row_buffer);
        for (int64_t i = first; i < last; ++i) share[i] += x[i] == out[i] ? A(1) : A(0);
      }
      for (int64_t i = first; i < last; ++i) share[i] = grad[i] / share[i];  // NaN: no value equals it
      for (int64_t p = begin; p < end; ++p) {
        const int64_t node = a.graph.index(p);
        const A* x = row_of(a.x, node, 1, a.width, a.width, row_buffer);
        A* target = grad_x + node * a.width;
        for (int64_t i = first; i < last; ++i) target[i] += x[i] == out[i] ? share[i] : A(0);
      }
    }
  }
};

template <class A>
ReduceKernels<A> reduce_kernels() {
  return {ReducePasses<A>::scratch_size, ReducePasses<A>::run, ReducePasses<A>::merge, ReducePasses<A>::backward};
}

template ReduceKernels<float> reduce_kernels<float>();
template ReduceKernels<double> reduce_kernels<double>();
