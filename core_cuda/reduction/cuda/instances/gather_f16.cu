#include "../gather.cuh"

namespace edgeless::cuda::extrema {
template cudaError_t give_instance<__half, false>(const GatherArgs&, cudaStream_t);
template cudaError_t give_instance<__half, true>(const GatherArgs&, cudaStream_t);
}  // namespace edgeless::cuda::extrema
