#include "../sorted_grad.cuh"

namespace edgeless::cuda::reduction {
template cudaError_t sorted_grad_instance<__half>(const SortArgs&, cudaStream_t);
}  // namespace edgeless::cuda::reduction
