// The host functions that launch the kernels of pair_weights.cuh.
#include "pair_weights.cuh"

#include "of_storage.cuh"
#include "pair_weights.h"

namespace edgeless::cuda::relational {

using namespace pair_weights;

namespace {

dim3 grid_of(const PairWeightsArgs& args) {
  return dim3(static_cast<unsigned>(args.types), static_cast<unsigned>(2 * args.heads));
}

}  // namespace

cudaError_t run_pair_weights(Storage rows, const PairWeightsArgs& args, cudaStream_t stream) {
  return of_storage<true>(rows, [&](auto zero) {
    using S = decltype(zero);
    if (args.wide) {
      pair_weights_kernel<S, float><<<grid_of(args), kThreads, 0, stream>>>(args);
    } else {
      pair_weights_kernel<S, S><<<grid_of(args), kThreads, 0, stream>>>(args);
    }
    return cudaGetLastError();
  });
}

cudaError_t run_pair_weight_gradients(Storage rows, const PairWeightsArgs& args, cudaStream_t stream) {
  return of_storage<true>(args.wide ? Storage::f32 : rows, [&](auto zero) {
    pair_weight_gradients_kernel<decltype(zero)><<<grid_of(args), kThreads, 0, stream>>>(args);
    return cudaGetLastError();
  });
}

}  // namespace edgeless::cuda::relational
