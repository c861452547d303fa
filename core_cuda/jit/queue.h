// The stream and device on which kernels are launched. No CUDA and no torch.
#pragma once

namespace edgeless::jit {

struct Queue {
  void* stream = nullptr;  // CUstream, which cudaStream_t is too
  int device = 0;          // the stream's device
};

}  // namespace edgeless::jit
