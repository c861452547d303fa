// Rows that CUDA kernels read in vectors: as they are where that is possible, else a copy.
#pragma once

#include <ATen/ATen.h>

namespace edgeless {

// The largest of 16, 8 and 4 bytes that every head of every row of [N, H, D] is made of and begins on; 0 for none.
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

// A copy in vectors of 16 bytes, filled up with zeros.
inline at::Tensor padded_rows(const at::Tensor& t) {
  const int64_t vector = 16 / t.element_size(), dim = t.size(2);
  at::Tensor padded = at::empty({t.size(0), t.size(1), (dim + vector - 1) / vector * vector}, t.options());
  if (padded.size(2) > dim) padded.narrow(2, dim, padded.size(2) - dim).zero_();
  padded.narrow(2, 0, dim).copy_(t);
  return padded;
}

inline at::Tensor rows_of_16_bytes(const at::Tensor& t) { return vector_bytes(t) == 16 ? t : padded_rows(t); }

}  // namespace edgeless
