// Weighted sparse blocks (WSB) as kernels read them. No CUDA and no torch.
#pragma once

#include "../../common/segment_reduce.h"
#include "../../common/storage.h"

namespace edgeless::cuda::wsb {

constexpr int kBlockColumns = 16, kHeight = 32;  // columns of a block, rows of a window

// Rows are grouped into windows of 32. Each window lists the distinct columns of its rows; sixteen of these columns
// form a block, with one bit per row and column that says whether the edge exists. Word w holds the bits of columns 2 w
// and 2 w + 1 for sixteen rows, as one mma register does, column 2 w in the lower half.
struct Blocks {
  const int32_t* first = nullptr;    // [windows + 1], a window's first block
  const int32_t* order = nullptr;    // [windows], the order in which windows are processed
  const int32_t* columns = nullptr;  // [blocks, 16]
  const uint32_t* bits = nullptr;    // [blocks, 4, 2, 2]: words 2 q and 2 q + 1 of both halves of the rows, q < 4
  int windows = 0;
};

}  // namespace edgeless::cuda::wsb
