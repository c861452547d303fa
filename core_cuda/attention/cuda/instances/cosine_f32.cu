#include "../instances.cuh"

namespace edgeless::cuda {
template cudaError_t run_instance<float, CosineScore>(const Problem&, const Plan&, const Args<Arithmetic<float>>&,
                                                      cudaStream_t);
}  // namespace edgeless::cuda
