// The kernels of linear maps: which products they compute, header and template arguments, for launches and printed
// plans. No CUDA and no torch.
#pragma once

#include <climits>

#include "../../common/kernel_types.h"
#include "../../common/thresholds.h"
#include "tilings.h"

namespace edgeless::cuda::projection {

// A product [rows, columns] = a b^T.
struct ProductSizes {
  Storage storage = Storage::f32;
  int64_t rows = 0, columns = 0, depth = 0;
  bool divided = false;  // split-K, so that few tiles occupy all SMs
};

// Returns whether edgeless' kernels support a product of aligned operands and can fill their tiles. capability: 80 for
// 8.0.
constexpr bool suits(const ProductSizes& p, int capability) {
  if (p.storage == Storage::f64) return false;
  const int64_t vector = 16 / size_of(p.storage);
  return p.columns >= kLeastColumns && p.columns % vector == 0 && p.columns < INT_MAX && p.depth >= kLeastDepth &&
         p.rows > 0 && capability >= 80;
}

// Returns whether edgeless' kernels compute a product, and not a library. 16-bit elements: only for few nodes, which
// are rows of a. float32: not if TF32 is allowed, because cuBLAS is faster then.
constexpr bool takes(const ProductSizes& p, int64_t nodes, int capability, bool allows_tf32) {
  if (!suits(p, capability)) return false;
  if (p.storage != Storage::f32) return nodes < kLaunchBoundRows && (p.divided || p.depth <= kMostDepth);
  const bool full = p.divided ? p.rows >= kDividedRows : p.depth <= kMostDepth || p.rows * p.columns >= kLargeProduct;
  return full && !allows_tf32;
}

constexpr bool takes_wide_tiles(int64_t rows, int64_t columns, int64_t depth, bool divided) {
  if (divided) return rows * columns >= kWideResult && depth >= kWideDividedDepth;
  return depth >= kWideDepth && WideTiling::blocks(rows, columns) >= kWideTiles;
}

inline constexpr jit::Type kSquareTiling{"edgeless::cuda::projection::SquareTiling"},
    kWideTiling{"edgeless::cuda::projection::WideTiling"};

inline jit::Expression float_product_expression(jit::Type tiling, bool transposed_a, bool transposed_b, bool two) {
  return {"projection/cuda/product.cuh", "projection::product_kernel", {tiling, transposed_a, transposed_b, two}};
}

inline jit::Expression half_product_expression(Storage storage, bool transposed_a, bool transposed_b, bool two) {
  return {"projection/cuda/half_gemm.cuh",
          "projection::half_gemm_kernel",
          {type_of(storage), transposed_a, transposed_b, two}};
}

// two: the product has a second pair of operands.
inline jit::Expression expression_of(const ProductSizes& p, bool transposed_b, bool two) {
  if (p.storage != Storage::f32) return half_product_expression(p.storage, p.divided, transposed_b, two);
  const bool wide = takes_wide_tiles(p.rows, p.columns, p.depth, p.divided);
  return float_product_expression(wide ? kWideTiling : kSquareTiling, p.divided, transposed_b, two);
}

}  // namespace edgeless::cuda::projection
