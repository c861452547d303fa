// Launches kernels by the name of their template; a kernel is compiled and loaded at its first launch. Its code comes
// from Python (shared/kernels), which compiles or caches it. No CUDA and no torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "driver.h"
#include "expression.h"
#include "queue.h"

namespace edgeless::jit {

struct Code {
  std::string image;  // cubin or PTX
  std::string name;   // mangled name of the kernel in the image
};

// Returns the code of a kernel for an architecture, where 90 means sm_90. The thread that launches calls it.
using Provider = std::function<Code(const KernelName&, int architecture)>;
// Starts to compile kernels in parallel in the background, and returns immediately.
using Preparer = std::function<void(const std::vector<KernelName>&, int architecture)>;
void set_provider(Provider provider, Preparer preparer);

// A number of thread blocks or of threads in each dimension.
struct Size {
  constexpr Size(int64_t x, int64_t y = 1, int64_t z = 1)
      : x(static_cast<uint32_t>(x)), y(static_cast<uint32_t>(y)), z(static_cast<uint32_t>(z)) {}
  uint32_t x, y, z;
};

struct Shape {
  Size grid;
  Size block;
  int64_t shared_bytes = 0;  // dynamic shared memory of a thread block
  int cluster = 1;           // thread blocks per cluster, along x
  bool cooperative = false;  // all blocks are resident at once
};

// values: pointers to the arguments; sizes: the arguments' bytes, which are compared with the kernel's parameters when
// the kernel is loaded (a parameter without an argument is not detected). Nothing can be loaded while a CUDA graph is
// captured: the launch of a kernel that is not loaded then throws, with advice. A grid of no blocks only loads the
// kernel.
void launch_with(const Queue& queue, const Expression& kernel, const Shape& shape, void** values, const size_t* sizes,
                 int count);

// Launches a kernel. The arguments must have exactly the types of its parameters. Safe to call from several threads.
template <class... Arguments>
void launch(const Queue& queue, const Expression& kernel, const Shape& shape, const Arguments&... arguments) {
  static constexpr size_t kSizes[] = {sizeof(Arguments)...};
  void* values[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  launch_with(queue, kernel, shape, values, kSizes, sizeof...(Arguments));
}

// True if the device of the queue has the kernel loaded.
bool is_loaded(const Queue& queue, const Expression& kernel);

// Compiles the kernels that are not loaded, in parallel and in the background. They may be launched immediately: a
// launch waits for its kernel.
void prepare(const Queue& queue, const std::vector<Expression>& kernels);

// Fills memory of the device with zeros.
void clear(const Queue& queue, void* memory, size_t bytes);

}  // namespace edgeless::jit
