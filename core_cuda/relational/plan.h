// Decides whether a sum over relations runs on the fused kernels (fused_cuda.cpp), which multiply the sums of segments
// on chip. The op calls these functions, and so does Python before it chooses an order, splits and tiles for these
// kernels (shared/plan/steps.py). Pure functions of sizes and of the device. No CUDA and no torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../common/storage.h"
#include "cuda/shared_layout.h"

namespace edgeless::cuda::relational {

// The widest rows that the kernels are compiled for, and the widest rows of the variants that take less shared memory.
constexpr int kMostFusedWidth = 128, kNarrowFusedWidth = 64;

struct FusedDevice {
  int capability = 0;        // 80 for 8.0
  int64_t shared_bytes = 0;  // most that a thread block can request
};

// Shared memory of a block, in kernels for rows of up to `widest` values; not for float64.
template <template <class, int> class Layout, class S>
constexpr int layout_bytes(int widest) {
  return widest <= kNarrowFusedWidth ? Layout<S, kNarrowFusedWidth>::kBytes : Layout<S, kMostFusedWidth>::kBytes;
}
template <template <class, int> class Layout>
constexpr int block_memory(Storage storage, int widest) {
  const bool floats = storage == Storage::f32;
  const int bytes = floats ? layout_bytes<Layout, float>(widest) : layout_bytes<Layout, uint16_t>(widest);
  return bytes + static_cast<int>(sizeof(TileBegins));
}

// The variant of each kernel with the most warps: for narrow rows twice as many, if there are few blocks.
template <class S, int kWidth>
using MostProducts = ProductsLayout<S, kWidth, kWidth <= kNarrowFusedWidth ? kFewColumns : kWarpColumns<kWidth>>;
template <class S, int kWidth>
using MostGradients = GradientsLayout<S, kWidth, kWidth <= kNarrowFusedWidth ? kFewColumns : kWarpColumns<kWidth>>;
template <class S, int kWidth>
using UsualRowSums = RowSumsLayout<S, kWidth>;
template <class S, int kWidth>
using LittleRowSums = RowSumsLayout<S, kWidth, kRowColumns<S, kWidth>, false>;

constexpr int segment_products_memory(Storage storage, int widest) {
  return block_memory<MostProducts>(storage, widest);
}
constexpr int segment_gradients_memory(Storage storage, int widest) {
  return block_memory<MostGradients>(storage, widest);
}
// little: the variant with less memory, which splits root for the tensor cores tile by tile.
constexpr int row_sums_memory(Storage storage, int widest, bool little) {
  return little ? block_memory<LittleRowSums>(storage, widest) : block_memory<UsualRowSums>(storage, widest);
}

// The widest rows that the kernels support, forward and backward; 0: none. wide_index: int64 ids.
constexpr int most_fused_width(Storage storage, bool wide_index, const FusedDevice& device) {
  if (device.capability < 80 || storage == Storage::f64 || wide_index) return 0;
  for (const int width : {kMostFusedWidth, kNarrowFusedWidth}) {
    const int memory = std::max({segment_products_memory(storage, width), segment_gradients_memory(storage, width),
                                 row_sums_memory(storage, width, true)});
    if (memory <= device.shared_bytes) return width;
  }
  return 0;
}

// Returns whether the kernels support rows of `in` values and matrices [in, out]. Rows must be whole 16-byte vectors.
constexpr bool fuses_widths(Storage storage, bool wide_index, const FusedDevice& device, int64_t in, int64_t out) {
  const int most = most_fused_width(storage, wide_index, device), vector = storage == Storage::f32 ? 4 : 8;
  const auto fits = [=](int64_t width) { return 0 < width && width <= most && width % vector == 0; };
  return fits(in) && fits(out);
}

// Returns whether row sums of this width need the variant with less memory.
constexpr bool has_little_memory(Storage storage, int widest, const FusedDevice& device) {
  return row_sums_memory(storage, widest, false) > device.shared_bytes;
}

}  // namespace edgeless::cuda::relational
