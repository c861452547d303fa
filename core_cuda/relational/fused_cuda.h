// Sums over relations that multiply the sums of segments while these are on chip (cuda/segment_products.cuh), and the
// gradients of such sums. Needs torch and CUDA.
#pragma once

#include "../common/launch.h"
#include "segments.h"

namespace edgeless::cuda::relational {

using OptTensor = Optional<at::Tensor>;

bool on_tensor_cores(const at::Tensor& t);
// Returns whether a matrix' rows, and blocks of `width` values in them, are whole aligned 16-byte vectors.
bool has_vectors(const at::Tensor& t, int64_t width);

// Weights as [types, blocks, K, M] in the dtype of the rows.
inline at::Tensor matrices(const at::Tensor& weight, at::ScalarType dtype) {
  return (weight.dim() == 3 ? weight.unsqueeze(1) : weight).to(dtype);
}

// Returns whether the fused kernels support these rows, weights and segments.
bool fuses(const at::Tensor& x, const at::Tensor& weight, const Segments& segments);
// Returns whether they support this map of the rows' own features.
bool fuses_map(const at::Tensor& own, const at::Tensor& root);

// Terms that are added to the rows' sums: own root, for the first rows of the result, and bias. Undefined: no such
// term.
struct Added {
  at::Tensor own, root, bias;
};

// relational_sum plus `added`, for arguments that fuses() accepts.
at::Tensor fused_sum(const at::Tensor& x, const at::Tensor& weight, const OptTensor& edge_weight,
                     const Segments& by_dst, int64_t num_dst, at::ScalarType dtype, const Added& added);

// The gradient of an output in the dtype of the rows, and the blocks' partial gradients of root and bias, which
// fused_gradients sums.
struct OwnGradients {
  at::Tensor rows;
  at::Tensor partial;  // [chunks, K' * M + M]; undefined: not needed
  int64_t own_width = 0;
  bool of_root = false, of_bias = false;
};
OwnGradients gradients_of_own(const at::Tensor& grad, const at::Tensor& own, at::ScalarType dtype, bool of_root,
                              bool of_bias);

struct FusedNeeds {
  bool rows, weight;
};
struct FusedGradients {
  at::Tensor rows, weight, root, bias;  // undefined: not needed
};
// grad has x's dtype. root: weight of the own map of x's first rows, whose gradient of x is added.
FusedGradients fused_gradients(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight,
                               const OptTensor& edge_weight, const Segments& by_src, const FusedNeeds& needs,
                               const at::Tensor& root = {}, const OwnGradients& own = {});

}  // namespace edgeless::cuda::relational
