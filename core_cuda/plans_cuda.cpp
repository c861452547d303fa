// What the plans depend on, of a device at hand, that PyTorch has told Python only since its version 2.5.
#include "common/launch.h"
#include "plans.h"

namespace edgeless {

int64_t shared_bytes_of_block(int device) { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device); }

}  // namespace edgeless
