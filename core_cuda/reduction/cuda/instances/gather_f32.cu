#include "../gather.cuh"

namespace edgeless::cuda::extrema {
template cudaError_t give_instance<float, false>(const GatherArgs&, cudaStream_t);
template cudaError_t give_instance<float, true>(const GatherArgs&, cudaStream_t);
}  // namespace edgeless::cuda::extrema
