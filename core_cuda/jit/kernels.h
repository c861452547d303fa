// Kernels by name, loaded at their first launch. The code of a kernel comes from Python (shared/kernels), which
// compiles it or has it cached. No torch.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "driver.h"
#include "kernel_name.h"

namespace edgeless::jit {

struct Code {
  std::string image;  // cubin or PTX
  std::string name;   // mangled name of the kernel in the image
};

// Returns the code of a kernel for an architecture, where 90 means sm_90. The thread that launches calls it.
using Provider = std::function<Code(const KernelName&, int architecture)>;
void set_provider(Provider provider);

// Returns the kernel on the calling thread's device. key: the kernel's name as a number that is unique in `room`, a
// string that lives forever. name() is called if the kernel is not loaded yet. Nothing can be loaded while a CUDA graph
// is captured: then a kernel that is not loaded raises an error that says how to prepare. Safe to call from several
// threads.
Function function_of(const char* room, uint64_t key, Stream stream, const std::function<KernelName()>& name);

}  // namespace edgeless::jit
