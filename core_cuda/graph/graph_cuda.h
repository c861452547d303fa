// The graph ops on CUDA, for other ops that need a transpose.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace edgeless {

std::tuple<at::Tensor, at::Tensor, at::Tensor> csr_transpose_cuda(const at::Tensor& indptr, const at::Tensor& indices,
                                                                  const std::optional<at::Tensor>& edge_ids,
                                                                  int64_t num_cols);

}  // namespace edgeless
