#include "../sorted.cuh"

namespace edgeless::cuda::extrema {
template cudaError_t sort_instance<__nv_bfloat16>(const SortArgs&, cudaStream_t);
}  // namespace edgeless::cuda::extrema
