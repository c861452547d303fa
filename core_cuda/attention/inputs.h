// The inputs of every attention op and their checks, shared by both devices.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <string_view>

#include "../common/checks.h"
#include "../common/graph_arrays.h"
#include "../common/optional.h"
#include "../common/score.h"

namespace edgeless {

inline Score parse_score(const char* op, std::string_view name) {
  for (size_t k = 0; k < kScoreNames.size(); ++k) {
    if (name == kScoreNames[k]) return static_cast<Score>(k);
  }
  std::string names;
  for (size_t k = 0; k < kScoreNames.size(); ++k) {
    names += (k == 0 ? "'" : k + 1 == kScoreNames.size() ? "' or '" : "', '") + std::string(kScoreNames[k]);
  }
  TORCH_CHECK_VALUE(false, op, ": score must be ", names, "', got '", name, "'");
}

// gat's values per node may be given as [N, H].
inline at::Tensor with_dim(const at::Tensor& t, Score score) {
  return score == Score::gat && t.dim() == 2 ? t.unsqueeze(2) : t;
}

// A call of an attention op, parsed once.
struct AttentionCall {
  at::Tensor dst, src;             // [Nd, H, D], [Ns, H, D]; gat: a value per node, D = 1, in the opmath dtype
  OptTensor value;                 // [Ns, H, C]; none: src
  OptTensor att;                   // [H, D]; cosine: the factor, [H, 1]; in the rows' dtype or their opmath dtype
  OptTensor edge_attr, edge_proj;  // [E, De], [H, D, De]
  OptTensor edge_scale;            // [E, H]
  GraphArrays graph;
  OptTensor seed;  // int64 [1]
  Score score;
  double coefficient, dropout;
  bool donated = false;  // src and value have no other use: the last backward may overwrite them

  // A call without att, edge inputs and dropout.
  static AttentionCall plain(const at::Tensor& dst, const at::Tensor& src, const at::Tensor& value,
                             const GraphArrays& graph, Score score, double coefficient) {
    return {dst, src, value, {}, {}, {}, {}, graph, {}, score, coefficient, 0.0};
  }

  int64_t num_dst() const { return dst.size(0); }
  int64_t num_src() const { return src.size(0); }
  int64_t num_edges() const { return graph.csr[1].size(0); }
  int64_t heads() const { return dst.size(1); }
  int64_t dim() const { return dst.size(2); }
  int64_t channels() const { return value ? value->size(2) : src.size(2); }
  int64_t edge_dim() const { return edge_attr ? edge_attr->size(1) : 0; }
  at::ScalarType rows() const { return score == Score::gat && value ? value->scalar_type() : dst.scalar_type(); }
  at::ScalarType opmath() const { return opmath_dtype(rows()); }
  at::Device device() const { return dst.device(); }
  // CUDA saves the logsumexp; the CPU saves the maximum and 1 / sum separately (cpu/args.h).
  std::array<int64_t, 3> stats_shape() const { return {dst.is_cuda() ? 1 : 2, num_dst(), heads()}; }
};

// Checks an array with one value per edge in CSR or CSC order, which follows the edge ids in the list of graph arrays.
inline void check_behind_ids(const char* op, const char* name, const at::Tensor& t, int64_t edges, at::ScalarType dtype,
                             const at::Device& device) {
  check_shape(op, name, t, {edges});
  check_dtype(op, name, t, dtype);
  check_device(op, name, t, device);
  TORCH_CHECK_VALUE(t.is_contiguous(), op, ": ", name, " must be contiguous");
}

inline void check_dropout(const char* op, double rate, const OptTensor& seed, const at::Device& device) {
  TORCH_CHECK_VALUE(rate >= 0 && rate <= 1, op, ": dropout must lie in [0, 1], got ", rate);
  if (rate == 0) return;
  TORCH_CHECK_VALUE(seed.has_value(), op, ": dropout needs a seed");
  check_shape(op, "seed", *seed, {1});
  check_dtype(op, "seed", *seed, at::kLong);
  check_device(op, "seed", *seed, device);
}

inline void check_call(const char* op, const AttentionCall& in) {
  const auto device = in.device();
  const auto rows = in.rows();
  TORCH_CHECK_VALUE(rows == at::kFloat || rows == at::kDouble || rows == at::kBFloat16 || rows == at::kHalf, op,
                    ": rows must be float32, float64, bfloat16 or float16, got ", rows);
  check_dim(op, "dst", in.dst, 3, "[Nd, H, D]");
  check_dim(op, "src", in.src, 3, "[Ns, H, D]");
  const int64_t heads = in.heads(), dim = in.dim();
  auto check = [&](const char* name, const at::Tensor& t, at::IntArrayRef shape, at::ScalarType dtype) {
    check_shape(op, name, t, shape);
    check_dtype(op, name, t, dtype);
    check_device(op, name, t, device);
  };
  check("src", in.src, {in.num_src(), heads, dim}, in.score == Score::gat ? in.opmath() : rows);
  check_dtype(op, "dst", in.dst, in.src.scalar_type());
  if (in.value) {
    check_dim(op, "value", *in.value, 3, "[Ns, H, C]");
    check("value", *in.value, {in.num_src(), heads, in.channels()}, rows);
  }
  check_compressed(op, "csr", in.graph.csr, in.num_dst(), in.graph.csr.size() > 1 ? in.num_edges() : 0, device);
  if (!in.graph.csc.empty()) {
    const bool places = in.graph.csc.size() == 4;
    check_compressed(op, "csc", places ? in.graph.csc.slice(0, 3) : in.graph.csc, in.num_src(), in.num_edges(), device);
    const auto index = in.graph.csc[1].scalar_type();
    if (places) check_behind_ids(op, "places of csc", in.graph.csc[3], in.num_edges(), index, device);
  }
  const bool cosine = in.score == Score::cosine;
  TORCH_CHECK_VALUE(in.att.has_value() == (in.score == Score::gatv2 || cosine), op,
                    ": att belongs to the scores 'gatv2' and 'cosine'");
  if (in.att) {
    const bool of_rows = in.att->scalar_type() == rows;
    check("att", *in.att, {heads, cosine ? 1 : dim}, of_rows ? rows : in.opmath());
  }
  TORCH_CHECK_VALUE(in.score != Score::gat || dim == 1, op, ": the score 'gat' needs D = 1, got ", dim);
  if (cosine) {
    TORCH_CHECK_VALUE(!in.value, op, ": the score 'cosine' takes no value, its values are src");
    TORCH_CHECK_VALUE(!in.edge_attr && !in.edge_proj, op, ": the score 'cosine' takes no edge_attr");
    TORCH_CHECK_VALUE(in.coefficient >= 0, op, ": coefficient, the least norm, must not be negative, got ",
                      in.coefficient);
  }
  TORCH_CHECK_VALUE(in.edge_attr.has_value() == in.edge_proj.has_value(), op, ": edge_attr and edge_proj go together");
  if (in.edge_attr) {
    check_dim(op, "edge_attr", *in.edge_attr, 2, "[E, De]");
    // For gat, rows() depends on whether the op has values.
    const auto attr = in.edge_attr->scalar_type();
    const bool of_gat = in.score == Score::gat && opmath_dtype(attr) == in.opmath();
    check("edge_attr", *in.edge_attr, {in.num_edges(), in.edge_dim()}, of_gat ? attr : rows);
    check("edge_proj", *in.edge_proj, {heads, dim, in.edge_dim()}, in.opmath());
    TORCH_CHECK_VALUE(in.score != Score::dot || !in.value || in.channels() == dim, op,
                      ": an edge term of the score 'dot' needs C = D, got C = ", in.channels(), " and D = ", dim);
  }
  if (in.edge_scale) check("edge_scale", *in.edge_scale, {in.num_edges(), heads}, in.opmath());
  check_dropout(op, in.dropout, in.seed, device);
}

// Checks the softmax statistics that the forward saved.
inline void check_stats(const char* op, const AttentionCall& in, const at::Tensor& stats) {
  check_shape(op, "softmax_stats", stats, in.stats_shape());
  check_dtype(op, "softmax_stats", stats, in.opmath());
  check_device(op, "softmax_stats", stats, in.device());
}

// Checks the output and its gradient, the inputs of a backward.
inline void check_output(const char* op, const AttentionCall& in, const at::Tensor& grad_out, const at::Tensor& out) {
  check_shape(op, "grad_out", grad_out, {in.num_dst(), in.heads(), in.channels()});
  check_shape(op, "out", out, grad_out.sizes());
  check_device(op, "grad_out", grad_out, in.device());
  check_device(op, "out", out, in.device());
}

// True if kernels can write rows [N, H, C] to `t` in place: each row is contiguous, the stride of rows is a multiple of
// a head, and rows do not overlap.
inline bool can_be_written(const at::Tensor& t) {
  if (t.numel() == 0) return true;
  const int64_t row = t.size(1) * t.size(2);
  return t.select(0, 0).is_contiguous() && t.stride(0) % t.size(2) == 0 && (t.size(0) == 1 || t.stride(0) >= row);
}

// Checks the tensors that receive the gradients of dst, src and value.
inline void check_into(const char* op, const AttentionCall& in, at::TensorList into) {
  TORCH_CHECK_VALUE(in.score == Score::gatv2 || (in.score == Score::dot && in.value), op,
                    ": the score must be 'gatv2', or 'dot' with a value");
  const at::Tensor* rows[] = {&in.dst, &in.src, in.value ? &*in.value : nullptr};
  const size_t count = in.value ? 3 : 2;
  TORCH_CHECK_VALUE(into.size() == count, op, ": into must hold ", count, " tensors, got ", into.size());
  for (size_t i = 0; i < count; ++i) {
    check_shape(op, "into", into[i], rows[i]->sizes());
    check_dtype(op, "into", into[i], in.rows());
    check_device(op, "into", into[i], in.device());
    TORCH_CHECK_VALUE(can_be_written(into[i]), op,
                      ": rows of into must be contiguous and whole heads apart, got strides ", into[i].strides());
  }
}

}  // namespace edgeless
