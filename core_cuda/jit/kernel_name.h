// How C++ names a kernel. No CUDA and no torch.
#pragma once

#include <string>

namespace edgeless::jit {

struct KernelName {
  std::string header;      // that has it, relative to core_cuda
  std::string expression;  // with its namespace and template arguments
};

}  // namespace edgeless::jit
