#include "../instances.cuh"

namespace edgeless::cuda::reduction {
template struct Instance<float>;
}  // namespace edgeless::cuda::reduction
