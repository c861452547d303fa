#include "../sorted_grad.cuh"

namespace edgeless::cuda::reduction {
template cudaError_t sorted_grad_instance<__nv_bfloat16>(const SortArgs&, cudaStream_t);
}  // namespace edgeless::cuda::reduction
