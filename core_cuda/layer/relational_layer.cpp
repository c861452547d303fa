// A relational layer as one autograd node: the sum over relations, to which the rows' own map and the bias are added in
// place, in one pass. The backward casts the gradient to the dtype of the rows once, and adds the own map's gradient of
// x to that of the relations. The layer is composed of other ops on every device; on CUDA relational_layer_cuda.cpp
// computes the calls that fused kernels support.
#include <algorithm>

#include "../projection/calls.h"
#include "../relational/plain.h"
#include "../spmm/calls.h"
#include "relational_layer.h"

namespace edgeless {
namespace {

OptTensor by_head(const OptTensor& edge_weight) {
  return edge_weight ? OptTensor(edge_weight->unsqueeze(1)) : OptTensor();
}

}  // namespace

void check_relational_layer(const char* op, const Tensor& x, const OptTensor& own, const OptTensor& root,
                            const OptTensor& bias, const TypedEdges& graph, int64_t num_dst, int64_t width) {
  check_dim(op, "x", x, 2, "[Ns, K]");
  TORCH_CHECK_VALUE(holds_segments(graph.by_dst), op, ": by_dst must hold the 6 tensors of typed_edges, got ",
                    graph.by_dst.size());
  TORCH_CHECK_VALUE(graph.edges.csr.empty() || graph.edges.csr[0].size(0) == num_dst + 1, op, ": csr must be of ",
                    num_dst, " rows");
  TORCH_CHECK_VALUE(root || !own, op, ": own must come with root");
  if (root) {
    check_dim(op, "root", *root, 2, "[K, M]");
    check_shape(op, "root", *root, {own ? own->size(-1) : x.size(1), width});
    check_dtype(op, "root", *root, x.scalar_type());
    TORCH_CHECK_VALUE(own || num_dst <= x.size(0), op, ": own must be given, for there are more destinations, ",
                      num_dst, ", than sources, ", x.size(0));
  }
  if (own) {
    check_shape(op, "own", *own, {num_dst, own->size(-1)});
    check_dtype(op, "own", *own, x.scalar_type());
  }
  if (!bias) return;
  check_like(op, "bias", *bias, {width}, x);
}

Tensor layer_of_parts(const Tensor& x, const Tensor& weight, const OptTensor& edge_weight, const OptTensor& own,
                      const OptTensor& root, const OptTensor& bias, at::TensorList by_dst, at::TensorList by_src,
                      at::TensorList csr, at::TensorList csc, int64_t num_dst, at::ScalarType out_dtype,
                      at::IntArrayRef max_degrees) {
  const char* op = "edgeless::relational_layer";
  const BelowAutograd below;
  const TypedEdges graph{by_dst, by_src, {csr, csc, max_degrees}};
  check_relational_layer(op, x, own, root, bias, graph, num_dst, WeightSizes(op, weight).out);
  Tensor out;
  if (graph.multiplies_first()) {
    const Tensor products = call_relational_sum(x, weight, {}, by_dst, {}, by_dst[3].size(0), {});
    out = call_spmm(products, by_head(edge_weight), {}, {}, graph.edges, out_dtype);
  } else {
    out = call_relational_sum(x, weight, edge_weight, by_dst, {}, num_dst, out_dtype);
  }
  if (root) {
    call_project_onto(out, own ? *own : x.narrow(0, 0, num_dst), root->t(), bias);
  } else if (bias) {
    out.add_(bias->to(out_dtype));
  }
  return out;
}

std::vector<Tensor> layer_backward_of_parts(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                            const OptTensor& edge_weight, const OptTensor& own, const OptTensor& root,
                                            at::TensorList by_dst, at::TensorList by_src, at::TensorList csr,
                                            at::TensorList csc, c10::List<bool> needs, at::IntArrayRef max_degrees) {
  const char* op = "edgeless::relational_layer_backward";
  const BelowAutograd below;
  const TypedEdges graph{by_dst, by_src, {csr, csc, max_degrees}};
  check_dim(op, "grad", grad, 2, "[Nd, M]");
  check_relational_layer(op, x, own, root, {}, graph, grad.size(0), WeightSizes(op, weight).out);
  TORCH_CHECK_VALUE(needs.size() == 5, op, ": needs must have 5 entries, got ", needs.size());
  const bool of_x = needs[0], of_own = needs[2] && own, of_root = needs[3] && root, of_bias = needs[4];
  const bool as_rows = grad.scalar_type() == x.scalar_type();
  const auto rows_dtype = [&](const Tensor& t) { return call_cast_all(t, x.scalar_type(), false)[0]; };
  const bool wants_rows = root && (of_x || of_own || of_root);
  Tensor rows = as_rows ? grad : Tensor();
  if (!as_rows && (x.is_cuda() || wants_rows)) rows = rows_dtype(grad);
  std::vector<Tensor> results(5);
  if (of_x || needs[1]) {
    const Tensor& given = x.is_cuda() ? rows : grad;  // the CPU kernels read any dtype
    const c10::List<bool> of_sum({of_x, needs[1], false});
    std::vector<Tensor> found;
    if (graph.multiplies_first()) {
      const Tensor sums = call_spmm(given, by_head(edge_weight), {}, {}, graph.edges.reversed()).to(x.scalar_type());
      found = call_relational_sum_backward(sums, x, weight, {}, by_dst, by_src, of_sum);
    } else {
      found = call_relational_sum_backward(given, x, weight, edge_weight, by_dst, by_src, of_sum);
    }
    if (of_x) results[0] = found[0];
    if (needs[1]) results[1] = found[1];
  }
  // Adds the own map's gradient of x. On the CPU, one op reads the rows once for all gradients of the map.
  const bool onto_x = of_x && root && !own;
  const Tensor first_rows = onto_x ? results[0].narrow(0, 0, grad.size(0)) : Tensor();
  const bool with_maps = onto_x && !x.is_cuda();
  if (onto_x && !with_maps) call_project_onto(first_rows, rows, *root, {});
  const bool with_root = of_bias && as_rows && of_root;  // sums of a rounded gradient would be less accurate
  if (of_own || of_root || with_maps) {
    OptTensors grads;
    grads.push_back(rows);
    const Tensor of = own ? *own : x.narrow(0, 0, grad.size(0));
    const c10::List<bool> of_map({of_own || with_maps, of_root, with_root});
    const std::vector<Tensor> found = call_project_backward(grads, of, root->t(), of_map, {}, {});
    if (of_own) results[2] = found[0];
    if (with_maps) first_rows.add_(found[0]);
    if (of_root) results[3] = found[1].t().contiguous();
    if (with_root) results[4] = found[2];
  }
  if (of_bias && !with_root) results[4] = call_column_sums(grad).to(x.scalar_type());
  for (Tensor& result : results) {
    if (!result.defined()) result = at::empty({0}, x.options());
  }
  return results;
}

namespace {

using LayerSignature = Tensor(const Tensor& x, const Tensor& weight, const OptTensor& edge_weight, const OptTensor& own,
                              const OptTensor& root, const OptTensor& bias, at::TensorList by_dst,
                              at::TensorList by_src, at::TensorList csr, at::TensorList csc, c10::SymInt num_dst,
                              at::ScalarType out_dtype, at::IntArrayRef max_degrees);

// Plain form of the layer. Inputs: x, weight, own, root, bias and edge_weight.
struct PlainRelationalLayer {
  PlainRelationalSum sum;
  std::vector<Tensor> csr, csc;  // edges from unique (source, type); empty: neighbours are summed first
  int64_t num_dst;

  variable_list operator()(const variable_list& inputs) const {
    const auto& [x, weight, own, root, bias, edge_weight] =
        std::tie(inputs[0], inputs[1], inputs[2], inputs[3], inputs[4], inputs[5]);
    const auto wide = [](const Tensor& t) { return t.to(opmath_dtype(t.scalar_type())); };
    Tensor out;
    if (csr.empty()) {
      out = sum(x, weight, edge_weight);
    } else {
      const OptTensor by_edge = edge_weight.defined() ? by_head(edge_weight) : OptTensor();
      out = spmm_op(sum(x, weight, {}), by_edge, {}, {}, {csr, csc});
    }
    if (root.defined()) out = out + at::matmul(wide(own.defined() ? own : x.narrow(0, 0, num_dst)), wide(root));
    return {bias.defined() ? out + bias : out};
  }
};

struct RelationalLayer : Function<RelationalLayer> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const OptTensor& own,
                        const OptTensor& root, const OptTensor& bias, const OptTensor* edge_weight,
                        const TypedEdges& graph, const std::function<Tensor()>& compute) {
    // For each direction, the result of typed_edges followed by the edges.
    variable_list in_edges(graph.by_dst.begin(), graph.by_dst.end()),
        out_edges(graph.by_src.begin(), graph.by_src.end());
    in_edges.insert(in_edges.end(), graph.edges.csr.begin(), graph.edges.csr.end());
    out_edges.insert(out_edges.end(), graph.edges.csc.begin(), graph.edges.csc.end());
    save(ctx, {x, weight, own, root, *edge_weight}, {in_edges, out_edges, graph.edges.max_degrees});
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["of_dst"] = static_cast<int64_t>(graph.by_dst.size());
    ctx->saved_data["of_src"] = static_cast<int64_t>(graph.by_src.size());
    return compute();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Saved saved(ctx, 5);
    const OptTensor own = saved.optional(2), root = saved.optional(3), edge_weight = saved.optional(4);
    Needs need(ctx);
    c10::List<bool> needs;
    needs.push_back(need()), needs.push_back(need()), needs.push_back(need(own.has_value()));
    needs.push_back(need(root.has_value()));
    needs.push_back(need(ctx->saved_data.at("has_bias").toBool()));
    const at::TensorList in_edges = saved.graph.csr, out_edges = saved.graph.csc;
    const auto segments = static_cast<size_t>(ctx->saved_data.at("of_dst").toInt());
    const auto of_src = static_cast<size_t>(ctx->saved_data.at("of_src").toInt());
    const auto compute = [&] {
      static const Kernels kernels("edgeless::relational_layer_backward", layer_backward_of_parts);
      return kernels(grads[0], saved[0], saved[1], edge_weight, own, root, in_edges.slice(0, segments),
                     out_edges.slice(0, of_src), in_edges.slice(segments), out_edges.slice(of_src), needs,
                     saved.graph.max_degrees);
    };
    OptTensor bias;
    if (at::GradMode::is_enabled() && ctx->saved_data.at("has_bias").toBool()) {  // is only added, so zeros will do
      bias = with_history(at::zeros({grads[0].size(1)}, saved[0].options()), 2 + own.has_value() + root.has_value());
    }
    const auto make_plain = [&]() -> Plain {
      const bool pairs = in_edges.size() > segments;
      return PlainRelationalLayer{{in_edges.slice(0, segments), pairs ? in_edges[3].size(0) : grads[0].size(0)},
                                  in_edges.slice(segments).vec(),
                                  out_edges.slice(of_src).vec(),
                                  grads[0].size(0)};
    };
    variable_list found =
        differentiable_again({saved[0], saved[1], own, root, bias, edge_weight}, {grads[0]}, make_plain, compute);
    for (size_t i = 0; i < found.size(); ++i) {
      if (!needs[i]) found[i] = Tensor();
    }
    found.resize(8);  // edge_weight, the graph and compute have no gradient
    return found;
  }
};

Tensor differentiable_layer(const Tensor& x, const Tensor& weight, const OptTensor& edge_weight, const OptTensor& own,
                            const OptTensor& root, const OptTensor& bias, at::TensorList by_dst, at::TensorList by_src,
                            at::TensorList csr, at::TensorList csc, c10::SymInt num_dst, at::ScalarType out_dtype,
                            at::IntArrayRef max_degrees) {
  const std::function<Tensor()> compute = [&] {
    static const Kernels kernels("edgeless::relational_layer", static_cast<LayerSignature*>(nullptr));
    return kernels(x, weight, edge_weight, own, root, bias, by_dst, by_src, csr, csc, num_dst, out_dtype, max_degrees);
  };
  if (!at::GradMode::is_enabled()) return compute();
  TORCH_CHECK_VALUE(!edge_weight || !edge_weight->requires_grad(),
                    "edgeless::relational_layer: edge_weight must not need a gradient");
  return RelationalLayer::apply(x, weight, own, root, bias, &edge_weight,
                                TypedEdges{by_dst, by_src, {csr, csc, max_degrees}}, compute);
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CPU, m) {
  m.impl("relational_layer", layer_of_parts);
  m.impl("relational_layer_backward", layer_backward_of_parts);
}

TORCH_LIBRARY_IMPL(edgeless, Autograd, m) { m.impl("relational_layer", differentiable_layer); }

}  // namespace edgeless
