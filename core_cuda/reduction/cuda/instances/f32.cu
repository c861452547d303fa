#include "../instances.cuh"

namespace edgeless::cuda::extrema {
template struct Instance<float>;
}  // namespace edgeless::cuda::extrema
