#include "../instances.cuh"

namespace edgeless::cuda {
template cudaError_t pair_pass_instance<__nv_bfloat16>(const Problem&, const Kernel&, const PairArgs&, cudaStream_t);
}  // namespace edgeless::cuda
