// Copies of rows that begin and end on whole vectors of 16 bytes, filled up with zeros. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace edgeless::cuda {

// [rows, heads, dim] of any strides, to [rows, heads, padded] contiguous; padded is a multiple of 16 bytes.
struct RowsCopy {
  const char* from = nullptr;
  char* to = nullptr;                                  // on 16 bytes
  int64_t from_row = 0, from_head = 0, from_step = 0;  // bytes from row to row, head to head, number to number
  int64_t rows = 0, heads = 0, dim = 0, padded = 0;
  int size = 4;         // bytes of a number: 2, 4 or 8
  bool halves = false;  // rows begin on 8 bytes, without steps, and are made of whole 8 bytes
};

constexpr int kMostCopies = 8;
struct RowsCopies {
  RowsCopy at[kMostCopies];
  int count = 0;
};

// All of them by one launch.
cudaError_t pad_rows(const RowsCopies& copies, cudaStream_t stream);

}  // namespace edgeless::cuda
