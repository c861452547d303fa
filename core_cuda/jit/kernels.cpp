#include "kernels.h"

#include <map>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace edgeless::jit {
namespace {

using Key = std::tuple<const char*, uint64_t, int>;  // room, key, device

// Never destroyed: other threads may launch while the process ends.
struct Loaded {
  std::shared_mutex mutex;
  std::map<Key, Function> functions;
  Provider provider;
};

Loaded& loaded() {
  static Loaded* const all = new Loaded;
  return *all;
}

Code provided(const KernelName& name, int architecture) {
  Provider provider;
  {
    const std::shared_lock lock(loaded().mutex);
    provider = loaded().provider;
  }
  if (!provider) throw std::runtime_error("edgeless: nothing compiles kernels here: import edgeless.kernels");
  return provider(name, architecture);  // without the lock: it may take seconds and run Python
}

}  // namespace

void set_provider(Provider provider) {
  const std::unique_lock lock(loaded().mutex);
  loaded().provider = std::move(provider);
}

Function function_of(const char* room, uint64_t key, Stream stream, const std::function<KernelName()>& name) {
  const Driver& driver = Driver::get();
  const Key place{room, key, driver.current_device()};
  {
    const std::shared_lock lock(loaded().mutex);
    const auto found = loaded().functions.find(place);
    if (found != loaded().functions.end()) return found->second;
  }
  const KernelName wanted = name();
  if (driver.is_capturing(stream)) {
    throw std::runtime_error("edgeless: " + wanted.expression +
                             " is not loaded, and nothing can be loaded while a CUDA graph is captured: run the call "
                             "once before, as edgeless.capture does");
  }
  const int device = std::get<2>(place);
  const int architecture = 10 * driver.attribute(Attribute::capability_major, device) +
                           driver.attribute(Attribute::capability_minor, device);
  const Code code = provided(wanted, architecture);
  const Function function = driver.function(driver.load(code.image.c_str(), wanted.expression), code.name);
  const std::unique_lock lock(loaded().mutex);
  return loaded().functions.emplace(place, function).first->second;  // the first of two threads wins
}

}  // namespace edgeless::jit
