#include "../instances.cuh"

namespace edgeless::cuda {
template cudaError_t run_instance<double, CosineScore>(const Problem&, const Plan&, const Args<Arithmetic<double>>&,
                                                       cudaStream_t);
}  // namespace edgeless::cuda
