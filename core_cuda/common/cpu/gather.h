// Gathers the rows of a chunk of edges and prefetches those of the next edges. Included once per instruction set.

static constexpr int64_t kChunk = 32;

static inline int64_t round_up(int64_t n, int64_t m) { return (n + m - 1) / m * m; }

// Bump allocator over the scratch memory of a thread; allocations are multiples of 64 bytes.
template <class A>
class Arena {
 public:
  explicit Arena(A* memory) : next_(memory) {}
  A* take(int64_t n) {
    A* taken = next_;
    next_ += round_up(n, 64 / sizeof(A));
    return taken;
  }

 private:
  A* next_;
};

template <class A>
static inline void fill_up(const A** rows, int64_t n) {
  for (int64_t e = n; e < round_up(n, 4); ++e) rows[e] = rows[n - 1];
}

// Prefetch distance, in edges.
static constexpr int64_t kAhead = 24;

template <class Index>
static inline void load_nodes(const Compressed& g, int64_t begin, int64_t n, int64_t* nodes) {
  const Index* indices = static_cast<const Index*>(g.indices) + begin;
  for (int64_t e = 0; e < n; ++e) nodes[e] = indices[e];
}

static inline void load_nodes(const Compressed& g, int64_t begin, int64_t n, int64_t* nodes) {
  if (g.wide) {
    load_nodes<int64_t>(g, begin, n, nodes);
  } else {
    load_nodes<int32_t>(g, begin, n, nodes);
  }
}

// Loads the nodes of positions [begin, begin + n) and of up to kAhead more; returns the number of nodes.
static inline int64_t load_nodes_ahead(const Compressed& g, int64_t begin, int64_t n, int64_t* nodes) {
  const int64_t known = begin + n + kAhead < g.num_edges ? n + kAhead : g.num_edges - begin;
  load_nodes(g, begin, known, nodes);
  return known;
}

static constexpr int64_t size_of(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

static EDGELESS_INLINE void prefetch_range(const void* from, int64_t bytes) {
  const char* p = static_cast<const char*>(from);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
  // GCC 12 treats a function that only prefetches as one without side effects and removes its calls.
  __asm__ volatile("" : : "r"(p));
}

static inline void prefetch_rows(const Rows& rows, const int64_t* nodes, int64_t n, int64_t elements) {
  const char* base = static_cast<const char*>(rows.data);
  const int64_t bytes = elements * size_of(rows.dtype), step = rows.stride * size_of(rows.dtype);
  for (int64_t e = 0; e < n; ++e) prefetch_range(base + nodes[e] * step, bytes);
}

// Prefetches the rows of the next edges, one at a time from the loops over the current chunk. All prefetches at once
// would exceed the cache lines that a core can have in flight and stall those loops. Two streams (`Lane`) serve two
// loops; each stream prefetches a tensor of its own or half of each row.
struct Ahead {
  struct Lane {
    const char* base = nullptr;
    int64_t step = 0, bytes = 0;
    int64_t next = 0;  // index into `nodes` of the next row to prefetch
  };
  Lane lanes[2];
  const int64_t* nodes = nullptr;
  int64_t count = 0;

  void set_rows(int lane, const Rows& rows, int64_t first, int64_t elements) {
    const int64_t size = size_of(rows.dtype);
    lanes[lane].base = static_cast<const char*>(rows.data) + first * size;
    lanes[lane].step = rows.stride * size;
    lanes[lane].bytes = elements * size;
  }

  EDGELESS_INLINE void prefetch(int lane) {
    Lane& of = lanes[lane];
    if (of.next >= count) return;
    prefetch_range(of.base + nodes[of.next++] * of.step, of.bytes);
  }

  void prefetch_rest() {
    for (int lane = 0; lane < 2; ++lane) {
      while (lanes[lane].next < count) prefetch(lane);
    }
  }
};

// Functor that a loop calls once per edge to prefetch the next row of stream kLane.
template <int kLane>
struct PrefetchLane {
  Ahead* ahead;
  EDGELESS_INLINE void operator()() const { ahead->prefetch(kLane); }
};

// out[e] = a copy of the row of nodes[e], converted to A and padded to whole vectors per head.
template <class A, class S>
static inline void copy_rows(const S* base, int64_t stride, const int64_t* nodes, int64_t n, int64_t heads, int64_t dim,
                             int64_t padded, A* copies, int64_t copy_stride, const A** out) {
  constexpr int64_t W = kWidth<A>;
  if (dim == padded) dim *= heads, padded = dim, heads = 1;
  for (int64_t e = 0; e < n; ++e) {
    const S* from = base + nodes[e] * stride;
    A* to = copies + e * copy_stride;
    out[e] = to;
    for (int64_t h = 0; h < heads; ++h, from += dim, to += padded) {
      int64_t i = 0;
      for (; i + W <= dim; i += W) store(to + i, Stored<A, S>::vector(from + i));
      if (i < dim) store(to + i, Stored<A, S>::first(from + i, dim - i));
    }
  }
}

// out[e] = the row of nodes[e] as padded A: in place if it is stored so, else a copy. Copies are `copy_stride` elements
// apart, a multiple of the vector width.
template <class A>
static EDGELESS_INLINE void gather_rows(const Rows& rows, const int64_t* nodes, int64_t n, int64_t heads, int64_t dim,
                                        int64_t padded, A* copies, int64_t copy_stride, const A** out) {
  if (is_native<A>(rows.dtype) && dim == padded) {
    const A* base = static_cast<const A*>(rows.data);
    for (int64_t e = 0; e < n; ++e) out[e] = base + nodes[e] * rows.stride;
  } else {
    with_storage<A>(rows.dtype, [&](auto* base) {
      base = static_cast<decltype(base)>(rows.data);
      copy_rows(base, rows.stride, nodes, n, heads, dim, padded, copies, copy_stride, out);
    });
  }
  fill_up(out, n);
}
