// Registry from the addresses of one direction's arrays to the owner of data derived from them. An owner holds the
// arrays, so no other tensor can have their addresses while the owner is registered.
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

// Autograd's version counter of a tensor; 0 for inference tensors, which have none.
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

  // Returns the owner of these arrays, or null if they have no live owner.
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
  // Only find() locks `held`, and returns the locked reference: the last reference to an owner must not be dropped
  // under the mutex.
  struct Entry {
    const Owner* address;
    std::weak_ptr<Owner> held;
  };

  std::mutex mutex_;
  std::map<ArraysPlace, std::vector<Entry>> owners_;  // a graph and its reverse share arrays
};

}  // namespace edgeless
