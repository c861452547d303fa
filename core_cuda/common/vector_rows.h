// Rows that CUDA kernels read in vectors: in place where alignment and strides allow it, else from a padded copy.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "launch.h"
#include "pad_rows.h"

namespace edgeless {

// The widest vector, 16, 8 or 4 bytes, that divides the size and the address of every head of `t` [N, H, D]; 0 if none
// does.
inline int64_t vector_bytes(const at::Tensor& t) {
  const int64_t size = t.element_size(), dim = t.size(2);
  const auto base = reinterpret_cast<uintptr_t>(t.data_ptr());
  if ((dim > 1 && t.stride(2) != 1) || t.stride(0) * size >= (int64_t(1) << 32)) return 0;
  for (int64_t bytes = 16; bytes >= std::max<int64_t>(4, size); bytes /= 2) {
    auto fits = [&](int64_t d) { return t.size(d) <= 1 || t.stride(d) * size % bytes == 0; };
    if (dim * size % bytes == 0 && fits(0) && fits(1) && base % bytes == 0) return bytes;
  }
  return 0;
}

// Zero-padded copies in whole 16-byte vectors, made by one launch: add() returns a tensor that run() fills.
class PaddedRows {
 public:
  // Pads each head to a multiple of `numbers` values, whose size is a multiple of 16 bytes.
  at::Tensor add(const at::Tensor& t, int64_t numbers) {
    for (size_t i = 0; i < from_.size(); ++i) {
      if (same(from_[i], t) && to_[i].size(2) % numbers == 0) return to_[i];
    }
    if (copies_.count == cuda::kMostCopies) run();
    const int64_t size = t.element_size(), dim = t.size(2), padded = (dim + numbers - 1) / numbers * numbers;
    at::Tensor to = at::empty({t.size(0), t.size(1), padded}, t.options());
    cuda::RowsCopy& copy = copies_.at[copies_.count++];
    copy.from = static_cast<const char*>(t.data_ptr()), copy.to = static_cast<char*>(to.data_ptr());
    copy.from_row = t.stride(0) * size, copy.from_head = t.stride(1) * size, copy.from_step = t.stride(2) * size;
    copy.rows = t.size(0), copy.heads = t.size(1), copy.dim = dim, copy.padded = padded;
    copy.size = static_cast<int>(size);
    copy.halves = vector_bytes(t) >= 8;
    from_.push_back(t), to_.push_back(to);
    return to;
  }

  // Launches the copies on the current stream.
  void run() {
    if (copies_.count) cuda::pad_rows(copies_, OnDevice(from_.front().device()).queue());
    copies_.count = 0;
    from_.clear(), to_.clear();
  }

 private:
  static bool same(const at::Tensor& a, const at::Tensor& b) {
    return a.data_ptr() == b.data_ptr() && a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
           a.strides() == b.strides();
  }

  cuda::RowsCopies copies_;
  std::vector<at::Tensor> from_, to_;  // sources and results of the pending copies
};

inline at::Tensor padded_rows(const at::Tensor& t) {
  PaddedRows rows;
  const at::Tensor padded = rows.add(t, 16 / t.element_size());
  rows.run();
  return padded;
}

inline at::Tensor rows_of_16_bytes(const at::Tensor& t) { return vector_bytes(t) == 16 ? t : padded_rows(t); }

}  // namespace edgeless
