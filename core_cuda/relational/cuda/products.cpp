// Launches the kernels of product.cuh, outer.cuh and any_product.cuh.
#include <algorithm>

#include "../../common/kernel_types.h"
#include "../../jit/launch.h"
#include "expression.h"
#include "geometry.h"
#include "kernels.h"

namespace edgeless::cuda::relational {
namespace {

constexpr int kMostOfGrid = 65535;  // maximum size of a grid's second dimension

constexpr int64_t tiles_of(int64_t size, int tile) { return (size + tile - 1) / tile; }

// A grid of the chunks of entries, the tiles of a matrix and the blocks of columns.
jit::Size outer_grid(const OuterArgs& args, int tile) {
  return {num_tiles(args.entries.count, args.entries.types, args.chunk),
          tiles_of(args.rows, tile) * tiles_of(args.columns, tile), args.blocks};
}

void add_chunks(Storage storage, const OuterArgs& args, const jit::Queue& queue) {
  const int64_t size = static_cast<int64_t>(args.blocks) * args.rows * args.columns;
  const jit::Size grid(tiles_of(size, any_product::kAddThreads), std::min(args.entries.types, kMostOfGrid));
  const jit::Expression kernel(kAnyProductHeader, "relational::any_product::add_chunks_kernel", {type_of(storage)});
  jit::launch(queue, kernel, {grid, any_product::kAddThreads}, args);
}

}  // namespace

void run_product(Storage storage, const ProductArgs& args, const jit::Queue& queue) {
  const int size = size_of(storage), sides = product::sides(size, args.columns);
  const int64_t down = num_tiles(args.entries.count, args.entries.types, args.share);
  const jit::Size grid(down * tiles_of(args.columns, 8 * sides), args.blocks);
  const jit::Expression kernel = product_expression(storage, args.columns, args.transposed);
  jit::launch(queue, kernel, {grid, product::kThreads, product::shared_bytes(size, args.depth, sides)}, args);
}

void run_outer(Storage storage, const OuterArgs& args, const jit::Queue& queue) {
  const jit::Shape shape{outer_grid(args, outer::kSize), outer::kThreads, outer::kSharedBytes};
  jit::launch(queue, outer_expression(storage), shape, args);
  add_chunks(storage, args, queue);
}

void run_any_product(Storage storage, const ProductArgs& args, const jit::Queue& queue) {
  using any_product::kDown, any_product::kTile;
  const int64_t down = num_tiles(args.entries.count, args.entries.types, kTile);
  const jit::Size grid(down * tiles_of(args.columns, kTile), args.blocks);
  jit::launch(queue, any_product_expression(storage), {grid, {kTile, kDown}}, args);
}

void run_any_outer(Storage storage, const OuterArgs& args, const jit::Queue& queue) {
  using any_product::kDown, any_product::kTile;
  jit::launch(queue, any_outer_expression(storage), {outer_grid(args, kTile), {kTile, kDown}}, args);
  add_chunks(storage, args, queue);
}

}  // namespace edgeless::cuda::relational
