// What the plans depend on, of the device at hand, that older versions of PyTorch do not tell Python.
#include "common/launch.h"
#include "plans.h"

namespace edgeless {

int64_t shared_bytes_of_block(int device) { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device); }

}  // namespace edgeless
