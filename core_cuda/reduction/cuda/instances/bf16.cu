#include "../instances.cuh"

namespace edgeless::cuda::extrema {
template struct Instance<__nv_bfloat16>;
}  // namespace edgeless::cuda::extrema
