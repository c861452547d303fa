// What cuSPARSE needs for a graph and is kept with it: which arrays are the graph's, values of the matrix, and plans:
// descriptors with a workspace. Owned by the graph (shared/engines.py) and found again, below autograd, by the arrays
// that an op is given.
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

// The entries that were used last, at most `capacity`.
template <class Key, class Value>
class RecentlyUsed {
 public:
  explicit RecentlyUsed(size_t capacity) : capacity_(capacity) {}

  // What is kept under the key, null if nothing is.
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

// Rows of a direction of the graph. Its arrays may be edited past the graph, so their versions belong to it.
struct SideKey {
  const void *indptr, *indices;
  int64_t version;
  bool operator==(const SideKey& o) const { return indptr == o.indptr && indices == o.indices && version == o.version; }
};

// Streams have entries of their own: what is written on one is not there yet for another, and two products at a time
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

// Descriptors are the library's: see cusparse_engine_cuda.cpp.
struct CusparsePlan {
  at::Tensor workspace;
  virtual ~CusparsePlan() = default;
};

class CusparsePlans : public std::enable_shared_from_this<CusparsePlans> {
 public:
  static constexpr size_t kMostPlans = 16, kMostValues = 8;

  static std::shared_ptr<CusparsePlans> make() { return std::shared_ptr<CusparsePlans>(new CusparsePlans()); }
  ~CusparsePlans();

  // Takes the arrays of the graph, (indptr, indices) of each direction, and the scales that it keeps, in place of those
  // of before. Reads the end of the last row of new ones, for which it waits where that is on a GPU.
  void learn(const std::vector<std::pair<at::Tensor, at::Tensor>>& sides, const std::vector<at::Tensor>& scales);

  // Whether the direction has as many edges as its arrays hold: cuSPARSE takes no others.
  bool is_whole(at::TensorList arrays) const;
  // Whether a scale is one that the graph keeps, so that values made from it are worth keeping.
  bool keeps(const at::Tensor& scale) const;

  std::map<std::string, int64_t> info() const;
  std::vector<at::Tensor> kept_tensors() const;
  int64_t num_entries() const;

  // For who holds the mutex, as a product does from its look-up until it is launched: descriptors are written to.
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

// Of the graph that a direction's arrays belong to; null where no graph has made them known.
std::shared_ptr<CusparsePlans> plans_of(at::TensorList arrays);

}  // namespace edgeless
