#include "../shared_scatter_grad.cuh"

namespace edgeless::cuda::reduction {
template cudaError_t shared_scatter_grad_instance<__half>(bool, const SharedScatterArgs&, cudaStream_t);
}  // namespace edgeless::cuda::reduction
