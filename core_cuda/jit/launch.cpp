#include "launch.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

namespace edgeless::jit {
namespace {

struct Kernel {
  const Expression name;
  const int device;
  Function function = nullptr;
  std::atomic<int64_t> allowed_bytes{0};  // limit of dynamic shared memory
  std::mutex allowing;

  Kernel(const Expression& name, int device) : name(name), device(device) {}

  // Locks, so that of two threads with different limits the lower one does not win.
  void allow(int64_t bytes) {
    if (bytes <= allowed_bytes.load(std::memory_order_relaxed)) return;
    const std::lock_guard lock(allowing);
    if (bytes <= allowed_bytes.load(std::memory_order_relaxed)) return;
    Driver::get().allow_shared_bytes(function, static_cast<int>(bytes));
    allowed_bytes.store(bytes, std::memory_order_relaxed);
  }
};

// Never destroyed: other threads may launch while the process ends.
struct Loaded {
  std::shared_mutex mutex;
  std::unordered_multimap<uint64_t, std::unique_ptr<Kernel>> kernels;  // indexed by the hash of their names
  Provider provider;
  Preparer preparer;
};

Loaded& loaded() {
  static Loaded* const all = new Loaded;
  return *all;
}

int architecture_of(int device) {
  const Driver& driver = Driver::get();
  return 10 * driver.attribute(Attribute::capability_major, device) +
         driver.attribute(Attribute::capability_minor, device);
}

Code provided(const KernelName& name, int architecture) {
  Provider provider;
  {
    const std::shared_lock lock(loaded().mutex);
    provider = loaded().provider;
  }
  if (!provider) throw std::runtime_error("edgeless: nothing compiles kernels here: import edgeless");
  return provider(name, architecture);  // called without the lock, since it may take seconds and run Python
}

std::string listed(const size_t* sizes, size_t count) {
  std::string list;
  for (size_t i = 0; i < count; ++i) list += (i ? ", " : "") + std::to_string(sizes[i]);
  return "[" + list + "]";
}

// Checks sizes, since an argument smaller than its parameter would be read beyond its end. wanted: sizes of the first
// `count` parameters.
void check_parameters(const std::string& kernel, const std::vector<size_t>& wanted, const size_t* sizes, int count) {
  if (wanted.empty()) return;
  if (wanted == std::vector<size_t>(sizes, sizes + count)) return;
  throw std::runtime_error("edgeless: " + kernel + " has parameters of " + listed(wanted.data(), wanted.size()) +
                           " bytes, got arguments of " + listed(sizes, count));
}

Kernel* find(const Expression& name, int device) {
  const std::shared_lock lock(loaded().mutex);
  const auto [first, last] = loaded().kernels.equal_range(name.hash());
  for (auto at = first; at != last; ++at) {
    if (at->second->device == device && at->second->name == name) return at->second.get();
  }
  return nullptr;
}

Kernel& load(const Expression& expression, const Queue& queue, const size_t* sizes, int count) {
  const Driver& driver = Driver::get();
  const KernelName name = expression.name();
  if (driver.is_capturing(queue.stream)) {
    throw std::runtime_error("edgeless: " + name.expression +
                             " is not loaded, and nothing can be loaded while a CUDA graph is captured: run the call "
                             "once before, as edgeless.capture does");
  }
  const Code code = provided(name, architecture_of(queue.device));
  auto kernel = std::make_unique<Kernel>(expression, queue.device);
  kernel->function = driver.function(driver.load(code.image.data(), name.expression), code.name);
  check_parameters(name.expression, driver.parameters(kernel->function, static_cast<size_t>(count)), sizes, count);
  const std::unique_lock lock(loaded().mutex);  // two threads may both load a kernel, and both copies work
  return *loaded().kernels.emplace(expression.hash(), std::move(kernel))->second;
}

}  // namespace

void set_provider(Provider provider, Preparer preparer) {
  const std::unique_lock lock(loaded().mutex);
  loaded().provider = std::move(provider);
  loaded().preparer = std::move(preparer);
}

bool is_loaded(const Queue& queue, const Expression& kernel) { return find(kernel, queue.device) != nullptr; }

void prepare(const Queue& queue, const std::vector<Expression>& kernels) {
  std::vector<KernelName> names;
  for (const Expression& kernel : kernels) {
    if (!is_loaded(queue, kernel)) names.push_back(kernel.name());
  }
  Preparer preparer;
  {
    const std::shared_lock lock(loaded().mutex);
    preparer = loaded().preparer;
  }
  if (preparer && names.size() > 1) preparer(names, architecture_of(queue.device));
}

void clear(const Queue& queue, void* memory, size_t bytes) {
  if (bytes == 0) return;
  Driver::get().enter(queue.device);
  Driver::get().clear(memory, bytes, queue.stream);
}

void launch_with(const Queue& queue, const Expression& expression, const Shape& shape, void** values,
                 const size_t* sizes, int count) {
  const Driver& driver = Driver::get();
  driver.enter(queue.device);
  Kernel* const found = find(expression, queue.device);
  Kernel& kernel = found ? *found : load(expression, queue, sizes, count);
  if (shape.grid.x == 0) return;
  kernel.allow(shape.shared_bytes);
  const Size &grid = shape.grid, &block = shape.block;
  const Launch launch{{grid.x, grid.y, grid.z},
                      {block.x, block.y, block.z},
                      static_cast<uint32_t>(shape.shared_bytes),
                      static_cast<uint32_t>(shape.cluster),
                      shape.cooperative,
                      queue.stream};
  const int result = driver.launch(kernel.function, launch, values);
  if (result != 0) driver.check(result, "to launch ", expression.name().expression.c_str());
}

}  // namespace edgeless::jit
