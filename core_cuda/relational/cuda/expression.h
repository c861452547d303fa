// The kernels of sums over relations and of typed products: header and template arguments, for launches and printed
// plans. No CUDA and no torch.
#pragma once

#include <algorithm>

#include "../../common/kernel_types.h"
#include "../../common/thresholds.h"
#include "geometry.h"
#include "segment_tiles.h"

namespace edgeless::cuda::relational {

// Tile shape that a kernel is compiled for: the maximum width of rows, and the columns that a warp computes.
struct TileShape {
  int width, columns;

  constexpr int threads() const { return tile_threads(width, columns); }
};

// few: there are few blocks, so tiles of width 64 have twice as many warps.
constexpr TileShape tile_shape(Storage storage, int widest, bool few) {
  if (storage == Storage::f32 && widest <= 32) return {32, kWarpColumns<32>};
  if (widest <= 64) return {64, few ? kFewColumns : kWarpColumns<64>};
  return {128, kWarpColumns<128>};
}

// The tile shape of row_sums_kernel.
constexpr TileShape row_tile_shape(Storage storage, int widest, bool few) {
  const bool floats = storage == Storage::f32;
  TileShape tile = tile_shape(storage, widest, !floats && few);
  if (floats && tile.width == 64) tile.columns = kRowColumns<float, 64>;
  return tile;
}

// Template argument kTwice of row_sums_kernel: root is split into TF32 parts once per block and not for every tile.
// False only for float tiles of width 64 in the variant with less shared memory (`little`).
constexpr bool splits_root_once(Storage storage, const TileShape& tile, bool little) {
  return storage != Storage::f32 || tile.width != 64 || !little;
}

// The fused kernels ---------------------------------------------------------------------------------------------------

inline jit::Expression segment_products_expression(Storage storage, const TileShape& tile) {
  return {"relational/cuda/segment_products.cuh",
          "relational::segment_products_kernel",
          {type_of(storage), tile.width, tile.columns}};
}

inline constexpr const char* kShortSegmentsHeader = "relational/cuda/short_segments.cuh";

constexpr int short_width(int in, int out) { return in <= 32 && out <= 32 ? 32 : 64; }

inline jit::Expression short_products_expression(int in, int out, Weights weights) {
  const int width = short_width(in, out);
  return {kShortSegmentsHeader, "relational::short_products_kernel", {width, weights, in == width}};
}

inline jit::Expression segment_gradients_expression(Storage storage, const TileShape& tile) {
  return {"relational/cuda/segment_gradients.cuh",
          "relational::segment_gradients_kernel",
          {type_of(storage), tile.width, tile.columns}};
}

inline constexpr const char* kShortGradientsHeader = "relational/cuda/short_gradients.cuh";

inline jit::Expression short_gradients_expression(int out, Weights weights) {
  return {kShortGradientsHeader, "relational::short_gradients_kernel", {weights, out == kMostShortWidth}};
}

// twice: see splits_root_once.
inline jit::Expression row_sums_expression(Storage storage, const TileShape& tile, bool transposed, bool twice) {
  return {"relational/cuda/row_sums.cuh",
          "relational::row_sums_kernel",
          {type_of(storage), tile.width, tile.columns, transposed, twice}};
}

inline jit::Expression short_rows_expression(Storage storage, int width, bool transposed) {
  return {"relational/cuda/short_rows.cuh",
          "relational::short_rows_kernel",
          {type_of(storage), transposed, width == kMostShortWidth}};
}

// Typed products ------------------------------------------------------------------------------------------------------

inline constexpr const char* kAnyProductHeader = "relational/cuda/any_product.cuh";

// transposed: a type's matrix is stored as [columns, depth].
inline jit::Expression product_expression(Storage storage, int columns, bool transposed) {
  const int sides = product::sides(size_of(storage), columns);
  return {"relational/cuda/product.cuh", "relational::product::product_kernel", {type_of(storage), transposed, sides}};
}

inline jit::Expression outer_expression(Storage storage) {
  return {"relational/cuda/outer.cuh", "relational::outer::outer_kernel", {type_of(storage)}};
}

inline jit::Expression any_product_expression(Storage storage) {
  return {kAnyProductHeader, "relational::any_product::product_kernel", {type_of(storage)}};
}

inline jit::Expression any_outer_expression(Storage storage) {
  return {kAnyProductHeader, "relational::any_product::outer_kernel", {type_of(storage)}};
}

// Skip connections ----------------------------------------------------------------------------------------------------

inline constexpr const char* kTypedRowsHeader = "relational/cuda/typed_rows.cuh";

// Elements that a lane loads at once: a 16-byte vector if rows are aligned and consist of whole vectors, else one.
constexpr int typed_rows_vector(Storage storage, int width, bool aligned) {
  const int size = 16 / size_of(storage);
  return aligned && width % size == 0 ? size : 1;
}

inline jit::Expression blend_expression(Storage storage, int vector) {
  return {kTypedRowsHeader, "relational::typed_rows::blend_kernel", {type_of(storage), vector}};
}

// Sums of rows by type. blends: the kernel also computes the gradients of a skip connection.
inline jit::Expression typed_sums_expression(Storage storage, int vector, bool blends) {
  return {kTypedRowsHeader, "relational::typed_rows::partial_sums_kernel", {type_of(storage), vector, blends}};
}

}  // namespace edgeless::cuda::relational
