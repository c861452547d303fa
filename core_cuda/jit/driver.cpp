#include "driver.h"

#include <cstring>
#include <stdexcept>
#include <type_traits>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace edgeless::jit {
namespace {

// CUlaunchAttribute and CUlaunchConfig of cuda.h.
struct DriverAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    uint32_t cluster[3];
    int cooperative;
  } value;
};
static_assert(sizeof(DriverAttribute) == 72);

struct DriverLaunch {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  Stream stream;
  DriverAttribute* attributes;
  uint32_t num_attributes;
};
static_assert(sizeof(DriverLaunch) == 56);

constexpr int kCooperative = 2, kClusterDimension = 4;  // CU_LAUNCH_ATTRIBUTE_...
constexpr int kMaxDynamicSharedBytes = 8;               // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

void* opened() {
#ifdef _WIN32
  return reinterpret_cast<void*>(LoadLibraryA("nvcuda.dll"));
#else
  return dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
#endif
}

}  // namespace

const Driver& Driver::get() {
  static const Driver driver;  // if the constructor throws, the next call tries again
  return driver;
}

Driver::Driver() : library_(opened()) {
  if (library_ == nullptr) {
    throw std::runtime_error("edgeless: the CUDA driver (libcuda.so.1) cannot be opened: is there an NVIDIA GPU?");
  }
  const auto find = [this](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol(name));
  };
  find(init_, "cuInit");
  find(get_error_string_, "cuGetErrorString");
  find(ctx_get_device_, "cuCtxGetDevice");
  find(ctx_get_current_, "cuCtxGetCurrent");
  find(ctx_set_current_, "cuCtxSetCurrent");
  find(primary_ctx_retain_, "cuDevicePrimaryCtxRetain");
  find(device_get_attribute_, "cuDeviceGetAttribute");
  find(stream_is_capturing_, "cuStreamIsCapturing");
  find(module_load_data_, "cuModuleLoadData");
  find(module_get_function_, "cuModuleGetFunction");
  find(func_set_attribute_, "cuFuncSetAttribute");
  find(occupancy_, "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  find(launch_kernel_ex_, "cuLaunchKernelEx");
  find(memset_async_, "cuMemsetD8Async");
  func_get_param_info_ = reinterpret_cast<decltype(func_get_param_info_)>(symbol("cuFuncGetParamInfo", false));
  check(init_(0), "to initialize the CUDA driver");
}

void* Driver::symbol(const char* name, bool needed) const {
#ifdef _WIN32
  void* found = reinterpret_cast<void*>(GetProcAddress(reinterpret_cast<HMODULE>(library_), name));
#else
  void* found = dlsym(library_, name);
#endif
  if (found == nullptr && needed) {
    throw std::runtime_error(std::string("edgeless: the CUDA driver has no ") + name +
                             ": it is older than CUDA 11.8; install a newer one");
  }
  return found;
}

void Driver::check(int result, const char* what, const char* name) const {
  if (result == 0) return;
  const char* said = nullptr;
  get_error_string_(result, &said);
  throw std::runtime_error(std::string("edgeless: ") + what + name +
                           " failed: " + (said ? said : "error " + std::to_string(result)));
}

int Driver::current_device() const {
  void* context = nullptr;
  check(ctx_get_current_(&context), "to ask for the current CUDA context");
  if (context == nullptr) return 0;
  int device = 0;
  check(ctx_get_device_(&device), "to ask for the current CUDA device");
  return device;
}

void Driver::enter(int device) const {
  void* context = nullptr;
  check(ctx_get_current_(&context), "to ask for the current CUDA context");
  if (context != nullptr) return;
  check(primary_ctx_retain_(&context, device), "to get the CUDA context of a device");
  check(ctx_set_current_(context), "to set the current CUDA context");
}

int Driver::attribute(Attribute attribute, int device) const {
  int value = 0;
  check(device_get_attribute_(&value, static_cast<int>(attribute), device), "to ask for an attribute of a CUDA device");
  return value;
}

bool Driver::is_capturing(Stream stream) const {
  int status = 0;
  check(stream_is_capturing_(stream, &status), "to ask whether a stream is captured");
  return status != 0;
}

Module Driver::load(const void* code, const std::string& what) const {
  Module module = nullptr;
  check(module_load_data_(&module, code), "to load ", what.c_str());
  return module;
}

Function Driver::function(Module module, const std::string& name) const {
  Function function = nullptr;
  check(module_get_function_(&function, module, name.c_str()), "to find the kernel ", name.c_str());
  return function;
}

std::vector<size_t> Driver::parameters(Function function, size_t count) const {
  std::vector<size_t> sizes;
  size_t offset = 0, size = 0;
  // Makes no query beyond `count`: it would fail, and tools that trace the driver's calls report that as an error.
  while (func_get_param_info_ && sizes.size() < count &&
         func_get_param_info_(function, sizes.size(), &offset, &size) == 0) {
    sizes.push_back(size);
  }
  return sizes;
}

void Driver::allow_shared_bytes(Function function, int bytes) const {
  const int result = func_set_attribute_(function, kMaxDynamicSharedBytes, bytes);
  if (result == 0) return;
  check(result, ("to let a kernel have " + std::to_string(bytes) + " bytes of shared memory").c_str());
}

int Driver::resident_blocks(Function function, int block, int64_t shared_bytes) const {
  int blocks = 0;
  check(occupancy_(&blocks, function, block, static_cast<size_t>(shared_bytes)),
        "to ask for the occupancy of a kernel");
  return blocks;
}

int Driver::launch(Function function, const Launch& launch, void** arguments) const {
  DriverAttribute attributes[2] = {};
  DriverLaunch config = {};
  std::memcpy(config.grid, launch.grid, sizeof(config.grid));
  std::memcpy(config.block, launch.block, sizeof(config.block));
  config.shared_bytes = launch.shared_bytes;
  config.stream = launch.stream;
  config.attributes = attributes;
  if (launch.cooperative) {
    DriverAttribute& attribute = attributes[config.num_attributes++];
    attribute.id = kCooperative, attribute.value.cooperative = 1;
  }
  if (launch.cluster > 1) {
    DriverAttribute& attribute = attributes[config.num_attributes++];
    attribute.id = kClusterDimension;
    attribute.value.cluster[0] = launch.cluster, attribute.value.cluster[1] = attribute.value.cluster[2] = 1;
  }
  return launch_kernel_ex_(&config, function, arguments, nullptr);
}

void Driver::clear(void* memory, size_t bytes, Stream stream) const {
  check(memset_async_(reinterpret_cast<uintptr_t>(memory), 0, bytes, stream), "to clear memory of a CUDA device");
}

}  // namespace edgeless::jit
