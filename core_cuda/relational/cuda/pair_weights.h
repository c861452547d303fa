// The matrices of keys and of values of every type side by side, those of keys times a number each, and the gradients
// of what they are made of. No CUDA and no torch.
#pragma once

#include <cstdint>

#include "../../common/storage.h"
#include "../../jit/queue.h"

namespace edgeless::cuda::relational {

// One matrix of `size` numbers, one behind the other, for every type and head; where the next begins, in numbers.
template <class Data>
struct TypedMatrices {
  Data* numbers = nullptr;
  int64_t type = 0, head = 0;
};

struct PairWeightsArgs {
  int types = 0, heads = 0;
  int64_t size = 0;                        // of a matrix; a multiple of four, as are all steps
  bool wide = false;                       // parameters are floats, whatever the rows are
  TypedMatrices<const void> keys, values;  // begin on vectors of four numbers
  TypedMatrices<const void> scale;         // of keys, a number each
  float factor = 1;                        // of all keys in `out`
  void* out = nullptr;                     // [types, 2 heads, size], of the rows' dtype
  const float* grad = nullptr;             // [types, 2 heads, size], of `out` before it was rounded
  TypedMatrices<void> of_keys, of_values;  // gradients, null: not wanted
  TypedMatrices<void> of_scale;
};

// out = keys scale factor | values
void run_pair_weights(Storage rows, const PairWeightsArgs& args, const jit::Queue& queue);
// of_keys = grad scale, of_scale = the sum of grad keys over a matrix, of_values = grad
void run_pair_weight_gradients(Storage rows, const PairWeightsArgs& args, const jit::Queue& queue);

}  // namespace edgeless::cuda::relational
