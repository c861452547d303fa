// Launches the kernels of product.cuh, outer.cuh and any_product.cuh.
#include <algorithm>

#include "../../common/kernel_types.h"
#include "../../jit/launch.h"
#include "geometry.h"
#include "kernels.h"

namespace edgeless::cuda::relational {
namespace {

constexpr int kMostOfGrid = 65535;  // in its second dimension

constexpr int64_t tiles_of(int64_t size, int tile) { return (size + tile - 1) / tile; }

// Chunks of entries, tiles of the matrices and blocks of columns.
jit::Size outer_grid(const OuterArgs& args, int tile) {
  return {num_tiles(args.entries.count, args.entries.types, args.chunk),
          tiles_of(args.rows, tile) * tiles_of(args.columns, tile), args.blocks};
}

void add_chunks(Storage storage, const OuterArgs& args, const jit::Queue& queue) {
  const int64_t size = static_cast<int64_t>(args.blocks) * args.rows * args.columns;
  const jit::Size grid(tiles_of(size, any_product::kAddThreads), std::min(args.entries.types, kMostOfGrid));
  const jit::Expression kernel("relational/cuda/any_product.cuh", "relational::any_product::add_chunks_kernel",
                               {type_of(storage)});
  jit::launch(queue, kernel, {grid, any_product::kAddThreads}, args);
}

}  // namespace

void run_product(Storage storage, const ProductArgs& args, const jit::Queue& queue) {
  const int size = size_of(storage), sides = product::sides(size, args.columns);
  const int64_t down = num_tiles(args.entries.count, args.entries.types, args.share);
  const jit::Size grid(down * tiles_of(args.columns, 8 * sides), args.blocks);
  const jit::Expression kernel("relational/cuda/product.cuh", "relational::product::product_kernel",
                               {type_of(storage), args.transposed, sides});
  jit::launch(queue, kernel, {grid, product::kThreads, product::shared_bytes(size, args.depth, sides)}, args);
}

void run_outer(Storage storage, const OuterArgs& args, const jit::Queue& queue) {
  const jit::Expression kernel("relational/cuda/outer.cuh", "relational::outer::outer_kernel", {type_of(storage)});
  jit::launch(queue, kernel, {outer_grid(args, outer::kSize), outer::kThreads, outer::kSharedBytes}, args);
  add_chunks(storage, args, queue);
}

void run_any_product(Storage storage, const ProductArgs& args, const jit::Queue& queue) {
  using any_product::kDown, any_product::kTile;
  const int64_t down = num_tiles(args.entries.count, args.entries.types, kTile);
  const jit::Size grid(down * tiles_of(args.columns, kTile), args.blocks);
  const jit::Expression kernel("relational/cuda/any_product.cuh", "relational::any_product::product_kernel",
                               {type_of(storage)});
  jit::launch(queue, kernel, {grid, {kTile, kDown}}, args);
}

void run_any_outer(Storage storage, const OuterArgs& args, const jit::Queue& queue) {
  using any_product::kDown, any_product::kTile;
  const jit::Expression kernel("relational/cuda/any_product.cuh", "relational::any_product::outer_kernel",
                               {type_of(storage)});
  jit::launch(queue, kernel, {outer_grid(args, kTile), {kTile, kDown}}, args);
  add_chunks(storage, args, queue);
}

}  // namespace edgeless::cuda::relational
