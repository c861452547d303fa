// Sums over relations whose products are made while the sums of pieces are at hand (cuda/piece_products.cuh), and the
// gradients of such sums. Only with torch and CUDA.
#pragma once

#include "../common/launch.h"
#include "pieces.h"

namespace edgeless::cuda::relational {

using OptTensor = Optional<at::Tensor>;

bool on_tensor_cores(const at::Tensor& t);
// Whether a matrix' rows are whole vectors of 16 bytes, in blocks of `width` numbers too.
bool has_vectors(const at::Tensor& t, int64_t width);

// [types, blocks, K, M] in the dtype of the rows
inline at::Tensor matrices(const at::Tensor& weight, at::ScalarType dtype) {
  return (weight.dim() == 3 ? weight.unsqueeze(1) : weight).to(dtype);
}

// Whether the fused kernels take rows such as x, these weights and these pieces.
bool fuses(const at::Tensor& x, const at::Tensor& weight, const Pieces& pieces);
// Whether they take a map of the rows' own.
bool fuses_map(const at::Tensor& own, const at::Tensor& root);

// What is added to the sums of rows: own root, for the first rows of the result, and bias. Undefined: nothing.
struct Added {
  at::Tensor own, root, bias;
};

// Of what fuses() takes: relational_sum, and `added` to it.
at::Tensor fused_sum(const at::Tensor& x, const at::Tensor& weight, const OptTensor& edge_weight, const Pieces& by_dst,
                     int64_t num_dst, at::ScalarType dtype, const Added& added);

// The gradient of an output in the dtype of the rows, and what the own map and the bias get: sums of blocks, which
// fused_gradients adds.
struct OwnGradients {
  at::Tensor rows;
  at::Tensor partial;  // [chunks, K' * M + M], undefined: not wanted
  int64_t own_width = 0;
  bool of_root = false, of_bias = false;
};
OwnGradients own_gradients(const at::Tensor& grad, const at::Tensor& own, at::ScalarType dtype, bool of_root,
                           bool of_bias);

struct FusedNeeds {
  bool rows, weight;
};
struct FusedGradients {
  at::Tensor rows, weight, root, bias;  // undefined: not asked for
};
// grad: of the dtype of x. root: of the map of the first rows of x, whose part of their gradient is added.
FusedGradients fused_gradients(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight,
                               const OptTensor& edge_weight, const Pieces& by_src, const FusedNeeds& needs,
                               const at::Tensor& root = {}, const OwnGradients& own = {});

}  // namespace edgeless::cuda::relational
