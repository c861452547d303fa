#include "../product.cuh"
#include "../sampled.cuh"

namespace edgeless::cuda::spmm {
template cudaError_t spmm_instance<double>(bool, int, const SpmmArgs<double>&, cudaStream_t);
template cudaError_t sddmm_instance<double>(bool, const SddmmArgs<double>&, cudaStream_t);
}  // namespace edgeless::cuda::spmm
