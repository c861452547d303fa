// Typed GEMM and what is composed of it: see TypedKernels in args.h. Entries of one type go through a block of
// kTypedRows rows. Each row of a block is a copy of a node's row or the sum over a segment's edges, and the block is
// multiplied by the type's weight while it is in the cache. Included once per instruction set.

template <class A>
struct TypedPasses {
  using Tile = Tiles<A>;
  using Sums = SpmmPasses<A>;
  static constexpr int64_t W = kWidth<A>;
  static constexpr int64_t kRows = kTypedRows;

  static int64_t node(const TypedArgs<A>& a, int64_t entry) {
    if (!a.rows) return entry;
    return a.wide ? static_cast<const int64_t*>(a.rows)[entry] : static_cast<const int32_t*>(a.rows)[entry];
  }

  // Row stride of a block. It leaves room for a tile beyond the last column, and is an odd number of cache lines, so
  // that rows spread over all sets of a cache.
  static int64_t block_stride(int64_t width) {
    constexpr int64_t line = 64 / sizeof(A);
    return ((width + Tile::kTileRows + W + line - 1) / line | 1) * line;
  }

  // Rounds up to whole tiles: surplus rows cost less than the last rows would one by one.
  static int64_t whole_tiles(int64_t n) { return n < 2 ? n : round_up(n, Tile::kTileRows); }

  static int64_t scratch_size(const TypedArgs<A>& a) {
    const int64_t blocks = kRows * (block_stride(a.in) + block_stride(a.out));
    const int64_t matrix = a.blocks * outer_size(a);
    return blocks + matrix + (a.sum.x ? Sums::scratch_size(a.sum) : 0) + 1024;
  }

  static int64_t outer_size(const TypedArgs<A>& a) {
    return round_up(a.in / a.blocks, Tile::kTileRows) * round_up(a.out / a.blocks, W);
  }

  struct Room {
    A *left, *right, *matrix;
    A* row;  // a gathered row as type A, if its dtype is another

    Room(const TypedArgs<A>& a, A* scratch) {
      Arena<A> arena(scratch);
      left = arena.take(kRows * block_stride(a.in));
      right = arena.take(kRows * block_stride(a.out));
      matrix = arena.take(a.blocks * outer_size(a));
      row = arena.take(a.sum.width);
    }
  };

  static void fill_rows(const TypedArgs<A>& a, const Rows& from, int64_t width, int64_t begin, int64_t n, A* block,
                        int64_t stride) {
    for (int64_t i = 0; i < n; ++i) {
      A* to = block + i * stride;
      const A* row = row_of(from, node(a, begin + i), 1, width, width, to);
      if (row != to) __builtin_memcpy(to, row, width * sizeof(A));
    }
  }

  // Fills a block with the sums over the edges of n segments.
  static void fill_sums(const TypedArgs<A>& a, int64_t begin, int64_t n, A* block, int64_t stride) {
    const Compressed& g = a.sum.graph;
    int64_t first = g.row_begin(begin);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t last = g.row_begin(begin + i + 1);
      Sums::sum_edges(a.sum, first, last, A(1), block + i * stride);
      first = last;
    }
  }

  static int64_t at_once(int64_t left) { return left < kRows ? left : kRows; }

  // Returns whether the nodes of n entries are consecutive.
  static bool in_order(const TypedArgs<A>& a, int64_t begin, int64_t n) {
    if (!a.rows) return true;
    const int64_t first = node(a, begin);
    for (int64_t i = 1; i < n; ++i) {
      if (node(a, begin + i) != first + i) return false;
    }
    return true;
  }

  // Returns a pointer to a row, and so to those after it, if they can be read in place as type A; else null.
  static const A* row_in_place(const Rows& from, int64_t row) {
    return is_native<A>(from.dtype) ? static_cast<const A*>(from.data) + row * from.stride : nullptr;
  }

  // Returns a pointer to the sums of n segments if these are consecutive rows of sum.x, since each segment has one edge
  // without a weight; else null.
  static const A* sums_in_place(const TypedArgs<A>& a, int64_t begin, int64_t n) {
    const Compressed& g = a.sum.graph;
    if (a.sum.weight) return nullptr;
    const int64_t edge = g.row_begin(begin), first = g.index(edge);
    if (g.row_begin(begin + n) != edge + n) return nullptr;
    for (int64_t i = 1; i < n; ++i) {
      if (g.row_begin(begin + i) != edge + i || g.index(edge + i) != first + i) return nullptr;
    }
    return row_in_place(a.sum.x, first);
  }

  // Pointers to rows that are read in place, and to their products if these are written in place. null: they go through
  // a block, which has room for whole tiles.
  struct Places {
    const A* from;
    A* to;
    int64_t n;

    // In place, a partial tile would read and write beyond the rows.
    Places(const A* rows, A* products, int64_t most) : from(rows), to(products), n(most) {
      if (!from && !to) return;
      if (n < Tile::kTileRows) {
        from = nullptr, to = nullptr;
      } else {
        n -= n % Tile::kTileRows;
      }
    }
  };

  // to [n, out] = rows [n, in] times the weight of a type.
  static void multiply(const TypedArgs<A>& a, int64_t type, int64_t n, const A* rows, int64_t row, A* to,
                       int64_t stride) {
    const int64_t in = a.in / a.blocks, out = a.out / a.blocks;
    for (int64_t b = 0; b < a.blocks; ++b) {
      Tile::product(whole_tiles(n), rows + b * in, row, a.weight + type * a.weight_type + b * a.weight_block, in,
                    {to + b * out, stride, out, a.bias ? a.bias + type * a.out + b * out : nullptr, false},
                    a.weight_step);
    }
  }

  static void product(const TypedArgs<A>& a, const TypedRun& run, A* scratch) {
    Room room(a, scratch);
    const int64_t in = block_stride(a.in), out = block_stride(a.out);
    for (int64_t i = run.begin, n; i < run.end; i += n) {
      n = at_once(run.end - i);
      const bool ordered = in_order(a, i, n), native = is_native<A>(a.result.dtype);
      A* result = ordered && native ? static_cast<A*>(a.result.data) + node(a, i) * a.out : nullptr;
      const Places at(ordered ? row_in_place(a.x, node(a, i)) : nullptr, result, n);
      n = at.n;
      if (!at.from) fill_rows(a, a.x, a.in, i, n, room.left, in);
      multiply(a, run.type, n, at.from ? at.from : room.left, at.from ? a.x.stride : in, at.to ? at.to : room.right,
               at.to ? a.out : out);
      for (int64_t r = 0; r < n && !at.to; ++r) {
        narrow(a.result.data, a.result.dtype, node(a, i + r) * a.out, room.right + r * out, a.out);
      }
    }
  }

  static void add_row(A* to, const A* row, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, load(to + i) + load(row + i));
    if (i < n) store_first(to + i, load_first(to + i, n - i) + load_first(row + i, n - i), n - i);
  }

  // Returns whether every row of a part has one segment, and these are in the order of the rows, as they are if every
  // row of the result is a unique (node, relation).
  static bool one_segment_each(const TypedArgs<A>& a, const int64_t* begins, const int64_t* ends) {
    if (begins[1] || ends[1]) return false;
    int64_t row = begins[0];
    for (int64_t type = 0; type < a.types; ++type) {
      for (int64_t i = begins[2 + type]; i < ends[2 + type]; ++i) {
        if (node(a, i) != row++) return false;
      }
    }
    return row == ends[0];
  }

  static void sum_products(const TypedArgs<A>& a, int64_t part, A* scratch) {
    Room room(a, scratch);
    const int64_t in = block_stride(a.in), out = block_stride(a.out);
    const int64_t *begins = a.parts + part * (2 + a.types), *ends = begins + 2 + a.types;
    const int64_t first = begins[1] ? begins[0] : -1, last = ends[1] ? ends[0] : -1;
    const bool once = one_segment_each(a, begins, ends);
    A* carry = a.carry + part * 2 * a.out;
    if (!once) __builtin_memset(a.totals + begins[0] * a.out, 0, (ends[0] - begins[0]) * a.out * sizeof(A));
    for (int64_t type = 0; type < a.types; ++type) {
      for (int64_t i = begins[2 + type], n; i < ends[2 + type]; i += n) {
        n = at_once(ends[2 + type] - i);
        const Places at(sums_in_place(a, i, n), once ? a.totals + node(a, i) * a.out : nullptr, n);
        n = at.n;
        if (!at.from) fill_sums(a, i, n, room.left, in);
        multiply(a, type, n, at.from ? at.from : room.left, at.from ? a.sum.x.stride : in, at.to ? at.to : room.right,
                 at.to ? a.out : out);
        for (int64_t r = 0; r < n && !at.to; ++r) {
          const int64_t row = node(a, i + r);
          A* to = row == first ? carry : row == last ? carry + a.out : a.totals + row * a.out;
          if (once) {
            __builtin_memcpy(to, room.right + r * out, a.out * sizeof(A));
          } else {
            add_row(to, room.right + r * out, a.out);
          }
        }
      }
    }
  }

  static void outer(const TypedArgs<A>& a, const TypedRun& run, A* target, A* scratch) {
    Room room(a, scratch);
    const int64_t left = block_stride(a.in), right = block_stride(a.out);
    const int64_t in = a.in / a.blocks, out = a.out / a.blocks, step = round_up(out, W), size = outer_size(a);
    const bool whole = out % W == 0;  // else vectors would read beyond a row
    __builtin_memset(room.matrix, 0, a.blocks * size * sizeof(A));
    for (int64_t i = run.begin; i < run.end; i += kRows) {
      const int64_t n = at_once(run.end - i);
      fill_rows(a, a.x, a.in, i, n, room.left, left);
      const Rows& other = a.sums ? a.sum.x : a.other;
      const A* rows = nullptr;
      if (whole && a.sums) rows = sums_in_place(a, i, n);
      if (whole && !a.sums && in_order(a, i, n)) rows = row_in_place(a.other, node(a, i));
      if (!rows && a.sums) fill_sums(a, i, n, room.right, right);
      if (!rows && !a.sums) fill_rows(a, a.other, a.out, i, n, room.right, right);
      for (int64_t b = 0; b < a.blocks; ++b) {
        Tile::add_outer(n, room.left + b * in, left, whole_tiles(in), (rows ? rows : room.right) + b * out,
                        rows ? other.stride : right, room.matrix + b * size, step, out);
      }
    }
    for (int64_t b = 0; b < a.blocks; ++b) {
      for (int64_t k = 0; k < in; ++k, target += out) {
        __builtin_memcpy(target, room.matrix + b * size + k * step, out * sizeof(A));
      }
    }
  }

  static void sampled(const TypedArgs<A>& a, const TypedRun& run, A* scratch) {
    Room room(a, scratch);
    const int64_t in = block_stride(a.in), out = block_stride(a.out);
    const Compressed& g = a.sum.graph;
    for (int64_t i = run.begin; i < run.end; i += kRows) {
      const int64_t n = at_once(run.end - i);
      fill_rows(a, a.x, a.in, i, n, room.left, in);
      multiply(a, run.type, n, room.left, in, room.right, out);
      for (int64_t r = 0; r < n; ++r) {
        const int64_t last = g.row_begin(i + r + 1);
        for (int64_t edge = g.row_begin(i + r); edge < last; ++edge) {
          Sums::prefetch_row(a.sum, edge);
          const A* row = row_of(a.sum.x, g.index(edge), 1, a.out, a.out, room.row);
          a.products[g.edge_id(edge)] = Sums::dot(room.right + r * out, row, 0, a.out);
        }
      }
    }
  }
};

template <class A>
TypedKernels<A> typed_kernels() {
  using P = TypedPasses<A>;
  return {Tiles<A>::packed_size, Tiles<A>::pack, kWidth<A>, P::scratch_size, P::product,
          P::sum_products,       P::outer,       P::sampled};
}

template TypedKernels<float> typed_kernels<float>();
template TypedKernels<double> typed_kernels<double>();
