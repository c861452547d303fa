#include "../instances.cuh"

namespace edgeless::cuda::extrema {
template struct Instance<__half>;
}  // namespace edgeless::cuda::extrema
