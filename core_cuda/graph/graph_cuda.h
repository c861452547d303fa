// The graph ops on CUDA, for other ops that need a transpose.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "../common/optional.h"

namespace edgeless {

std::tuple<at::Tensor, at::Tensor, at::Tensor> csr_transpose_cuda(const at::Tensor& indptr, const at::Tensor& indices,
                                                                  const Optional<at::Tensor>& edge_ids,
                                                                  int64_t num_cols);

}  // namespace edgeless
