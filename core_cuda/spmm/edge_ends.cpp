#include "edge_ends.h"

#include <ATen/ATen.h>

#include <limits>

namespace edgeless {

Tensor ranges_of(const Tensor& offsets, int64_t count) {
  const Tensor ends = offsets.narrow(0, 1, offsets.size(0) - 1).to(at::kLong).contiguous();
  return at::searchsorted(ends, at::arange(count, ends.options()), /*out_int32=*/false, /*right=*/true);
}

EdgeEnds::EdgeEnds(const Tensor& index, int64_t num_rows) : rows_(index.to(at::kLong)), num_rows_(num_rows) {
  index_ = rows_.clamp_max(num_rows - 1);
  edges_ = at::argsort(rows_, /*stable=*/true);
  indptr_ = at::searchsorted(rows_.index_select(0, edges_), at::arange(num_rows + 1, rows_.options()));
  starts_ = at::minimum(at::arange(num_edges() + 1, rows_.options()), indptr_[num_rows]);
}

EdgeEnds EdgeEnds::of_rows(const Tensor& indptr, int64_t num_edges) {
  return {ranges_of(indptr, num_edges), indptr.size(0) - 1};
}

Tensor EdgeEnds::gather(const Tensor& x) const {
  using Signature = Tensor(const Tensor& x, const Tensor& index, const Tensor& indptr, const Tensor& members);
  static const Kernels kernels("edgeless::gather_rows", static_cast<Signature*>(nullptr));
  at::DimVector sizes(x.sizes());
  sizes[0] = num_edges();
  return kernels.op(x.flatten(1), index_, indptr_, edges_).view(sizes);
}

Tensor EdgeEnds::sum(const Tensor& x) const {
  at::DimVector sizes(x.sizes());
  sizes[0] = num_rows_;
  const std::vector<Tensor> by_row{indptr_, edges_}, by_edge{starts_, index_};
  return spmm_op(x.flatten(1), {}, {}, {}, {by_row, by_edge}).view(sizes);
}

Tensor EdgeEnds::softmax(const Tensor& logits) const {
  // The maximum is detached: the softmax, and so its gradient, does not depend on what is subtracted from a row's
  // logits.
  const Tensor lowest = logits.new_full({num_rows_ + 1, logits.size(1)}, -std::numeric_limits<double>::infinity());
  const Tensor top = lowest.scatter_reduce(0, rows_.unsqueeze(1).expand_as(logits), logits.detach(), "amax");
  const Tensor weights = (logits - gather(top.narrow(0, 0, num_rows_))).exp();
  return weights / gather(sum(weights));
}

}  // namespace edgeless
