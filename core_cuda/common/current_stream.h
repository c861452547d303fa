// The current CUDA stream of torch, found in torch's libraries for CUDA, to which the extension does not link.
#pragma once

namespace edgeless {

// Returns the cudaStream_t that torch uses on the device in the calling thread. Throws std::runtime_error if torch has
// loaded no library for CUDA.
void* current_cuda_stream(int device);

}  // namespace edgeless
