// A relational layer on CUDA. If the fused kernels support its sums and its own map, the forward is two launches: the
// rows' own map and the bias are added while the segments of each row are summed. The backward is four: one pass over
// the gradient for its cast and for the gradients of root and bias, then the segments, the rows, and the sums of
// partial gradients. Otherwise the layer is composed of other ops.
#include <utility>

#include "../projection/calls.h"
#include "../relational/calls.h"
#include "../relational/fused_cuda.h"
#include "relational_layer.h"

namespace edgeless::cuda {
namespace {

// The rows' own map, if there is one: its input rows and its weight.
struct OwnMap {
  Tensor rows, root;

  OwnMap(const Tensor& x, const OptTensor& own, const OptTensor& root_, int64_t num_dst) {
    if (root_) rows = own ? *own : x.narrow(0, 0, num_dst), root = *root_;
  }

  bool fuses() const { return !root.defined() || relational::fuses_map(rows, root); }
};

Tensor layer(const Tensor& x, const Tensor& weight, const OptTensor& edge_weight, const OptTensor& own,
             const OptTensor& root, const OptTensor& bias, at::TensorList by_dst, at::TensorList by_src,
             at::TensorList csr, at::TensorList csc, int64_t num_dst, at::ScalarType out_dtype,
             at::IntArrayRef max_degrees) {
  const char* op = "edgeless::relational_layer";
  if (!csr.empty() || by_dst.size() < kTiledSegments) {
    return layer_of_parts(x, weight, edge_weight, own, root, bias, by_dst, by_src, csr, csc, num_dst, out_dtype,
                          max_degrees);
  }
  check_relational_layer(op, x, own, root, bias, {by_dst, by_src, {csr, csc, max_degrees}}, num_dst,
                         WeightSizes(op, weight).out);
  check_relational_sum(op, x, weight, edge_weight, by_dst);
  const relational::Segments segments(by_dst);
  segments.check_rows(op, "by_dst", num_dst);
  const OwnMap map(x, own, root, num_dst);
  const OnDevice on_device(x.device());
  if (!relational::fuses(x, weight, segments) || !map.fuses()) {
    return layer_of_parts(x, weight, edge_weight, own, root, bias, by_dst, by_src, csr, csc, num_dst, out_dtype,
                          max_degrees);
  }
  return relational::fused_sum(x, weight, edge_weight, segments, num_dst, out_dtype,
                               {map.rows, map.root, bias ? *bias : Tensor()});
}

std::vector<Tensor> layer_backward(const Tensor& given, const Tensor& x, const Tensor& weight,
                                   const OptTensor& edge_weight, const OptTensor& own, const OptTensor& root,
                                   at::TensorList by_dst, at::TensorList by_src, at::TensorList csr, at::TensorList csc,
                                   c10::List<bool> needs, at::IntArrayRef max_degrees) {
  const char* op = "edgeless::relational_layer_backward";
  const auto of_parts = [&] {
    return layer_backward_of_parts(given, x, weight, edge_weight, own, root, by_dst, by_src, csr, csc, std::move(needs),
                                   max_degrees);
  };
  if (!csr.empty() || by_src.size() < kTiledSegments) return of_parts();
  check_dim(op, "grad", given, 2, "[Nd, M]");
  check_relational_layer(op, x, own, root, {}, {by_dst, by_src, {csr, csc, max_degrees}}, given.size(0),
                         WeightSizes(op, weight).out);
  check_relational_sum(op, x, weight, edge_weight, by_dst);
  check_segments(op, "by_src", by_src, weight.size(0), x.device());
  TORCH_CHECK_VALUE(needs.size() == 5, op, ": needs must have 5 entries, got ", needs.size());
  const relational::Segments segments(by_src);
  segments.check_rows(op, "by_src", x.size(0));
  const OwnMap map(x, own, root, given.size(0));
  const auto dtype = given.scalar_type();
  const OnDevice on_device(x.device());
  if (!relational::fuses(x, weight, segments) || !map.fuses() || (dtype != x.scalar_type() && dtype != at::kFloat)) {
    return of_parts();
  }
  const bool of_x = needs[0], of_weight = needs[1], of_own = needs[2] && own, of_root = needs[3] && root;
  const Tensor grad =
      relational::has_vectors(given, given.size(1)) && given.stride(1) == 1 ? given : given.contiguous();
  const relational::OwnGradients sums =
      relational::gradients_of_own(grad, map.rows, x.scalar_type(), of_root, needs[4]);
  const bool onto_x = of_x && root && !own;
  const relational::FusedGradients found = relational::fused_gradients(
      sums.rows, x, weight, edge_weight, segments, {of_x, of_weight}, onto_x ? *root : Tensor(), sums);
  std::vector<Tensor> results{found.rows, found.weight, Tensor(), found.root, found.bias};
  if (of_own) {
    OptTensors grads;
    grads.push_back(sums.rows);
    results[2] = call_project_backward(grads, *own, root->t(), c10::List<bool>({true, false, false}), {}, {})[0];
  }
  for (Tensor& result : results) {
    if (!result.defined()) result = at::empty({0}, x.options());
  }
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CUDA, m) {
  m.impl("relational_layer", layer);
  m.impl("relational_layer_backward", layer_backward);
}

}  // namespace edgeless::cuda
