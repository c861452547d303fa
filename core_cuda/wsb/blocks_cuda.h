// Conversion of a graph's blocks from tensors to kernel arguments.
#pragma once

#include "cuda/blocks.h"
#include "kept_blocks.h"

namespace edgeless::cuda {

inline wsb::Blocks blocks_as_kernels_read(const BlocksOfSide& side) {
  wsb::Blocks blocks;
  blocks.first = side.first.const_data_ptr<int32_t>(), blocks.order = side.order.const_data_ptr<int32_t>();
  blocks.columns = side.columns.const_data_ptr<int32_t>();
  blocks.bits = reinterpret_cast<const uint32_t*>(side.bits.const_data_ptr<int32_t>());
  blocks.windows = static_cast<int>(side.order.size(0));
  return blocks;
}

}  // namespace edgeless::cuda
