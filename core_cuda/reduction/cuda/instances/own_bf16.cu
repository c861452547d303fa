#include "../own.cuh"

namespace edgeless::cuda::extrema {
template cudaError_t own_instance<__nv_bfloat16>(bool, const OwnArgs&, cudaStream_t);
}  // namespace edgeless::cuda::extrema
