#include "../gather.cuh"

namespace edgeless::cuda::extrema {
template cudaError_t give_instance<__nv_bfloat16, false>(const GatherArgs&, cudaStream_t);
template cudaError_t give_instance<__nv_bfloat16, true>(const GatherArgs&, cudaStream_t);
}  // namespace edgeless::cuda::extrema
