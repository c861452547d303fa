#include "../product.cuh"
#include "../sampled.cuh"

namespace edgeless::cuda::spmm {
template cudaError_t spmm_instance<__nv_bfloat16>(bool, int, const SpmmArgs<float>&, cudaStream_t);
template cudaError_t sddmm_instance<__nv_bfloat16>(bool, const SddmmArgs<float>&, cudaStream_t);
}  // namespace edgeless::cuda::spmm
