// A graph's cache for cuSPARSE: its index arrays, matrix values, and plans (descriptors with a workspace). The graph
// owns the cache (shared/choices/engines.py); ops find it, below autograd, by the index arrays of their call.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../common/owners_by_arrays.h"

namespace edgeless {

// An LRU cache of at most `capacity` entries.
template <class Key, class Value>
class RecentlyUsed {
 public:
  explicit RecentlyUsed(size_t capacity) : capacity_(capacity) {}

  // The value cached under the key, or null.
  Value* find(const Key& key) {
    for (size_t i = 0; i < entries_.size(); ++i) {
      if (!(entries_[i].first == key)) continue;
      std::rotate(entries_.begin(), entries_.begin() + i, entries_.begin() + i + 1);
      return &entries_[0].second;
    }
    return nullptr;
  }

  Value& keep(const Key& key, Value value) {
    if (entries_.size() == capacity_) entries_.pop_back();
    entries_.insert(entries_.begin(), {key, std::move(value)});
    return entries_[0].second;
  }

  size_t size() const { return entries_.size(); }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }

 private:
  size_t capacity_;
  std::vector<std::pair<Key, Value>> entries_;
};

// Identifies the index arrays of one direction of the graph. Callers may write to them in place, so the key includes
// their tensor versions.
struct SideKey {
  const void *indptr, *indices;
  int64_t version;
  bool operator==(const SideKey& o) const { return indptr == o.indptr && indices == o.indices && version == o.version; }
};

// Keys include the stream: a write on one stream is not ordered before reads on another, and two concurrent products
// cannot share a workspace.
struct ValuesKey {
  SideKey side;
  const void *row_scale, *column_scale;  // null: 1
  int64_t scale_version;
  at::ScalarType dtype;
  const void* stream;
  bool operator==(const ValuesKey& o) const {
    return side == o.side && row_scale == o.row_scale && column_scale == o.column_scale &&
           scale_version == o.scale_version && dtype == o.dtype && stream == o.stream;
  }
};

struct PlanKey {
  SideKey side;
  bool sampled;
  int algorithm;
  at::ScalarType dtype, out_dtype;
  int64_t width, gathered_stride, row_stride;
  const void* stream;
  bool operator==(const PlanKey& o) const {
    return side == o.side && sampled == o.sampled && algorithm == o.algorithm && dtype == o.dtype &&
           out_dtype == o.out_dtype && width == o.width && gathered_stride == o.gathered_stride &&
           row_stride == o.row_stride && stream == o.stream;
  }
};

// CsrPlan in cusparse_engine_cuda.cpp adds the library's descriptors.
struct CusparsePlan {
  at::Tensor workspace;
  virtual ~CusparsePlan() = default;
};

class CusparsePlans : public std::enable_shared_from_this<CusparsePlans> {
 public:
  static constexpr size_t kMostPlans = 16, kMostValues = 8;

  static std::shared_ptr<CusparsePlans> make() { return std::shared_ptr<CusparsePlans>(new CusparsePlans()); }
  ~CusparsePlans();

  // Replaces the graph's arrays, (indptr, indices) of each direction, and the scales that the graph caches. Reads
  // indptr[-1] of new arrays, which synchronizes with the GPU that holds them.
  void learn(const std::vector<std::pair<at::Tensor, at::Tensor>>& sides, const std::vector<at::Tensor>& scales);

  // Returns whether indptr[-1] equals the length of indices: cuSPARSE supports no arrays with spare capacity.
  bool is_whole(at::TensorList arrays) const;
  // Returns whether the graph caches this scale, so that values computed from it are worth caching.
  bool keeps(const at::Tensor& scale) const;

  std::map<std::string, int64_t> info() const;
  std::vector<at::Tensor> kept_tensors() const;
  int64_t num_entries() const;

  // Guards the fields below. A product holds it from its look-up to its launch, because it writes to the descriptors.
  mutable std::mutex mutex;
  RecentlyUsed<ValuesKey, at::Tensor> values{kMostValues};
  RecentlyUsed<PlanKey, std::shared_ptr<CusparsePlan>> plans{kMostPlans};
  int64_t hits = 0, misses = 0;

 private:
  CusparsePlans() = default;

  struct Side {
    at::Tensor indptr, indices;
    bool whole;
  };
  std::vector<ArraysPlace> places() const;

  std::vector<Side> sides_;
  std::vector<at::Tensor> scales_;
};

// The cache of the graph that owns these arrays; null if no graph has registered them.
std::shared_ptr<CusparsePlans> plans_of(at::TensorList arrays);

}  // namespace edgeless
