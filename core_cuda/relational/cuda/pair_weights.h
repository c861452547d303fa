// Joins the key and value matrices of every type, with the key matrices scaled, and computes the gradients of the
// matrices and scales. No CUDA and no torch.
#pragma once

#include <cstdint>

#include "../../common/storage.h"
#include "../../jit/queue.h"

namespace edgeless::cuda::relational {

// A contiguous matrix of `size` elements for every type and head. type, head: elements from one type or head to the
// next.
template <class Data>
struct TypedMatrices {
  Data* numbers = nullptr;
  int64_t type = 0, head = 0;
};

struct PairWeightsArgs {
  int types = 0, heads = 0;
  int64_t size = 0;                        // elements of a matrix; a multiple of four, as are the strides
  bool wide = false;                       // parameters are float32, whatever the dtype of the rows
  TypedMatrices<const void> keys, values;  // aligned to vectors of four elements
  TypedMatrices<const void> scale;         // of the key matrices, one element each
  float factor = 1;                        // of all key matrices in `out`; 1 if gradients are computed
  void* out = nullptr;                     // [types, 2 heads, size], of the rows' dtype
  const float* grad = nullptr;             // [types, 2 heads, size], gradient of `out`, not rounded
  TypedMatrices<void> of_keys, of_values;  // gradients; null: not requested
  TypedMatrices<void> of_scale;
};

// out = keys scale factor | values
void run_pair_weights(Storage rows, const PairWeightsArgs& args, const jit::Queue& queue);
// of_keys = grad scale, of_scale = the sum of grad keys over a matrix, of_values = grad
void run_pair_weight_gradients(Storage rows, const PairWeightsArgs& args, const jit::Queue& queue);

}  // namespace edgeless::cuda::relational
