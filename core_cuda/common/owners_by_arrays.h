// From the arrays of a direction of a graph, by their addresses, to who keeps something for them. A keeper holds these
// arrays, so no other tensor can take their addresses while it can be found.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace edgeless {

using ArraysPlace = std::pair<const void*, const void*>;

inline ArraysPlace place_of(const at::Tensor& indptr, const at::Tensor& indices) {
  return {indptr.data_ptr(), indices.data_ptr()};
}

// How often a tensor was written to, as far as PyTorch counts.
inline int64_t version_of(const at::Tensor& t) { return t.is_inference() ? 0 : static_cast<int64_t>(t._version()); }

template <class Owner>
class OwnersByArrays {
 public:
  // Never destroyed: graphs may outlive static objects.
  static OwnersByArrays& get() {
    static auto* const registry = new OwnersByArrays();
    return *registry;
  }

  void add(const std::vector<ArraysPlace>& places, const std::shared_ptr<Owner>& owner) {
    const std::lock_guard lock(mutex_);
    for (const ArraysPlace& place : places) owners_[place].push_back({owner.get(), owner});
  }

  void remove(const std::vector<ArraysPlace>& places, const Owner* owner) {
    const std::lock_guard lock(mutex_);
    for (const ArraysPlace& place : places) {
      const auto found = owners_.find(place);
      if (found == owners_.end()) continue;
      auto& all = found->second;
      const auto is_owner = [owner](const Entry& one) { return one.address == owner; };
      all.erase(std::remove_if(all.begin(), all.end(), is_owner), all.end());
      if (all.empty()) owners_.erase(found);
    }
  }

  // Null where nobody keeps anything for them.
  std::shared_ptr<Owner> find(const ArraysPlace& place) {
    const std::lock_guard lock(mutex_);
    const auto found = owners_.find(place);
    if (found == owners_.end()) return nullptr;
    for (const Entry& one : found->second) {
      if (auto held = one.held.lock()) return held;
    }
    return nullptr;
  }

 private:
  // No owner is locked but to be returned, for the last reference to one must not be dropped under the mutex.
  struct Entry {
    const Owner* address;
    std::weak_ptr<Owner> held;
  };

  std::mutex mutex_;
  std::map<ArraysPlace, std::vector<Entry>> owners_;  // a graph and its reverse share arrays
};

}  // namespace edgeless
