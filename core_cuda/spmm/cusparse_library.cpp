#include "cusparse_library.h"

#include <map>
#include <mutex>
#include <stdexcept>
#include <type_traits>
#include <vector>

#ifndef _WIN32
#include <dlfcn.h>
#endif

namespace edgeless::cusparse {
namespace {

#ifdef _WIN32
void* opened_library() { return nullptr; }
void* symbol_of(void*, const char*) { return nullptr; }
#else
// CUDA 12 and 13 both have version 12 of the library.
void* opened_library() {
  for (const int only_loaded : {RTLD_NOLOAD, 0}) {
    for (const char* name : {"libcusparse.so.12", "libcusparse.so.13", "libcusparse.so"}) {
      if (void* found = dlopen(name, RTLD_NOW | RTLD_LOCAL | only_loaded)) return found;
    }
  }
  return nullptr;
}
void* symbol_of(void* file, const char* name) { return dlsym(file, name); }
#endif

Library* load_library() {
  auto* const loaded = new Library;  // never destroyed: graphs may destroy descriptors while the process ends
  void* const file = opened_library();
  if (file == nullptr) {
    loaded->refusal = "torch has not loaded the library, and no libcusparse.so.12 is found";
    return loaded;
  }
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol_of(file, name));
    if (function == nullptr && loaded->refusal.empty()) {
      loaded->refusal = std::string("the library is too old: it has no ") + name;
    }
  };
  find(loaded->create, "cusparseCreate");
  find(loaded->set_stream, "cusparseSetStream");
  find(loaded->error_string, "cusparseGetErrorString");
  find(loaded->create_csr, "cusparseCreateCsr");
  find(loaded->destroy_sparse, "cusparseDestroySpMat");
  find(loaded->set_sparse_values, "cusparseSpMatSetValues");
  find(loaded->create_dense, "cusparseCreateDnMat");
  find(loaded->destroy_dense, "cusparseDestroyDnMat");
  find(loaded->set_dense_values, "cusparseDnMatSetValues");
  find(loaded->spmm_buffer_size, "cusparseSpMM_bufferSize");
  find(loaded->spmm, "cusparseSpMM");
  find(loaded->sddmm_buffer_size, "cusparseSDDMM_bufferSize");
  find(loaded->sddmm_preprocess, "cusparseSDDMM_preprocess");
  find(loaded->sddmm, "cusparseSDDMM");
  return loaded;
}

// The handles of threads that have ended, by device. They are used again and never destroyed: the CUDA context may be
// gone by then.
struct SpareHandles {
  std::mutex mutex;
  std::map<int, std::vector<Handle>> of_device;
};

SpareHandles& spare_handles() {
  static SpareHandles* const all = new SpareHandles;
  return *all;
}

// The handles of one thread, by device.
struct OwnHandles {
  std::map<int, Handle> of_device;

  ~OwnHandles() {
    SpareHandles& spare = spare_handles();
    const std::lock_guard lock(spare.mutex);
    for (const auto& [device, handle] : of_device) spare.of_device[device].push_back(handle);
  }
};

Handle spare_or_new(int device) {
  {
    SpareHandles& spare = spare_handles();
    const std::lock_guard lock(spare.mutex);
    std::vector<Handle>& found = spare.of_device[device];
    if (!found.empty()) {
      const Handle handle = found.back();
      found.pop_back();
      return handle;
    }
  }
  Handle handle = nullptr;
  check(library().create(&handle), "cusparseCreate");
  return handle;
}

}  // namespace

const Library& library() {
  static const Library* const loaded = load_library();
  return *loaded;
}

void check(int status, const char* call) {
  if (status == kSuccess) return;
  throw std::runtime_error(std::string("edgeless: cuSPARSE: ") + library().error_string(status) + " in " + call);
}

Handle handle_for(const jit::Queue& queue) {
  thread_local OwnHandles own;
  Handle& handle = own.of_device[queue.device];
  if (handle == nullptr) handle = spare_or_new(queue.device);
  check(library().set_stream(handle, queue.stream), "cusparseSetStream");
  return handle;
}

}  // namespace edgeless::cusparse
