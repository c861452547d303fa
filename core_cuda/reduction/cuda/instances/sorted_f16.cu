#include "../sorted.cuh"

namespace edgeless::cuda::extrema {
template cudaError_t sort_instance<__half>(const SortArgs&, cudaStream_t);
}  // namespace edgeless::cuda::extrema
