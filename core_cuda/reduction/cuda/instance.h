// The kernels of one storage type, defined in instances.cuh.
#pragma once

#include "kernels.h"

namespace edgeless::cuda::reduction {

template <class S>
struct Instance {
  static cudaError_t reduce(bool wide_index, bool shares, const ReduceArgs& args, cudaStream_t stream);
  static int64_t piece_bytes(bool wide_index, bool shares);
  static cudaError_t measure(const ScatterArgs& args, cudaStream_t stream);
  static cudaError_t slice(bool wide_index, const ScatterArgs& args, cudaStream_t stream);
  static cudaError_t rest(bool wide_index, const ScatterArgs& args, cudaStream_t stream);
};

// Of the gathered backward, in instances/gather_*.cu.
template <class S, bool kShares>
cudaError_t gather_grad_instance(const GatherArgs& args, cudaStream_t stream);

// Of the sorted backward, in instances/sorted_*.cu.
template <class S>
cudaError_t sorted_grad_instance(const SortArgs& args, cudaStream_t stream);

// Of the sums in shared memory, in instances/own_*.cu.
template <class S>
cudaError_t shared_scatter_grad_instance(bool wide_index, const SharedScatterArgs& args, cudaStream_t stream);

}  // namespace edgeless::cuda::reduction
