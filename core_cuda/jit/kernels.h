// Kernels by name, loaded at their first launch. The code of a kernel comes from Python (shared/kernels), which
// compiles it or has kept it. No torch.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "driver.h"
#include "kernel_name.h"

namespace edgeless::jit {

struct Code {
  std::string image;  // cubin or PTX
  std::string name;   // of the kernel in it, mangled
};

// Gives the code of a kernel for an architecture, 90 for sm_90. It is called by the thread that launches.
using Provider = std::function<Code(const KernelName&, int architecture)>;
void set_provider(Provider provider);

// The kernel on the calling thread's device. key: what the name is made of in a number, unique in the room, a string
// that lives for ever; name() is called where the kernel is not loaded yet. During the capture of a graph nothing can
// be loaded: what is missing is an error that says how to prepare. Threads may call it at the same time.
Function function_of(const char* room, uint64_t key, Stream stream, const std::function<KernelName()>& name);

}  // namespace edgeless::jit
