#include "../instances.cuh"

namespace edgeless::cuda {
template cudaError_t run_instance<__half, DotScore>(const Problem&, const Plan&, const Args<Arithmetic<__half>>&,
                                                    cudaStream_t);
template cudaError_t run_instance<OfFour<__half>, DotScore>(const Problem&, const Plan&, const Args<float>&,
                                                            cudaStream_t);
}  // namespace edgeless::cuda
