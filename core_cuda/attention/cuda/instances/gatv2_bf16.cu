#include "../instances.cuh"

namespace edgeless::cuda {
template cudaError_t run_instance<__nv_bfloat16, Gatv2Score>(const Problem&, const Plan&,
                                                             const Args<Arithmetic<__nv_bfloat16>>&, cudaStream_t);
template cudaError_t run_instance<OfFour<__nv_bfloat16>, Gatv2Score>(const Problem&, const Plan&, const Args<float>&,
                                                                     cudaStream_t);
}  // namespace edgeless::cuda
