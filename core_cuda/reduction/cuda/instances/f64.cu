#include "../instances.cuh"

namespace edgeless::cuda::extrema {
template struct Instance<double>;
}  // namespace edgeless::cuda::extrema
