#include "../instances.cuh"

namespace edgeless::cuda::reduction {
template struct Instance<__nv_bfloat16>;
}  // namespace edgeless::cuda::reduction
