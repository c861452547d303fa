// Device attributes that plans depend on and that older versions of PyTorch do not expose to Python.
#include "common/launch.h"
#include "plans.h"

namespace edgeless {

int64_t shared_bytes_of_block(int device) { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device); }

}  // namespace edgeless
