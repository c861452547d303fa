// Products of a few rows with a matrix: a tile of kTileRows x kTileVectors vectors of the result stays in registers
// over the whole inner dimension, so that kTileVectors loads of the matrix serve kTileRows rows. The matrix is packed
// into panels of a tile's width, or read in place if its rows are whole vectors. Included once per instruction set.

template <class A>
struct Tiles {
  static constexpr int64_t W = kWidth<A>;
  static constexpr int kTileRows = 6;
  static constexpr int kTileVectors = EDGELESS_VECTOR_BYTES == 64 ? 4 : 2;  // sums: 24 of 32 registers, 12 of 16
  static constexpr int64_t kPanel = kTileVectors * W;

  static int64_t packed_size(int64_t k, int64_t n) { return k * round_up(n, W); }

  // Packs b into consecutive panels [k, width]; the last panel is only as many vectors wide as needed.
  static void pack(const A* b, int64_t k_stride, int64_t n_stride, int64_t k, int64_t n, A* packed) {
    for (int64_t first = 0; first < n; first += kPanel) {
      const int64_t width = panel_width(n, first);
      for (int64_t i = 0; i < k; ++i) {
        for (int64_t j = 0; j < width; ++j) {
          *packed++ = first + j < n ? b[i * k_stride + (first + j) * n_stride] : A(0);
        }
      }
    }
  }

  static int64_t panel_width(int64_t n, int64_t first) {
    const int64_t left = round_up(n - first, W);
    return left < kPanel ? left : kPanel;
  }

  // Destination of a tile. The tile is stored plus a bias, or added to the values there.
  struct Store {
    A* out;
    int64_t stride, columns;  // columns: those that remain from `out` on; the last vector may be partial
    const A* bias;
    bool bypass;
  };

  // out[r, j] (+)= sum over k of a[r * a_row + k * a_step] b[k * b_step + j]
  template <int R, int V, bool Add>
  static void tile(const A* a, int64_t a_row, int64_t a_step, const A* b, int64_t b_step, int64_t k, Store to) {
    Vec<A> t[R][V] = {};
    const A* rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = a + r * a_row;
    for (int64_t i = 0, at = 0; i < k; ++i, at += a_step, b += b_step) {
      Vec<A> y[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) y[v] = load(b + v * W);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Vec<A> x = splat<A>(rows[r][at]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) t[r][v] += x * y[v];
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const int64_t left = to.columns - v * W;
      Vec<A> bias = {};
      if (to.bias) bias = left < W ? load_first(to.bias + v * W, left) : load(to.bias + v * W);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        A* out = to.out + r * to.stride + v * W;
        if (Add) {
          store(out, load(out) + t[r][v]);
        } else {
          put(out, t[r][v] + bias, left, to.bypass);
        }
      }
    }
  }

  static void put(A* out, Vec<A> x, int64_t left, bool bypass) {
    if (left < W) {
      store_first(out, x, left);
#if EDGELESS_VECTOR_BYTES >= 32 && EDGELESS_X86
    } else if (bypass && reinterpret_cast<uintptr_t>(out) % EDGELESS_VECTOR_BYTES == 0) {
#if EDGELESS_VECTOR_BYTES == 64
      _mm512_stream_ps(reinterpret_cast<float*>(out), (__m512)x);
#else
      _mm256_stream_ps(reinterpret_cast<float*>(out), (__m256)x);
#endif
#endif
    } else {
      store(out, x);
    }
  }

  template <int R, bool Add>
  static void tile_of_width(int64_t vectors, const A* a, int64_t a_row, int64_t a_step, const A* b, int64_t b_step,
                            int64_t k, Store to) {
    switch (vectors) {
      case 1: return tile<R, 1, Add>(a, a_row, a_step, b, b_step, k, to);
      case 2: return tile<R, 2, Add>(a, a_row, a_step, b, b_step, k, to);
#if EDGELESS_VECTOR_BYTES == 64
      case 3: return tile<R, 3, Add>(a, a_row, a_step, b, b_step, k, to);
      default: return tile<R, 4, Add>(a, a_row, a_step, b, b_step, k, to);
#endif
    }
  }

  // Multiplies n rows of a with one panel.
  template <bool Add>
  static void panel(int64_t n, int64_t width, const A* a, int64_t a_row, int64_t a_step, const A* b, int64_t b_step,
                    int64_t k, Store to) {
    const int64_t vectors = width / W;
    int64_t r = 0;
    for (; r + kTileRows <= n; r += kTileRows) {
      tile_of_width<kTileRows, Add>(vectors, a + r * a_row, a_row, a_step, b, b_step, k, to);
      to.out += kTileRows * to.stride;
    }
    for (; r < n; ++r) {
      tile_of_width<1, Add>(vectors, a + r * a_row, a_row, a_step, b, b_step, k, to);
      to.out += to.stride;
    }
  }

  // out = a b + bias for n rows. b: packed by pack(), or, if b_step is given, rows of whole vectors, b_step elements
  // apart.
  static void product(int64_t n, const A* a, int64_t a_row, const A* b, int64_t k, Store to, int64_t b_step = 0) {
    const int64_t columns = to.columns;
    for (int64_t first = 0; first < columns; first += kPanel) {
      const int64_t width = panel_width(columns, first);
      panel<false>(n, width, a, a_row, 1, b, b_step ? b_step : width, k,
                   {to.out + first, to.stride, columns - first, to.bias ? to.bias + first : nullptr, to.bypass});
      b += b_step ? width : k * width;
    }
  }

  // out += a^T b over n rows: a [n, k], b [n, columns]; the rows of b and out are padded to whole vectors.
  static void add_outer(int64_t n, const A* a, int64_t a_row, int64_t k, const A* b, int64_t b_row, A* out,
                        int64_t stride, int64_t columns) {
    for (int64_t first = 0; first < columns; first += kPanel) {
      const int64_t width = panel_width(columns, first);
      panel<true>(k, width, a, 1, a_row, b + first, b_row, n, {out + first, stride, width, nullptr, false});
    }
  }
};
