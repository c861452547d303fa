#include "current_stream.h"

#include <c10/core/Stream.h>

#include <cstdint>
#include <stdexcept>
#include <type_traits>

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace edgeless {
namespace {

// Returns a symbol of a library that is loaded already, or null.
void* symbol_of([[maybe_unused]] const char* library, [[maybe_unused]] const char* windows_library, const char* name) {
#ifdef _WIN32
  const HMODULE loaded = GetModuleHandleA(windows_library);
  return loaded ? reinterpret_cast<void*>(GetProcAddress(loaded, name)) : nullptr;
#else
  void* const loaded = dlopen(library, RTLD_NOLOAD | RTLD_NOW);
  return loaded ? dlsym(loaded, name) : nullptr;
#endif
}

// The first function is part of torch's stable C interface. In versions of torch without it, the other two are found by
// their C++ names.
struct Functions {
  int32_t (*of_c)(int32_t, void**) = nullptr;
  c10::Stream (*current)(int8_t) = nullptr;       // c10::cuda::getCurrentCUDAStream; a CUDAStream is a c10::Stream
  void* (*handle)(const c10::Stream*) = nullptr;  // c10::cuda::CUDAStream::stream

  Functions() {
    const auto find = [](auto& function, const char* library, const char* windows_library, const char* name) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol_of(library, windows_library, name));
    };
    find(of_c, "libtorch_cuda.so", "torch_cuda.dll", "aoti_torch_get_current_cuda_stream");
    if (of_c) return;
    find(current, "libc10_cuda.so", "c10_cuda.dll", "_ZN3c104cuda20getCurrentCUDAStreamEa");
    find(handle, "libc10_cuda.so", "c10_cuda.dll", "_ZNK3c104cuda10CUDAStream6streamEv");
    if (!current || !handle) throw std::runtime_error("edgeless: torch has loaded no library for CUDA");
  }
};

}  // namespace

void* current_cuda_stream(int device) {
  static const Functions functions;  // if the constructor throws, the next call tries again
  if (functions.of_c) {
    void* stream = nullptr;
    if (functions.of_c(device, &stream) != 0) throw std::runtime_error("edgeless: torch has no current CUDA stream");
    return stream;
  }
  const c10::Stream stream = functions.current(static_cast<int8_t>(device));
  return functions.handle(&stream);
}

}  // namespace edgeless
