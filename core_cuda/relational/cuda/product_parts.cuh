// Fallbacks for values that are not finite, shared by both files of typed products on tensor cores.
#pragma once

#include "entries.cuh"

namespace edgeless::cuda::relational {

// split() turns an infinity into NaN (common/tf32.cuh), so results that are not finite are recomputed in float
// arithmetic.
static __device__ __noinline__ float product_in_floats(const ProductArgs& args, int64_t entry, int type, int block,
                                                       int column) {
  const float* x = static_cast<const float*>(args.x.numbers) + row_of(args.x, args.entries, entry) * args.x.stride +
                   begin_of_block(args.x, block, args.blocks, args.depth);
  const float* w = static_cast<const float*>(args.weight) + type * args.weight_type + block * args.weight_block;
  float sum = 0;
  for (int k = 0; k < args.depth; ++k) {
    sum = fmaf(x[k], w[args.transposed ? column * args.weight_row + k : k * args.weight_row + column], sum);
  }
  return sum;
}

static __device__ __noinline__ float outer_in_floats(const OuterArgs& args, const Range& range, int block, int64_t row,
                                                     int column) {
  const float* x =
      static_cast<const float*>(args.x.numbers) + begin_of_block(args.x, block, args.blocks, args.rows) + row;
  const float* y =
      static_cast<const float*>(args.y.numbers) + begin_of_block(args.y, block, args.blocks, args.columns) + column;
  float sum = 0;
  for (int64_t i = range.begin; i < range.end; ++i) {
    sum = fmaf(x[row_of(args.x, args.entries, i) * args.x.stride], y[row_of(args.y, args.entries, i) * args.y.stride],
               sum);
  }
  return sum;
}

}  // namespace edgeless::cuda::relational
