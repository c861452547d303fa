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

// The gathered backward; compiled in instances/gather_grad_*.cu.
template <class S, bool kShares>
cudaError_t gather_grad_instance(const GatherArgs& args, cudaStream_t stream);

// The sorted backward; compiled in instances/sorted_grad_*.cu.
template <class S>
cudaError_t sorted_grad_instance(const SortArgs& args, cudaStream_t stream);

// The backward with sums in shared memory; compiled in instances/shared_scatter_grad_*.cu.
template <class S>
cudaError_t shared_scatter_grad_instance(bool wide_index, const SharedScatterArgs& args, cudaStream_t stream);

}  // namespace edgeless::cuda::reduction
