// Copies of rows, zero-padded to whole 16-byte vectors. No CUDA and no torch.
#pragma once

#include <cstdint>

#include "../jit/queue.h"

namespace edgeless::cuda {

// A copy of rows [rows, heads, dim] of any strides to contiguous rows [rows, heads, padded]. Heads of `padded` values
// are a multiple of 16 bytes long.
struct RowsCopy {
  const char* from = nullptr;
  char* to = nullptr;                                  // aligned to 16 bytes
  int64_t from_row = 0, from_head = 0, from_step = 0;  // strides in bytes of rows, heads and values
  int64_t rows = 0, heads = 0, dim = 0, padded = 0;
  int size = 4;         // bytes per value: 2, 4 or 8
  bool halves = false;  // heads are contiguous, aligned to 8 bytes and a multiple of 8 bytes long
};

// Number of 16-byte vectors that a copy writes.
constexpr int64_t vectors_of(const RowsCopy& copy) { return copy.rows * copy.heads * (copy.padded * copy.size / 16); }

constexpr int kMostCopies = 8;
struct RowsCopies {
  RowsCopy at[kMostCopies];
  int count = 0;
};

// Makes all copies in one launch.
void pad_rows(const RowsCopies& copies, const jit::Queue& queue);

}  // namespace edgeless::cuda
