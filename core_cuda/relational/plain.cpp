#include "plain.h"

#include <ATen/ATen.h>

namespace edgeless {
namespace {

// Expands block-diagonal weights [types, B, K / B, M / B] to whole matrices [types, K, M].
Tensor whole_matrices(const Tensor& weight) {
  if (weight.dim() == 3) return weight;
  const Tensor whole = at::diag_embed(weight.permute({0, 2, 3, 1})).permute({0, 3, 1, 4, 2});
  return whole.reshape({weight.size(0), weight.size(1) * weight.size(2), weight.size(1) * weight.size(3)});
}

}  // namespace

Tensor typed_mm_op(const Tensor& x, const Tensor& weight, const Tensor& offsets, const OptTensor& rows) {
  static const Kernels kernels("edgeless::typed_mm", typed_mm_op);
  return kernels.op(x, weight, offsets, rows);
}

Tensor PlainRelationalSum::operator()(const Tensor& given, const Tensor& weight, const Tensor& edge_weight) const {
  const auto dtype = opmath_dtype(given.scalar_type());
  const Tensor x = given.to(dtype), type_ptr = by_dst_[0].to(at::kLong), &rows = by_dst_[1], &ptr = by_dst_[2],
               &indices = by_dst_[3], &ids = by_dst_[4];
  const int64_t edges = indices.size(0);
  const bool of_one_edge = ptr.numel() == 0;  // each segment is one edge
  // The arrays of a compiled program may have room for more segments than there are. The surplus segments are set to
  // begin after the last edge.
  const auto begins_of_segments = [&] {
    const Tensor places = at::arange(ptr.size(0), type_ptr.options());
    return at::where(places < type_ptr[-1], ptr.to(at::kLong), at::full({}, edges, type_ptr.options()));
  };
  const Tensor begins = of_one_edge ? Tensor() : begins_of_segments();
  const Tensor segments = of_one_edge ? at::arange(edges, type_ptr.options()) : ranges_of(begins, edges);
  const EdgeEnds from(indices, x.size(0)), to(rows.index_select(0, segments), num_dst_);
  const Tensor offsets = of_one_edge ? type_ptr : begins.index_select(0, type_ptr);
  Tensor products = typed_mm_op(from.gather(x), whole_matrices(weight.to(dtype)), offsets, {});
  if (edge_weight.defined()) products = products * edge_weight.index_select(0, ids).unsqueeze(1);
  if (by_dst_.size() == kWeighedSegments) {
    const Tensor& weights = by_dst_[kWeighedSegments - 1];
    products = products * (weights.dim() == 2 ? weights.index_select(0, segments) : weights.unsqueeze(1));
  }
  return to.sum(products);
}

}  // namespace edgeless
