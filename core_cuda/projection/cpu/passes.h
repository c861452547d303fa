// Matrix products of many rows with a small matrix (tiles.h). Rows are copied through a block that stays in the caches.
// Included once per instruction set.

struct Projection {
  using Tile = Tiles<float>;
  static constexpr int64_t W = Tile::W;

  // Rows are first copied into a block: the product reads six rows at a time, a pattern that hardware does not
  // prefetch.
  static void copy_rows(const float* in, int64_t stride, int64_t n, int64_t width, float* out, int64_t out_stride) {
    for (int64_t r = 0; r < n; ++r) __builtin_memcpy(out + r * out_stride, in + r * stride, width * sizeof(float));
  }

  static void forward(const ProjectionArgs& args, int64_t begin, int64_t end, float* block) {
    for (int64_t row = begin; row < end; row += kProjectionRows) {
      const int64_t n = end - row < kProjectionRows ? end - row : kProjectionRows;
      copy_rows(args.x + row * args.x_stride, args.x_stride, n, args.features, block, args.block_stride);
      for (int64_t m = 0; m < args.num_maps; ++m) {
        const ProjectionMap& map = args.maps[m];
        Tile::product(n, block, args.block_stride, map.weight, args.features,
                      {map.out + row * map.width, map.width, map.width, map.bias, map.bypass});
      }
    }
    fence_streams();
  }

  // Concatenates the gradients of all maps in rows of block_stride. The padding stays zero.
  static void fill_block(const ProjectionArgs& args, int64_t row, int64_t n, float* block) {
    int64_t column = 0;
    for (int64_t m = 0; m < args.num_maps; ++m) {
      const ProjectionMap& map = args.maps[m];
      copy_rows(map.grad + row * map.grad_stride, map.grad_stride, n, map.width, block + column, args.block_stride);
      column += map.width;
    }
  }

  // Sums a block before adding it to the part's sums: shorter sums have smaller rounding errors.
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
        Tile::product(n, block, args.block_stride, args.weights, args.columns,
                      {args.grad_x + row * args.features, args.features, args.features, nullptr, args.bypass});
      }
      if (!grad_weight) continue;
      const float* x = args.x + row * args.x_stride;
      Tile::add_outer(n, x, args.x_stride, args.features, block, args.block_stride, grad_weight, args.block_stride,
                      args.columns);
    }
    fence_streams();
  }
};

ProjectionKernels projection_kernels() {
  return {Tiles<float>::packed_size, Tiles<float>::pack, Projection::forward, Projection::backward};
}
