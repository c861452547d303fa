// Elementwise minimum or maximum over the in-neighbors, with the position of the extremum within its row.
//
// The forward runs over merge-path parts (partition.h). The outer loop is over columns, the inner one over edges: the
// best values of up to eight vectors and their positions stay in registers for a whole row, or for 256 edges of a
// longer one. Where parts share a row, each writes its state to the fix-up workspace `carry`, and merge() combines the
// states in the order of the parts, so the first of equal values wins, as in a serial loop. NaN beats every number: a
// segment that may contain one is processed again with NaN-aware comparisons. The gradient is in gradient.h. Included
// once per instruction set.

template <class A>
struct ReducePasses {
  static constexpr int64_t W = kWidth<A>;
  static constexpr int kMost = EDGELESS_VECTOR_BYTES == 64 ? 8 : 4;  // vectors at a time, limited by registers
  typedef typename ExpTraits<A>::Int Int;
  typedef IntVec<A> IVec;

  // The extremum of every column. Columns after the last whole vector are computed in one more vector that ends with
  // the row, overlapping the one before; settle() moves them to their columns.
  struct State {
    A* best;   // [padded]
    Int* arg;  // [padded]
    Int ties;
  };

  // Additional results of a pass: none, which is enough without a gradient; the positions of the extrema; or their
  // positions and ties.
  enum class Track { none, positions, ties };

  struct Seen {
    Vec<A> nan = {};  // NaN once a NaN or an infinity was seen
    IVec tie = {};    // nonzero if a tie was seen, perhaps of a value that is beaten later
  };

  static int64_t padded(const ReduceArgs& a) { return round_up(a.width, W); }

  static int64_t scratch_size(const ReduceArgs& a) { return 6 * (padded(a) + 64) + a.graph_columns * a.slice + 64; }

  static bool beats(const ReduceArgs& a, A x, A best) {
    if (best != best) return false;
    return (a.is_min ? x < best : x > best) || x != x;
  }

  // Reduces NV vectors over n edges into best_out and arg_out. `position` is the position of the first edge within its
  // row; `known` is the number of valid offsets, for prefetches. Fresh: the first edge initializes the state.
  template <int NV, bool Min, Track kTrack, bool Careful, bool Fresh, class S>
  static void block(const S* columns, const int64_t* offset, int64_t n, int64_t known, Int position, A* best_out,
                    Int* arg_out, Seen& seen) {
    constexpr int NN = NV < 4 ? NV : 4;
    Vec<A> best[NV], nan[NN] = {};
    IVec arg[NV], tie[NN] = {};
    const Vec<A> zero = {};
    IVec here = IVec{} + position;
    const int64_t last = known - 1;
    int64_t e = 0;
    if (Fresh) {
      prefetch_range(columns + offset[last < kAhead ? last : kAhead], NV * W * sizeof(S));
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) {
        best[v] = Stored<A, S>::vector(columns + offset[0] + v * W);
        if (!Careful) nan[v % NN] += best[v] * zero;
        if (kTrack != Track::none) arg[v] = here;
      }
      here += 1;
      e = 1;
    } else {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) {
        best[v] = load(best_out + v * W);
        if (kTrack != Track::none) __builtin_memcpy(&arg[v], arg_out + v * W, sizeof(IVec));
      }
    }
    for (; e < n; ++e) {
      const S* row = columns + offset[e];
      prefetch_range(columns + offset[e + kAhead < last ? e + kAhead : last], NV * W * sizeof(S));
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) {
        const Vec<A> x = Stored<A, S>::vector(row + v * W);
        if (kTrack == Track::ties) tie[v % NN] = x == best[v] ? ~IVec{} : tie[v % NN];
        if (Careful) {
          const IVec win = ~(Min ? x >= best[v] : x <= best[v]) & (best[v] == best[v]);  // NaN wins and stays
          best[v] = win ? x : best[v];
          if (kTrack != Track::none) arg[v] = win ? here : arg[v];
        } else {
          const IVec win = Min ? x < best[v] : x > best[v];
          best[v] = win ? x : best[v];
          if (kTrack != Track::none) arg[v] = win ? here : arg[v];
          nan[v % NN] += x * zero;
        }
      }
      here += 1;
    }
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      store(best_out + v * W, best[v]);
      if (kTrack != Track::none) __builtin_memcpy(arg_out + v * W, &arg[v], sizeof(IVec));
    }
#pragma GCC unroll 4
    for (int v = 0; v < NN; ++v) {
      seen.nan += nan[v];
      seen.tie |= tie[v];
    }
  }

  template <bool Min, Track kTrack, bool Careful, bool Fresh, class S>
  static void columns(const ReduceArgs& a, const int64_t* offset, int64_t n, int64_t known, Int position, State& s,
                      Seen& seen) {
    const S* x = static_cast<const S*>(a.x.data);
    const int64_t whole = a.width / W * W;
    int64_t at = 0;
    if (!Careful) {  // rows with NaN are rare, so Careful has a single-vector loop only, to save code size
      for (; at + kMost * W <= whole; at += kMost * W) {
        block<kMost, Min, kTrack, Careful, Fresh>(x + at, offset, n, known, position, s.best + at, s.arg + at, seen);
      }
      if (kMost > 4 && at + 4 * W <= whole) {
        block<4, Min, kTrack, Careful, Fresh>(x + at, offset, n, known, position, s.best + at, s.arg + at, seen);
        at += 4 * W;
      }
      if (at + 2 * W <= whole) {
        block<2, Min, kTrack, Careful, Fresh>(x + at, offset, n, known, position, s.best + at, s.arg + at, seen);
        at += 2 * W;
      }
    }
    for (; at < a.width; at += W) {
      const S* from = x + (at < whole ? at : a.width - W);
      block<1, Min, kTrack, Careful, Fresh>(from, offset, n, known, position, s.best + at, s.arg + at, seen);
    }
  }

  static void settle(const ReduceArgs& a, State& s) {
    const int64_t whole = a.width / W * W, shift = whole + W - a.width;
    if (whole == 0) return;
    for (int64_t i = whole; i < a.width; ++i) {
      s.best[i] = s.best[i + shift];
      s.arg[i] = s.arg[i + shift];
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
      s.arg[i] = 0;  // also correct for a row whose values all equal this infinity
    }
    s.ties = 0;
  }

  template <class S>
  static void locate(const ReduceArgs& a, int64_t begin, int64_t n, Upcoming& next) {
    next.reach(a.graph, begin, n, [&](int64_t first, int64_t count) {
      load_nodes(a.graph, first, count, next.offset);
      for (int64_t e = 0; e < count; ++e) next.offset[e] *= a.x.stride;
    });
  }

  template <bool Min, Track kTrack, bool Careful, class S>
  static void walk(const ReduceArgs& a, const Segment& segment, Upcoming& next, State& s, Seen& seen) {
    const int64_t row_begin = a.graph.row_begin(segment.row);
    for (int64_t begin = segment.begin; begin < segment.end; begin += Upcoming::kSize) {
      const int64_t n = segment.end - begin < Upcoming::kSize ? segment.end - begin : Upcoming::kSize;
      locate<S>(a, begin, n, next);
      const int64_t* offset = next.offset + (begin - next.first);
      const Int position = static_cast<Int>(begin - row_begin);
      if (begin == segment.begin) {
        columns<Min, kTrack, Careful, true, S>(a, offset, n, next.end - begin, position, s, seen);
      } else {
        columns<Min, kTrack, Careful, false, S>(a, offset, n, next.end - begin, position, s, seen);
      }
    }
  }

  // Segments of rows narrower than one vector.
  static void narrow_segment(const ReduceArgs& a, const Segment& segment, State& s, A* buffer) {
    const int64_t row_begin = a.graph.row_begin(segment.row);
    for (int64_t p = segment.begin; p < segment.end; ++p) {
      const A* row = row_of(a.x, a.graph.index(p), 1, a.width, a.width, buffer);
      for (int64_t i = 0; i < a.width; ++i) take(a, s, i, row[i], static_cast<Int>(p - row_begin));
    }
  }

  template <bool Min, Track kTrack, class S>
  static void run_as(const ReduceArgs& a, int64_t part, A* scratch) {
    Arena<A> arena(scratch);
    State s{arena.take(padded(a)), reinterpret_cast<Int*>(arena.take(padded(a))), 0};
    A* buffer = arena.take(padded(a));
    Upcoming next;
    Walk walk_over(a.graph, a.items_per_part, part);
    Segment segment;
    while (walk_over.next(&segment)) {
      if (segment.begin == segment.end || a.width < W) {
        clear(a, s);
        narrow_segment(a, segment, s, buffer);
      } else {
        Seen seen;
        walk<Min, kTrack, false, S>(a, segment, next, s, seen);
        if (any_bit(seen.nan != seen.nan)) {
          seen.tie = IVec{};
          walk<Min, kTrack, true, S>(a, segment, next, s, seen);
        }
        s.ties = kTrack == Track::ties && any_bit(seen.tie);
        settle(a, s);
      }
      if (segment.fresh && segment.finished) {
        finish(a, segment.row, s, buffer);
      } else {
        State kept = slot(a, part, segment.fresh ? 1 : 0);
        for (int64_t i = 0; i < a.width; ++i) {
          kept.best[i] = s.best[i];
          kept.arg[i] = s.arg[i];
        }
        *slot_ties(a, kept) = s.ties;
      }
    }
    if (a.out.bypass) fence_streams();
  }

  template <bool Min, class S>
  static void run_tracking(const ReduceArgs& a, Track track, int64_t part, A* scratch) {
    if (track == Track::none) return run_as<Min, Track::none, S>(a, part, scratch);
    if (track == Track::ties) return run_as<Min, Track::ties, S>(a, part, scratch);
    run_as<Min, Track::positions, S>(a, part, scratch);
  }

  static void run(const ReduceArgs& a, int64_t part, A* scratch) {
    with_storage<A>(a.x.dtype, [&](auto* null) {
      typedef std::remove_cv_t<std::remove_pointer_t<decltype(null)>> S;
      const Track track = !a.arg ? Track::none : a.tied ? Track::ties : Track::positions;
      a.is_min ? run_tracking<true, S>(a, track, part, scratch) : run_tracking<false, S>(a, track, part, scratch);
    });
  }

  // `buffer` has space for one row.
  static void finish(const ReduceArgs& a, int64_t row, State& s, A* buffer) {
    const bool empty = a.graph.row_begin(row) == a.graph.row_begin(row + 1);
    if (empty) {
      for (int64_t i = 0; i < a.width; ++i) s.best[i] = static_cast<A>(a.fill);
    }
    write_row(a.out, row, 1, a.width, a.width, s.best);
    if (!a.arg) return;
    const int64_t first = row * a.width;
    with_positions(a.arg_size, [&](auto* null) {
      typedef std::remove_cv_t<std::remove_pointer_t<decltype(null)>> P;
      P* narrowed = reinterpret_cast<P*>(buffer);
      for (int64_t i = 0; i < a.width; ++i) narrowed[i] = static_cast<P>(s.arg[i]);
      P* target = static_cast<P*>(a.arg) + first;
      if (a.out.bypass) {
        copy_around_caches(target, narrowed, a.width * sizeof(P));
      } else {
        __builtin_memcpy(target, narrowed, a.width * sizeof(P));
      }
    });
    if (!a.tied) return;
    if (a.zero_shares) {
      for (int64_t i = 0; i < a.width; ++i) s.ties |= s.best[i] == A(0);
    }
    a.tied[row] = s.ties != 0 && !empty;
  }

  // A segment's state in `carry`, [part, which]: padded width of A, padded width of Int and one Int for the ties.
  static State slot(const ReduceArgs& a, int64_t part, int which) {
    const int64_t bytes = padded(a) * (sizeof(A) + sizeof(Int)) + 64;
    char* p = static_cast<char*>(a.carry) + (part * 2 + which) * bytes;
    return {reinterpret_cast<A*>(p), reinterpret_cast<Int*>(p + padded(a) * sizeof(A)), 0};
  }

  static Int* slot_ties(const ReduceArgs& a, const State& s) { return s.arg + padded(a); }

  static void merge(const ReduceArgs& a, int64_t part, A* scratch) {
    Walk walk_over(a.graph, a.items_per_part, part);
    Segment segment;
    if (!walk_over.next(&segment) || segment.fresh || !segment.finished) return;
    Arena<A> arena(scratch);
    State s{arena.take(padded(a)), reinterpret_cast<Int*>(arena.take(padded(a))), 0};
    clear(a, s);
    const int64_t first = first_part_of_row(a.graph, segment.row, a.items_per_part);
    for (int64_t p = first; p <= part; ++p) {
      const State other = slot(a, p, p == first ? 1 : 0);
      s.ties |= *slot_ties(a, other);
      for (int64_t i = 0; i < a.width; ++i) {
        take(a, s, i, other.best[i], other.arg[i]);
      }
    }
    finish(a, segment.row, s, arena.take(padded(a)));
    if (a.out.bypass) fence_streams();
  }
};
