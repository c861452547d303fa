// Where kernels are launched. No CUDA and no torch.
#pragma once

namespace edgeless::jit {

struct Queue {
  void* stream = nullptr;  // CUstream, which cudaStream_t is too
  int device = 0;          // of the stream
};

}  // namespace edgeless::jit
