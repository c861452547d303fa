// Launches the kernels whose arguments are in segment_tiles.h.
#include "segment_tiles.h"

#include <algorithm>

#include "../../common/kernel_types.h"
#include "../../common/thresholds.h"
#include "../../jit/launch.h"
#include "expression.h"
#include "geometry.h"
#include "short_segments.h"

namespace edgeless::cuda::relational {
namespace {

constexpr int kManyThreads = 1 << 18;  // about as many as a device runs at a time

// Bytes of shared memory of a kernel with tiles of this shape.
template <template <class, int, int> class Layout, class S>
int bytes_of(const TileShape& shape) {
  if (shape.width == 32) return Layout<S, 32, kWarpColumns<32>>::kBytes;
  if (shape.width == 128) return Layout<S, 128, kWarpColumns<128>>::kBytes;
  return shape.columns == kFewColumns ? Layout<S, 64, kFewColumns>::kBytes : Layout<S, 64, kWarpColumns<64>>::kBytes;
}
template <template <class, int, int> class Layout>
int shared_bytes(Storage storage, const TileShape& shape) {
  return storage == Storage::f32 ? bytes_of<Layout, float>(shape) : bytes_of<Layout, uint16_t>(shape);
}

template <class S, int kWidth, int kColumns>
using TwiceRowSums = RowSumsLayout<S, kWidth, kColumns, true>;
template <class S, int kWidth, int kColumns>
using OnceRowSums = RowSumsLayout<S, kWidth, kColumns, false>;

// The weights of a kernel of short segments: none, by id, or the one other kind that it is compiled for.
Weights weights_of(const Neighbors& of, Weights other) {
  if (of.ids) return Weights::by_id;
  return of.weights || of.of_segments ? other : Weights::none;
}

int64_t num_blocks(const SegmentTiles& segments, int share) { return num_tiles(segments.count, segments.types, share); }

constexpr int64_t blocks_of_rows(int64_t rows, int64_t of_block) { return (rows + of_block - 1) / of_block; }

}  // namespace

void run_segment_products(Storage storage, const SegmentProductsArgs& args, const jit::Queue& queue) {
  const TileShape tile = tile_shape(storage, std::max(args.in_width, args.out_width), args.few);
  const jit::Expression kernel = segment_products_expression(storage, tile);
  const int bytes = shared_bytes<ProductsLayout>(storage, tile);
  jit::launch(queue, kernel, {num_blocks(args.segments, args.share), tile.threads(), bytes}, args);
}

int64_t short_products_scratch(const SegmentProductsArgs& args) {
  const int64_t chunks = num_blocks(args.segments, args.share) + 2;  // + 2: the end mark and `taken`
  return args.segments.types * int64_t{part_vectors(kMostShortWidth)} * 16 + chunks * 16;
}

void run_short_products(const SegmentProductsArgs& args, void* memory, int processors, const jit::Queue& queue) {
  const int width = short_width(args.in_width, args.out_width);
  const int types = args.segments.types, num_chunks = static_cast<int>(num_blocks(args.segments, args.share));
  const ShortScratch scratch = short_scratch(memory, types, width, num_chunks);
  jit::launch(queue, {kShortSegmentsHeader, "relational::prepare_products_kernel", {width}},
              {types + num_chunks / kPartThreads + 1, kPartThreads}, args, scratch, num_chunks);
  const jit::Expression kernel =
      short_products_expression(args.in_width, args.out_width, weights_of(args.neighbors, Weights::of_segments));
  const int blocks = std::min(ShortProducts::kBlocks * processors, num_chunks);
  jit::launch(queue, kernel, {blocks, ShortProducts::kThreads, short_products_bytes(width)}, args, scratch, num_chunks);
}

void run_segment_gradients(Storage storage, const SegmentGradientsArgs& args, const jit::Queue& queue) {
  const TileShape tile = tile_shape(storage, std::max(args.in_width, args.out_width), args.few);
  const jit::Expression kernel = segment_gradients_expression(storage, tile);
  const int bytes = shared_bytes<GradientsLayout>(storage, tile);
  jit::launch(queue, kernel, {num_blocks(args.segments, args.share), tile.threads(), bytes}, args);
}

int64_t short_gradients_scratch(const SegmentGradientsArgs& args) {
  return args.segments.types * int64_t{part_vectors(kMostShortWidth)} * 16;
}

void run_short_gradients(const SegmentGradientsArgs& args, void* parts, const jit::Queue& queue) {
  if (args.out) {
    jit::launch(queue, {kShortGradientsHeader, "relational::prepare_gradients_kernel"},
                {args.segments.types, kPartThreads}, args, parts);
  }
  const jit::Expression kernel =
      short_gradients_expression(args.out_width, weights_of(args.neighbors, Weights::in_order));
  jit::launch(queue, kernel, {num_blocks(args.segments, args.share), ShortGradients::kThreads, kShortGradientsBytes},
              args, parts);
}

void run_hub_sums(Storage storage, const HubSumsArgs& args, const jit::Queue& queue) {
  if (args.count == 0) return;
  const jit::Expression kernel("relational/cuda/hub_sums.cuh", "relational::hub_sums_kernel", {type_of(storage)});
  jit::launch(queue, kernel, {args.count, kFusedThreads}, args);
}

void run_row_sums(Storage storage, const RowSumsArgs& args, const jit::Queue& queue) {
  const TileShape tile = row_tile_shape(storage, std::max(args.own_width, args.width), args.few);
  const bool twice = splits_root_once(storage, tile, args.little);
  const jit::Expression kernel = row_sums_expression(storage, tile, args.transposed, twice);
  const int bytes = twice ? shared_bytes<TwiceRowSums>(storage, tile) : shared_bytes<OnceRowSums>(storage, tile);
  jit::launch(queue, kernel, {blocks_of_rows(args.num_tiles, args.share), tile.threads(), bytes}, args);
}

void run_short_rows(Storage storage, const RowSumsArgs& args, int processors, const jit::Queue& queue) {
  const jit::Expression kernel = short_rows_expression(storage, args.width, args.transposed);
  const int64_t turns = blocks_of_rows(args.num_rows, ShortRows::kWarps * kWarpSegments);
  const int64_t blocks = std::min<int64_t>(ShortRows::kBlocks * processors, turns);
  jit::launch(queue, kernel, {blocks, ShortRows::kThreads}, args);
}

void run_own_gradients(Storage storage, const OwnGradientsArgs& args, const jit::Queue& queue) {
  const char* const header = "relational/cuda/own_gradients.cuh";
  const bool floats = storage == Storage::f32, narrow = args.own_width <= 64 && args.width <= 64;
  const int64_t blocks = blocks_of_rows(args.num_rows, int64_t{args.share} * kTileSegments);
  if (floats && narrow && args.own.numbers && args.partial && !args.rows) {
    jit::launch(queue, {header, "relational::own_gradients::own_squares_kernel"},
                {blocks, own_gradients::kSquareThreads, kOwnSquaresBytes}, args);
    return;
  }
  const int of_floats = narrow ? OwnGradientsLayout<float, 64>::kBytes : OwnGradientsLayout<float, 128>::kBytes;
  const int of_halves = narrow ? OwnGradientsLayout<uint16_t, 64>::kBytes : OwnGradientsLayout<uint16_t, 128>::kBytes;
  jit::launch(queue, {header, "relational::own_gradients::own_gradients_kernel", {type_of(storage), narrow ? 64 : 128}},
              {blocks, kFusedThreads, floats ? of_floats : of_halves}, args);
}

void run_add_gradients(Storage storage, const AddGradientsArgs& args, const jit::Queue& queue) {
  using add_gradients::kOwnSides, add_gradients::kThreads;
  const auto blocks = [](int size, int sides) { return (size + 4 * kThreads / sides - 1) / (4 * kThreads / sides); };
  // Doubles the threads per element until the device is full or each thread has one chunk.
  const int64_t types = std::max(args.tiles.types, 1), chunks = args.tiles.count / (args.share * types);
  int sides = 1;
  while (sides < std::min<int64_t>(chunks, kOwnSides) && types * args.size / 4 * sides < kManyThreads) sides *= 2;
  const int of_type = args.partial ? blocks(args.size, sides) : 0;
  const int64_t of_types = int64_t{of_type} * args.tiles.types;
  const int64_t all = of_types + (args.own_partial ? blocks(args.own_size, kOwnSides) : 0);
  if (all == 0) return;
  const jit::Expression kernel("relational/cuda/add_gradients.cuh", "relational::add_gradients::add_gradients_kernel",
                               {type_of(storage)});
  jit::launch(queue, kernel, {all, kThreads}, args, of_type, of_types, sides);
}

}  // namespace edgeless::cuda::relational
