// Products and outer products of rows by type on CUDA, for ops that are made of them. On the current stream.
#pragma once

#include <ATen/core/Tensor.h>

namespace edgeless::cuda::relational {

// out[i] = x[ids[i]] weight[t], row i of x where ids is undefined, for entries of type t and weights [types, K, M].
void multiply_rows(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weight, const at::Tensor& offsets,
                   const at::Tensor& out);

// [types, K, M]: the sums of x[ids[i]]^T y[i] of every type, in the dtype of the statistics of x.
at::Tensor outer_of_rows(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& y, const at::Tensor& offsets);

}  // namespace edgeless::cuda::relational
