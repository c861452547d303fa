// Whether a sum over relations is multiplied while it is at hand (fused_cuda.cpp). The op asks this, and Python does
// before it chooses an order, cuts and tiles for such kernels (shared/plan.py). Pure functions of sizes and of the
// device. No CUDA and no torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../common/storage.h"
#include "cuda/shared_layout.h"

namespace edgeless::cuda::relational {

// The widest rows that the kernels are compiled for, and those up to which their blocks take less memory.
constexpr int kMostFusedWidth = 128, kNarrowFusedWidth = 64;

struct FusedDevice {
  int capability = 0;        // 80 for 8.0
  int64_t shared_bytes = 0;  // that a block may ask for
};

// The memory of a block, of kernels for rows of up to `widest` numbers; not of doubles.
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

// A kernel of each, with as many warps as it may have: narrow rows get twice as many where blocks are few.
template <class S, int kWidth>
using MostProducts = ProductsLayout<S, kWidth, kWidth <= kNarrowFusedWidth ? kFewColumns : kWarpColumns<kWidth>>;
template <class S, int kWidth>
using MostGradients = GradientsLayout<S, kWidth, kWidth <= kNarrowFusedWidth ? kFewColumns : kWarpColumns<kWidth>>;
template <class S, int kWidth>
using UsualRowSums = RowSumsLayout<S, kWidth>;
template <class S, int kWidth>
using LittleRowSums = RowSumsLayout<S, kWidth, kRowColumns<S, kWidth>, false>;

constexpr int piece_products_memory(Storage storage, int widest) { return block_memory<MostProducts>(storage, widest); }
constexpr int piece_gradients_memory(Storage storage, int widest) {
  return block_memory<MostGradients>(storage, widest);
}
// little: root is split for the tensor cores tile by tile.
constexpr int row_sums_memory(Storage storage, int widest, bool little) {
  return little ? block_memory<LittleRowSums>(storage, widest) : block_memory<UsualRowSums>(storage, widest);
}

// The widest rows that the kernels take, forward and backward; 0: none. wide_index: ids of 64 bits.
constexpr int most_fused_width(Storage storage, bool wide_index, const FusedDevice& device) {
  if (device.capability < 80 || storage == Storage::f64 || wide_index) return 0;
  for (const int width : {kMostFusedWidth, kNarrowFusedWidth}) {
    const int memory = std::max({piece_products_memory(storage, width), piece_gradients_memory(storage, width),
                                 row_sums_memory(storage, width, true)});
    if (memory <= device.shared_bytes) return width;
  }
  return 0;
}

// Whether they take rows of `in` numbers and matrices [in, out]: rows are whole vectors of 16 bytes.
constexpr bool fuses_widths(Storage storage, bool wide_index, const FusedDevice& device, int64_t in, int64_t out) {
  const int most = most_fused_width(storage, wide_index, device), vector = storage == Storage::f32 ? 4 : 8;
  const auto fits = [=](int64_t width) { return 0 < width && width <= most && width % vector == 0; };
  return fits(in) && fits(out);
}

// Whether blocks that add up rows of so many numbers must do with little memory.
constexpr bool has_little_memory(Storage storage, int widest, const FusedDevice& device) {
  return row_sums_memory(storage, widest, false) > device.shared_bytes;
}

}  // namespace edgeless::cuda::relational
