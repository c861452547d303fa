#include "../gather_grad.cuh"

namespace edgeless::cuda::reduction {
template cudaError_t gather_grad_instance<__half, false>(const GatherArgs&, cudaStream_t);
template cudaError_t gather_grad_instance<__half, true>(const GatherArgs&, cudaStream_t);
}  // namespace edgeless::cuda::reduction
