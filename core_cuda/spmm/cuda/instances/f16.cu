#include "../product.cuh"
#include "../sampled.cuh"

namespace edgeless::cuda::spmm {
template cudaError_t spmm_instance<__half>(bool, int, const SpmmArgs<float>&, cudaStream_t);
template cudaError_t sddmm_instance<__half>(bool, const SddmmArgs<float>&, cudaStream_t);
}  // namespace edgeless::cuda::spmm
