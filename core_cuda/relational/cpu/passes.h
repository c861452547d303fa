// Products of rows with the weights of their types, and what is made of them: see TypedKernels in args.h. Entries of
// one type go through a block of kTypedRows rows, in which each is a copy of a node's row or the sum over the edges of
// a piece, and the block is multiplied by the type's weight while it is in the cache. Included once per instruction
// set.

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

  // Room for a tile beyond the last column, in an odd number of cache lines: rows spread over all sets of a cache.
  static int64_t block_stride(int64_t width) {
    constexpr int64_t line = 64 / sizeof(A);
    return ((width + Tile::kTileRows + W + line - 1) / line | 1) * line;
  }

  // Whole tiles: rows beyond the last cost less than as many single ones.
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
    A* row;  // of the graph's columns, where it is not of type A

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

  // The sums over the edges of n pieces.
  static void fill_sums(const TypedArgs<A>& a, int64_t begin, int64_t n, A* block, int64_t stride) {
    const Compressed& g = a.sum.graph;
    int64_t first = g.row_begin(begin);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t last = g.row_begin(begin + i + 1);
      Sums::sum_edges(a.sum, first, last, A(1), block + i * stride);
      first = last;
    }
  }

  // to [n, out] = rows [n, in] times the weight of a type. `spare`: whether there is room for whole tiles.
  static void multiply(const TypedArgs<A>& a, int64_t type, int64_t n, const A* rows, int64_t row, A* to,
                       int64_t stride, bool spare) {
    const int64_t in = a.in / a.blocks, out = a.out / a.blocks;
    for (int64_t b = 0; b < a.blocks; ++b) {
      Tile::product(
          spare ? whole_tiles(n) : n, rows + b * in, row, a.weight + type * a.weight_type + b * a.weight_block, in,
          {to + b * out, stride, out, a.bias ? a.bias + type * a.out + b * out : nullptr, false}, a.weight_step);
    }
  }

  static void product(const TypedArgs<A>& a, const TypedRun& run, A* scratch) {
    Room room(a, scratch);
    const int64_t in = block_stride(a.in), out = block_stride(a.out);
    const bool in_place = !a.rows && is_native<A>(a.result.dtype);
    for (int64_t i = run.begin; i < run.end; i += kRows) {
      const int64_t n = run.end - i < kRows ? run.end - i : kRows;
      fill_rows(a, a.x, a.in, i, n, room.left, in);
      if (in_place) {
        multiply(a, run.type, n, room.left, in, static_cast<A*>(a.result.data) + i * a.out, a.out, false);
        continue;
      }
      multiply(a, run.type, n, room.left, in, room.right, out, true);
      for (int64_t r = 0; r < n; ++r) {
        narrow(a.result.data, a.result.dtype, node(a, i + r) * a.out, room.right + r * out, a.out);
      }
    }
  }

  static void add_row(A* to, const A* row, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, load(to + i) + load(row + i));
    if (i < n) store_first(to + i, load_first(to + i, n - i) + load_first(row + i, n - i), n - i);
  }

  static void sum_products(const TypedArgs<A>& a, int64_t part, A* scratch) {
    Room room(a, scratch);
    const int64_t in = block_stride(a.in), out = block_stride(a.out);
    const int64_t *begins = a.parts + part * (2 + a.types), *ends = begins + 2 + a.types;
    const int64_t first = begins[1] ? begins[0] : -1, last = ends[1] ? ends[0] : -1;
    A* carry = a.carry + part * 2 * a.out;
    __builtin_memset(a.totals + begins[0] * a.out, 0, (ends[0] - begins[0]) * a.out * sizeof(A));
    for (int64_t type = 0; type < a.types; ++type) {
      for (int64_t i = begins[2 + type]; i < ends[2 + type]; i += kRows) {
        const int64_t n = ends[2 + type] - i < kRows ? ends[2 + type] - i : kRows;
        fill_sums(a, i, n, room.left, in);
        multiply(a, type, n, room.left, in, room.right, out, true);
        for (int64_t r = 0; r < n; ++r) {
          const int64_t row = node(a, i + r);
          A* to = row == first ? carry : row == last ? carry + a.out : a.totals + row * a.out;
          add_row(to, room.right + r * out, a.out);
        }
      }
    }
  }

  static void outer(const TypedArgs<A>& a, const TypedRun& run, A* target, A* scratch) {
    Room room(a, scratch);
    const int64_t left = block_stride(a.in), right = block_stride(a.out);
    const int64_t in = a.in / a.blocks, out = a.out / a.blocks, step = round_up(out, W), size = outer_size(a);
    __builtin_memset(room.matrix, 0, a.blocks * size * sizeof(A));
    for (int64_t i = run.begin; i < run.end; i += kRows) {
      const int64_t n = run.end - i < kRows ? run.end - i : kRows;
      fill_rows(a, a.x, a.in, i, n, room.left, left);
      if (a.sums) {
        fill_sums(a, i, n, room.right, right);
      } else {
        fill_rows(a, a.other, a.out, i, n, room.right, right);
      }
      for (int64_t b = 0; b < a.blocks; ++b) {
        Tile::add_outer(n, room.left + b * in, left, whole_tiles(in), room.right + b * out, right,
                        room.matrix + b * size, step, out);
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
      const int64_t n = run.end - i < kRows ? run.end - i : kRows;
      fill_rows(a, a.x, a.in, i, n, room.left, in);
      multiply(a, run.type, n, room.left, in, room.right, out, true);
      for (int64_t r = 0; r < n; ++r) {
        const int64_t last = g.row_begin(i + r + 1);
        for (int64_t edge = g.row_begin(i + r); edge < last; ++edge) {
          Sums::ask_row(a.sum, edge);
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
