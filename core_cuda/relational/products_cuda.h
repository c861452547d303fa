// Products and outer products of rows by type on CUDA, for ops that are made of them. On the current stream.
#pragma once

#include <ATen/core/Tensor.h>

namespace edgeless::cuda::relational {

// Rows, and which of them are the entries'.
struct Gathered {
  at::Tensor rows;
  at::Tensor ids = {};  // undefined: entry i is row i
  int64_t gap = 0;      // the second half of a row's blocks lies so many numbers behind the first; 0 unless are_whole()

  int64_t count() const { return ids.defined() ? ids.size(0) : rows.size(0); }
};

// Whether tensor cores take rows of blocks of `width` numbers, gap and all, as they are.
bool are_whole(const Gathered& x, int64_t width);

// Row i of `to`, or that of its id, is entry i's row of x times the matrix of its type, and the type's row of bias
// [types, blocks * M] added, for weights [types, blocks, K, M] of x's dtype. given: offsets are a user's.
void multiply(const Gathered& x, const at::Tensor& weight, const at::Tensor& offsets, const Gathered& to,
              bool given = false, const at::Tensor& bias = {});

// Whether multiply() may write products of these rows, which are_whole(), where the rows are. Matrices are contiguous.
bool multiplies_in_place(const at::Tensor& rows, const at::Tensor& weight);

// [types, blocks, K, M]: the sums of x^T y of every type, of x's dtype, or of its statistics' where `wide`.
at::Tensor outer_sums(const Gathered& x, const Gathered& y, const at::Tensor& offsets, int64_t blocks, bool wide,
                      bool given = false);

}  // namespace edgeless::cuda::relational
