#include "../deal.cuh"

namespace edgeless::cuda::extrema {
template cudaError_t deal_instance<__nv_bfloat16>(const DealArgs&, cudaStream_t);
template cudaError_t take_dealt_instance<__nv_bfloat16>(const DealArgs&, cudaStream_t);
}  // namespace edgeless::cuda::extrema
