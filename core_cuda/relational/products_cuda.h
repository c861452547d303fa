// Typed GEMM and typed outer products on CUDA, for ops that are composed of them. They run on the current stream.
#pragma once

#include <ATen/core/Tensor.h>

namespace edgeless::cuda::relational {

// Rows, and the row of every entry.
struct Gathered {
  at::Tensor rows;
  at::Tensor ids = {};  // undefined: entry i is row i
  int64_t gap = 0;      // values between the first and the second half of a row's blocks; 0 unless are_whole()

  int64_t count() const { return ids.defined() ? ids.size(0) : rows.size(0); }
};

// Returns whether the tensor-core kernels read rows with blocks of `width` values, and their gap, without a copy.
bool are_whole(const Gathered& x, int64_t width);

// Writes, to row i of `to` or the row of its id, entry i's row of x times the matrix of its type, plus the type's row
// of bias [types, blocks * M]. weight: [types, blocks, K, M] of x's dtype. given: a user passed the offsets, so the
// device asserts that they fit.
void multiply(const Gathered& x, const at::Tensor& weight, const at::Tensor& offsets, const Gathered& to,
              bool given = false, const at::Tensor& bias = {});

// Returns whether multiply() may overwrite these rows, which must be are_whole(), with their products. Matrices must be
// contiguous.
bool multiplies_in_place(const at::Tensor& rows, const at::Tensor& weight);

// Sums of x^T y per type, [types, blocks, K, M], in x's dtype or, if `wide`, its opmath dtype.
at::Tensor outer_sums(const Gathered& x, const Gathered& y, const at::Tensor& offsets, int64_t blocks, bool wide,
                      bool given = false);

}  // namespace edgeless::cuda::relational
