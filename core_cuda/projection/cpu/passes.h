// Matrix products of many rows with a small matrix. A tile of kTileRows x kTileVectors vectors of the result stays in
// registers over the whole inner dimension: four loads of the matrix serve six rows. Rows go through a block that stays
// in the caches, the matrix is packed into panels as wide as a tile. Included once per instruction set.

struct Projection {
  static constexpr int64_t W = kWidth<float>;
  static constexpr int kTileRows = 6;
  static constexpr int kTileVectors = EDGELESS_VECTOR_BYTES == 64 ? 4 : 2;  // 24 of 32 registers, 12 of 16
  static constexpr int64_t kPanel = kTileVectors * W;

  static int64_t packed_size(int64_t k, int64_t n) { return k * round_up(n, W); }

  // Panels one after the other, each [k, its width]; the last is as many vectors wide as it needs.
  static void pack(const float* b, int64_t k_stride, int64_t n_stride, int64_t k, int64_t n, float* packed) {
    for (int64_t first = 0; first < n; first += kPanel) {
      const int64_t width = panel_width(n, first);
      for (int64_t i = 0; i < k; ++i) {
        for (int64_t j = 0; j < width; ++j) {
          *packed++ = first + j < n ? b[i * k_stride + (first + j) * n_stride] : 0.0f;
        }
      }
    }
  }

  static int64_t panel_width(int64_t n, int64_t first) {
    const int64_t left = round_up(n - first, W);
    return left < kPanel ? left : kPanel;
  }

  // What becomes of a tile: stored with a bias, or added to what is there.
  struct Store {
    float* out;
    int64_t stride, columns;  // columns that are left from `out` on: the last vector may hold fewer
    const float* bias;
    bool bypass;
  };

  // out[r, j] (+)= sum over k of a[r * a_row + k * a_step] b[k * b_step + j]
  template <int R, int V, bool Add>
  static void tile(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step, int64_t k, Store to) {
    Vec<float> t[R][V] = {};
    const float* rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = a + r * a_row;
    for (int64_t i = 0, at = 0; i < k; ++i, at += a_step, b += b_step) {
      Vec<float> y[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) y[v] = load(b + v * W);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Vec<float> x = splat<float>(rows[r][at]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) t[r][v] += x * y[v];
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const int64_t left = to.columns - v * W;
      Vec<float> bias = {};
      if (to.bias) __builtin_memcpy(&bias, to.bias + v * W, (left < W ? left : W) * sizeof(float));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        float* out = to.out + r * to.stride + v * W;
        if (Add) {
          store(out, load(out) + t[r][v]);
        } else {
          put(out, t[r][v] + bias, left, to.bypass);
        }
      }
    }
  }

  static void put(float* out, Vec<float> x, int64_t left, bool bypass) {
    if (left < W) {
      __builtin_memcpy(out, &x, left * sizeof(float));
    } else if (bypass && reinterpret_cast<uintptr_t>(out) % EDGELESS_VECTOR_BYTES == 0) {
#if EDGELESS_VECTOR_BYTES == 64
      _mm512_stream_ps(out, (__m512)x);
#else
      _mm256_stream_ps(out, (__m256)x);
#endif
    } else {
      store(out, x);
    }
  }

  template <int R, bool Add>
  static void tile_of_width(int64_t vectors, const float* a, int64_t a_row, int64_t a_step, const float* b,
                            int64_t b_step, int64_t k, Store to) {
    switch (vectors) {
      case 1: return tile<R, 1, Add>(a, a_row, a_step, b, b_step, k, to);
      case 2: return tile<R, 2, Add>(a, a_row, a_step, b, b_step, k, to);
#if EDGELESS_VECTOR_BYTES == 64
      case 3: return tile<R, 3, Add>(a, a_row, a_step, b, b_step, k, to);
      default: return tile<R, 4, Add>(a, a_row, a_step, b, b_step, k, to);
#endif
    }
  }

  // One panel for n rows of a.
  template <bool Add>
  static void panel(int64_t n, int64_t width, const float* a, int64_t a_row, int64_t a_step, const float* b,
                    int64_t b_step, int64_t k, Store to) {
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

  // out = a b + bias for n rows, with b as pack() leaves it.
  static void product(int64_t n, const float* a, int64_t a_row, const float* b, int64_t k, Store to) {
    const int64_t columns = to.columns;
    for (int64_t first = 0; first < columns; first += kPanel) {
      const int64_t width = panel_width(columns, first);
      panel<false>(n, width, a, a_row, 1, b, width, k,
                   {to.out + first, to.stride, columns - first, to.bias ? to.bias + first : nullptr, to.bypass});
      b += k * width;
    }
  }

  // Rows go into a block first: six rows at a time are no stream that the hardware would fetch ahead.
  static void copy_rows(const float* in, int64_t stride, int64_t n, int64_t width, float* out, int64_t out_stride) {
    for (int64_t r = 0; r < n; ++r) __builtin_memcpy(out + r * out_stride, in + r * stride, width * sizeof(float));
  }

  static void forward(const ProjectionArgs& args, int64_t begin, int64_t end, float* block) {
    for (int64_t row = begin; row < end; row += kProjectionRows) {
      const int64_t n = end - row < kProjectionRows ? end - row : kProjectionRows;
      copy_rows(args.x + row * args.x_stride, args.x_stride, n, args.features, block, args.block_stride);
      for (int64_t m = 0; m < args.num_maps; ++m) {
        const ProjectionMap& map = args.maps[m];
        product(n, block, args.block_stride, map.weight, args.features,
                {map.out + row * map.width, map.width, map.width, map.bias, map.bypass});
      }
    }
    fence_streams();
  }

  // The gradients of all maps side by side in rows of block_stride; what pads a row stays zero.
  static void fill_block(const ProjectionArgs& args, int64_t row, int64_t n, float* block) {
    int64_t column = 0;
    for (int64_t m = 0; m < args.num_maps; ++m) {
      const ProjectionMap& map = args.maps[m];
      copy_rows(map.grad + row * map.grad_stride, map.grad_stride, n, map.width, block + column, args.block_stride);
      column += map.width;
    }
  }

  // A block's sums first, then the part's: shorter sums are rounded less.
  static void add_columns(const ProjectionArgs& args, int64_t n, const float* block, float* sums) {
    for (int64_t j = 0; j < args.columns; j += W) {
      Vec<float> t = {};
      for (int64_t r = 0; r < n; ++r) t += load(block + r * args.block_stride + j);
      store(sums + j, load(sums + j) + t);
    }
  }

  static void backward(const ProjectionArgs& args, int64_t begin, int64_t end, float* grad_weight, float* grad_bias,
                       float* block) {
    for (int64_t row = begin; row < end; row += kProjectionRows) {
      const int64_t n = end - row < kProjectionRows ? end - row : kProjectionRows;
      fill_block(args, row, n, block);
      if (grad_bias) add_columns(args, n, block, grad_bias);
      if (args.weights) {
        product(n, block, args.block_stride, args.weights, args.columns,
                {args.grad_x + row * args.features, args.features, args.features, nullptr, args.bypass});
      }
      if (!grad_weight) continue;
      const float* x = args.x + row * args.x_stride;
      for (int64_t first = 0; first < args.columns; first += kPanel) {
        const int64_t width = panel_width(args.columns, first);
        panel<true>(args.features, width, x, 1, args.x_stride, block + first, args.block_stride, n,
                    {grad_weight + first, args.block_stride, width, nullptr, false});
      }
    }
    fence_streams();
  }
};

ProjectionKernels projection_kernels() {
  return {Projection::packed_size, Projection::pack, Projection::forward, Projection::backward};
}
