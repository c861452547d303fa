// The C++ name of a kernel. No CUDA and no torch.
#pragma once

#include <string>

namespace edgeless::jit {

struct KernelName {
  std::string header;      // the header that defines the kernel, relative to core_cuda
  std::string expression;  // the kernel with its namespace and template arguments
};

}  // namespace edgeless::jit
