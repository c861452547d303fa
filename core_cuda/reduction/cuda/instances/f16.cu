#include "../instances.cuh"

namespace edgeless::cuda::reduction {
template struct Instance<__half>;
}  // namespace edgeless::cuda::reduction
