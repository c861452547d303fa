// The CUDA driver, opened when the first kernel is loaded. The extension does not link to CUDA, and without a GPU
// nothing is opened. No torch and no CUDA header: all declarations here are part of the driver's stable interface.
#pragma once

#include <cstdint>
#include <string>

namespace edgeless::jit {

using Function = void*;  // CUfunction
using Module = void*;    // CUmodule
using Stream = void*;    // CUstream, which cudaStream_t is too

struct Launch {
  uint32_t grid[3] = {1, 1, 1};
  uint32_t block = 1;  // threads
  uint32_t dynamic_shared_bytes = 0;
  uint32_t cluster = 1;      // thread blocks per cluster, along x
  bool cooperative = false;  // all blocks are resident at once
  Stream stream = nullptr;
};

// Attributes of a device that plans depend on.
enum class Attribute : int {
  multiprocessors = 16,
  l2_bytes = 38,
  capability_major = 75,
  capability_minor = 76,
  cooperative_launch = 95,
  shared_bytes_of_block = 97,  // most that a thread block can request
  clusters = 120,
};

// A call that fails throws std::runtime_error with the driver's message.
class Driver {
 public:
  // Throws if there is no driver.
  static const Driver& get();

  int current_device() const;  // of the calling thread's context
  int attribute(Attribute attribute, int device) const;
  bool is_capturing(Stream stream) const;

  // Loads code into the current context. name: the kernel's mangled name.
  Module load(const void* code, const std::string& what) const;
  Function function(Module module, const std::string& name) const;
  // Raises a kernel's limit of dynamic shared memory above the default of 48 KiB.
  void allow_shared_bytes(Function function, int bytes) const;
  // Returns the occupancy of a kernel in blocks per SM.
  int resident_blocks(Function function, int block, int64_t dynamic_shared_bytes) const;

  // arguments: pointers to the values of the kernel's parameters.
  void launch(Function function, const Launch& launch, void** arguments) const;

 private:
  Driver();
  void* symbol(const char* name) const;
  void check(int result, const std::string& what) const;

  void* library_ = nullptr;
  int (*get_error_string_)(int, const char**) = nullptr;
  int (*ctx_get_device_)(int*) = nullptr;
  int (*device_get_attribute_)(int*, int, int) = nullptr;
  int (*stream_is_capturing_)(Stream, int*) = nullptr;
  int (*module_load_data_)(Module*, const void*) = nullptr;
  int (*module_get_function_)(Function*, Module, const char*) = nullptr;
  int (*func_set_attribute_)(Function, int, int) = nullptr;
  int (*occupancy_)(int*, Function, int, size_t) = nullptr;
  int (*launch_kernel_ex_)(const void*, Function, void**, void**) = nullptr;
};

}  // namespace edgeless::jit
