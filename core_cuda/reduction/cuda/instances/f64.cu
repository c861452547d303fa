#include "../instances.cuh"

namespace edgeless::cuda::reduction {
template struct Instance<double>;
}  // namespace edgeless::cuda::reduction
