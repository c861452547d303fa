// Launches of the projection kernels: casts, column sums, node logits and matrix products, for which the tiling and the
// split-K are chosen here.
#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "../../common/kernel_types.h"
#include "../../jit/launch.h"
#include "columns.h"
#include "expression.h"
#include "kernels.h"
#include "tilings.h"

namespace edgeless::cuda::projection {
namespace {

constexpr int kMostCastBlocks = 2048;

// Grid of column sums whose blocks sum `columns` columns of one matrix each.
jit::Size columns_grid(const ColumnSumsArgs& args, int64_t chunks, int columns) {
  int widest = 0;
  for (int t = 0; t < args.tensors; ++t) widest = std::max(widest, args.columns[t].width);
  return {chunks, (widest + columns - 1) / columns, args.tensors};
}

void launch_sums(const char* kernel, Storage dtype, const ColumnSumsArgs& args, const jit::Size& grid, int sides,
                 const jit::Queue& queue) {
  const jit::Expression of("projection/cuda/column_sums.cuh", kernel, {type_of(dtype)});
  jit::launch(queue, of, {grid, {kLanes, sides}}, args);
}

void launch_logits(const char* kernel, Storage dtype, const LogitsArgs& args, const jit::Shape& shape,
                   const jit::Queue& queue) {
  jit::launch(queue, {"projection/cuda/node_logits.cuh", kernel, {type_of(dtype), args.fours}}, shape, args);
}

// Grid: tiles of a product, split-K parts, products.
template <class Tiling>
jit::Size product_grid(const ProductArgs& args) {
  const int64_t shares = (args.depth + args.share - 1) / args.share;
  return {Tiling::blocks(args.rows, args.columns), shares, args.products};
}

// Returns whether the product has a second pair of operands.
bool has_two(bool transposed_a, bool transposed_b, const ProductArgs& args) {
  const bool two = !transposed_a && args.more.a;
  if ((transposed_a && !transposed_b) || (two && transposed_b)) {
    throw std::logic_error("edgeless: no kernel for a product of operands that are stored this way");
  }
  return two;
}

// A backward usually follows the first product, so its kernels are compiled together with that of the forward.
void prepare_products(jit::Type tiling, const jit::Expression& first, const jit::Queue& queue) {
  if (jit::is_loaded(queue, first)) return;
  const jit::Expression few("projection/cuda/column_sums.cuh", "projection::few_rows_kernel", {kFloatType});
  const jit::Expression add("projection/cuda/column_sums.cuh", "projection::add_chunks_kernel", {kFloatType});
  jit::prepare(queue, {first, float_product_expression(tiling, true, true, false),
                       float_product_expression(tiling, false, true, false), few, add});
}

template <class Tiling>
void launch_product(jit::Type tiling, const jit::Expression& kernel, bool transposed_a, bool transposed_b,
                    const ProductArgs& args, const jit::Queue& queue) {
  prepare_products(tiling, kernel, queue);
  const int64_t bytes =
      Tiling::kStages * float_stage<Tiling>(transposed_a, transposed_b) * static_cast<int64_t>(sizeof(float));
  jit::launch(queue, kernel, {product_grid<Tiling>(args), Tiling::kThreads, bytes}, args);
}

// a is transposed if and only if the product is divided (split-K).
ProductSizes sizes_of(Storage storage, bool transposed_a, const ProductArgs& args) {
  return {storage, args.rows, args.columns, args.depth, transposed_a};
}

}  // namespace

void run_cast(Storage to, const CastArgs& args, const jit::Queue& queue) {
  int64_t most = 1;
  for (int t = 0; t < args.tensors; ++t) most = std::max(most, args.numbers[t]);
  const int64_t blocks = (most + kCastThreads * kCastPer - 1) / (kCastThreads * kCastPer);
  const jit::Size grid(std::min<int64_t>(blocks, kMostCastBlocks), args.tensors);
  const jit::Expression kernel("projection/cuda/cast.cuh", "projection::cast_kernel", {type_of(to)});
  jit::launch(queue, kernel, {grid, kCastThreads}, args);
}

void run_column_sums(Storage dtype, const ColumnSumsArgs& args, const jit::Queue& queue) {
  if (!args.partial) {
    launch_sums("projection::few_rows_kernel", dtype, args, columns_grid(args, 1, kLanes), kManySides, queue);
    return;
  }
  const jit::Size grid = columns_grid(args, args.chunks, kLanes * kPer);
  launch_sums("projection::partial_sums_kernel", dtype, args, grid, kSides, queue);
  add_chunks(dtype, args, queue);
}

void add_chunks(Storage dtype, const ColumnSumsArgs& args, const jit::Queue& queue) {
  launch_sums("projection::add_chunks_kernel", dtype, args, columns_grid(args, 1, kLanes), kSides, queue);
}

void run_logits(Storage dtype, const LogitsArgs& args, const jit::Queue& queue) {
  const int64_t threads = (args.num_rows * args.heads) << args.sub_warp_log2;
  const jit::Size grid((threads + kLogitsThreads - 1) / kLogitsThreads);
  launch_logits("projection::logits_kernel", dtype, args, {grid, kLogitsThreads}, queue);
}

void run_logit_gradients(Storage dtype, const LogitsArgs& args, const jit::Queue& queue) {
  const int width = args.heads * args.channels, columns = kLanes * kPer;
  const jit::Size grid(args.chunks, (width + columns - 1) / columns);
  launch_logits("projection::gradients_kernel", dtype, args, {grid, {kLanes, kSides}}, queue);
}

void run_half_gemm(Storage storage, bool transposed_a, bool transposed_b, const ProductArgs& args,
                   const jit::Queue& queue) {
  const bool two = has_two(transposed_a, transposed_b, args);
  const jit::Expression kernel = expression_of(sizes_of(storage, transposed_a, args), transposed_b, two);
  jit::launch(queue, kernel, {product_grid<HalfTiling>(args), HalfTiling::kThreads}, args);
}

void run_product(bool transposed_a, bool transposed_b, const ProductArgs& args, const jit::Queue& queue) {
  const bool two = has_two(transposed_a, transposed_b, args);
  const jit::Expression kernel = expression_of(sizes_of(Storage::f32, transposed_a, args), transposed_b, two);
  if (takes_wide_tiles(args.rows, args.columns, args.depth, transposed_a)) {
    launch_product<WideTiling>(kWideTiling, kernel, transposed_a, transposed_b, args, queue);
  } else {
    launch_product<SquareTiling>(kSquareTiling, kernel, transposed_a, transposed_b, args, queue);
  }
}

int64_t product_share(bool half, int64_t rows, int64_t columns, int64_t count, int64_t depth, int multiprocessors,
                      int64_t most_shares) {
  const auto share_of = [&](auto tiling) {
    using Of = decltype(tiling);
    const int64_t blocks = Of::blocks(rows, columns) * count;
    const int64_t most = std::min(most_shares, (depth + 2 * kTileDepth - 1) / (2 * kTileDepth));
    const int64_t shares = std::max<int64_t>(1, std::min(most, Of::kBlocks * multiprocessors / blocks));
    const int64_t share = (depth + shares - 1) / shares;
    return (share + kTileDepth - 1) / kTileDepth * kTileDepth;
  };
  if (half) return share_of(HalfTiling());
  return takes_wide_tiles(rows, columns, depth, true) ? share_of(WideTiling()) : share_of(SquareTiling());
}

}  // namespace edgeless::cuda::projection
