// Compiles the kernels of one storage type.
#pragma once

#include "extremum.cuh"
#include "instance.h"
#include "scatter_grad.cuh"

namespace edgeless::cuda::reduction {

template <class S>
cudaError_t Instance<S>::reduce(bool wide_index, bool shares, const ReduceArgs& args, cudaStream_t stream) {
  return reduce_instance<S>(wide_index, shares, args, stream);
}

template <class S>
int64_t Instance<S>::piece_bytes(bool wide_index, bool shares) {
  return wide_index ? reduce_piece_bytes<S, int64_t>(shares) : reduce_piece_bytes<S, int32_t>(shares);
}

template <class S>
cudaError_t Instance<S>::measure(const ScatterArgs& args, cudaStream_t stream) {
  return measure_instance<S>(args, stream);
}

template <class S>
cudaError_t Instance<S>::slice(bool wide_index, const ScatterArgs& args, cudaStream_t stream) {
  return wide_index ? slice_instance<S, int64_t>(args, stream) : slice_instance<S, int32_t>(args, stream);
}

template <class S>
cudaError_t Instance<S>::rest(bool wide_index, const ScatterArgs& args, cudaStream_t stream) {
  return wide_index ? rest_instance<S, int64_t>(args, stream) : rest_instance<S, int32_t>(args, stream);
}

}  // namespace edgeless::cuda::reduction
