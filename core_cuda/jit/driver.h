// The CUDA driver, opened when the first kernel is launched. The extension does not link to CUDA, and without a GPU
// nothing is opened. No torch and no CUDA header: all declarations here are part of the driver's stable interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace edgeless::jit {

using Function = void*;  // CUfunction
using Module = void*;    // CUmodule
using Stream = void*;    // CUstream, which cudaStream_t is too

struct Launch {
  uint32_t grid[3] = {1, 1, 1};   // thread blocks
  uint32_t block[3] = {1, 1, 1};  // threads
  uint32_t shared_bytes = 0;      // dynamic shared memory
  uint32_t cluster = 1;           // thread blocks per cluster, along x
  bool cooperative = false;       // all blocks are resident at once
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

  int current_device() const;  // device of the calling thread's context; 0 without a context, as in the CUDA runtime
  // Makes the device's primary context, which the CUDA runtime uses, current in a calling thread that has no context.
  void enter(int device) const;
  int attribute(Attribute attribute, int device) const;
  bool is_capturing(Stream stream) const;

  // Loads code into the current context.
  Module load(const void* code, const std::string& what) const;
  // name: the kernel's mangled name.
  Function function(Module module, const std::string& name) const;
  // Returns the sizes in bytes of a kernel's first `count` parameters, or of all if the kernel has fewer; none if the
  // driver is too old for the query.
  std::vector<size_t> parameters(Function function, size_t count) const;
  // Sets a kernel's limit of dynamic shared memory, which is initially at most 48 KiB.
  void allow_shared_bytes(Function function, int bytes) const;
  // Returns the occupancy of a kernel in blocks per SM.
  int resident_blocks(Function function, int block, int64_t shared_bytes) const;

  // Returns an error code, for check(). arguments: pointers to the values of the kernel's parameters.
  [[nodiscard]] int launch(Function function, const Launch& launch, void** arguments) const;

  // Throws if a call's result is an error. what, name: for the message. No strings, which every call would have to
  // allocate.
  void check(int result, const char* what, const char* name = "") const;

  // Fills memory of the device with zeros, in the order of the stream.
  void clear(void* memory, size_t bytes, Stream stream) const;

 private:
  Driver();
  void* symbol(const char* name, bool needed = true) const;

  void* library_ = nullptr;
  int (*init_)(unsigned) = nullptr;
  int (*get_error_string_)(int, const char**) = nullptr;
  int (*ctx_get_device_)(int*) = nullptr;
  int (*ctx_get_current_)(void**) = nullptr;
  int (*ctx_set_current_)(void*) = nullptr;
  int (*primary_ctx_retain_)(void**, int) = nullptr;
  int (*device_get_attribute_)(int*, int, int) = nullptr;
  int (*stream_is_capturing_)(Stream, int*) = nullptr;
  int (*module_load_data_)(Module*, const void*) = nullptr;
  int (*module_get_function_)(Function*, Module, const char*) = nullptr;
  int (*func_get_param_info_)(Function, size_t, size_t*, size_t*) = nullptr;  // null before CUDA 12.4
  int (*func_set_attribute_)(Function, int, int) = nullptr;
  int (*occupancy_)(int*, Function, int, size_t) = nullptr;
  int (*launch_kernel_ex_)(const void*, Function, void**, void**) = nullptr;
  int (*memset_async_)(uint64_t, unsigned char, size_t, Stream) = nullptr;
};

}  // namespace edgeless::jit
