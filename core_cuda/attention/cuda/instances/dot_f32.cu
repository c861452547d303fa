#include "../instances.cuh"

namespace edgeless::cuda {
template cudaError_t run_instance<float, DotScore>(const Problem&, const Plan&, const Args<Arithmetic<float>>&,
                                                   cudaStream_t);
}  // namespace edgeless::cuda
