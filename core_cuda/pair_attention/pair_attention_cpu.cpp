// Attention over pairs on the CPU, composed of other ops: products per pair, query terms per segment, single-head
// additive attention whose edges add the term of their segment, and sums of the gradients of these terms. It exists for
// tests without a GPU: layers on the CPU call separate ops, which are faster there
// (shared/functional/pair_attention.py).
#include <ATen/ATen.h>
#include <torch/library.h>

#include <vector>

#include "../attention/calls.h"
#include "../projection/calls.h"
#include "../relational/calls.h"
#include "../spmm/calls.h"
#include "calls.h"

namespace edgeless::cpu {
namespace {

// The products [rows, 1] of rows [..., M] and a vector [M, 1], in the opmath dtype.
Tensor products(const Tensor& rows, const Tensor& vector) {
  const auto dtype = opmath_dtype(rows.scalar_type());
  return at::mm(rows.reshape({-1, rows.size(-1)}).to(dtype), vector.to(dtype));
}

// The gradients of products(): that of the rows, added to `more`, and that of the vector. grad: gradient of the
// products.
Tensor gradient_of_rows(const Tensor& grad, const Tensor& vector, const Tensor& more) {
  const Tensor rows = more.reshape({-1, more.size(-1)}).to(grad.scalar_type());
  return at::addmm(rows, grad, vector.t().to(grad.scalar_type())).to(more.scalar_type()).view(more.sizes());
}
Tensor gradient_of_vector(const Tensor& grad, const Tensor& rows) {
  return at::mm(rows.reshape({-1, rows.size(-1)}).to(grad.scalar_type()).t(), grad).to(rows.scalar_type());
}

// The graph of the attention ops: CSR by destination and, for a backward, CSC by pair. Edge ids are CSR indices or,
// with dropout, the original ids, which seed the draws.
struct PairEdges {
  std::vector<Tensor> csr, csc;
  Tensor ids;  // [E] original ids in CSR order; undefined: ids are CSR indices

  PairEdges(const PairCall& in, bool backward) : csr(in.walks.by_dst().slice(0, 2).vec()) {
    if (backward) csc = in.walks.by_pair().slice(0, 2).vec();
    if (in.dropout) {
      csr.push_back(in.dropout.edge_ids[0]);
      if (backward) csc.push_back(in.dropout.edge_ids[1]);
      ids = in.dropout.edge_ids[0].to(at::kLong);
    } else if (backward) {
      const Tensor numbers = places(in.walks);
      csc.push_back(at::empty_like(numbers).scatter_(0, in.walks.edges_of_segments()[1].to(at::kLong), numbers));
    }
  }

  static Tensor places(const PairWalks& walks) { return at::arange(walks.edges(), walks.by_dst()[0].options()); }
  Tensor to_ids(const Tensor& rows) const {
    return ids.defined() ? at::empty_like(rows).index_copy_(0, ids, rows) : rows;
  }
  Tensor to_places(const Tensor& rows) const { return ids.defined() ? rows.index_select(0, ids) : rows; }
};

// The additive attention over the rows of the pairs.
AttentionCall attention_of(const PairCall& in, const Tensor& values, const Tensor& queries, const PairEdges& edges) {
  const Tensor keys = products(values, in.key).unsqueeze(1);
  return {at::zeros({in.walks.nodes(), 1, 1}, keys.options()),
          keys,
          values.unsqueeze(1),
          {},
          edges.to_ids(queries.index_select(0, in.walks.by_dst()[2]).unsqueeze(1)),
          at::ones({1, 1, 1}, keys.options()),
          {},
          {edges.csr, edges.csc, in.max_degrees},
          in.dropout.seed,
          Score::gat,
          in.negative_slope,
          in.dropout.p};
}

PairOutputs pair_attention(const PairCall& in, bool keep_sums) {
  check_pair_attention("edgeless::pair_attention", in);
  const auto& [x, weight, query, key, bias, walks, negative_slope, max_degrees, dropout] = in;
  const Tensor vectors = products(weight, query).view({walks.types(), x.size(1)}).to(x.scalar_type());
  const Tensor values = call_typed_mm(x.index_select(0, walks.pair_nodes()), weight, walks.offsets(), {});
  const Tensor queries = call_sddmm(x.unsqueeze(1), vectors.unsqueeze(1), {walks.types_of_nodes(), {}}).view(-1);
  const PairEdges by_dst(in, false);
  const auto [attended, stats] = call_attention(attention_of(in, values, queries, by_dst), {});
  Tensor out = attended.squeeze(1), sums = at::empty({0, out.size(1)}, out.options());
  if (bias && keep_sums) {
    sums = out;
    out = sums + *bias;
  } else if (bias) {
    out.add_(*bias);
  }
  return {out, values, vectors, queries, stats.squeeze(2), sums};
}

std::vector<Tensor> pair_attention_backward(const PairCall& in, const PairResults& of, const Tensor& grad,
                                            const PairChoice& needs) {
  const char* op = "edgeless::pair_attention_backward";
  check_pair_attention(op, in);
  check_pair_results(op, in, of, grad);
  const auto& [x, weight, query, key, bias, walks, negative_slope, max_degrees, dropout] = in;
  const auto& [out, values, vectors, queries, shift] = of;
  const auto [of_x, of_weight, of_query, of_key, of_bias] = needs;
  const bool of_values = of_x || of_weight, of_terms = of_values || of_query;
  std::vector<Tensor> results(kPairInputs);
  for (Tensor& t : results) t = at::empty({0}, x.options());
  if (of_bias) results[kPairBias] = call_column_sums(grad);
  if (!of_terms && !of_key) return results;

  // The backward of the attention over edges.
  const PairEdges both(in, true);
  const AttentionCall call = attention_of(in, values, queries, both);
  AttentionGrads given{grad.unsqueeze(1), {}, out.unsqueeze(1), shift.unsqueeze(2)};
  given.needs[kSrc] = true, given.needs[kValue] = of_values, given.needs[kEdgeAttr] = of_terms;
  const std::vector<Tensor> found = call_attention_backward(call, given);
  const Tensor of_keys = found[kSrc].squeeze(2);
  if (of_key) results[kPairKey] = gradient_of_vector(of_keys, values);
  if (!of_terms) return results;

  Tensor of_rows;
  if (of_values) of_rows = gradient_of_rows(of_keys, key, found[kValue].squeeze(1));

  // Gradients of the query terms: sums over the edges of every segment.
  const Tensor edges[] = {walks.edges_of_segments()[0], PairEdges::places(walks)};
  const Tensor of_segments = call_spmm(both.to_places(found[kEdgeAttr]), {}, {}, {}, {edges, {}});
  if (of_x) {
    const Tensor rows = call_typed_mm(of_rows, weight.transpose(1, 2), walks.offsets(), {});
    const Tensor weights = at::cat({at::ones({walks.pairs(), 1}, of_segments.options()), of_segments});
    results[kPairX] = call_spmm(at::cat({rows, vectors}), weights, {}, {}, {walks.sums(), {}});
  }
  if (!of_weight && !of_query) return results;
  const Tensor of_vectors =
      call_spmm(x, of_segments, {}, {}, {walks.nodes_of_types(), {}}, of_segments.scalar_type()).reshape({-1, 1});
  if (of_query) results[kPairQuery] = gradient_of_vector(of_vectors, weight);
  if (of_weight) {
    const Tensor outer = call_typed_outer(x.index_select(0, walks.pair_nodes()), of_rows, walks.offsets(), {});
    results[kPairWeight] = gradient_of_rows(of_vectors, query, outer);
  }
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CPU, m) {
  m.impl("pair_attention", pair_attention_op<pair_attention>);
  m.impl("pair_attention_backward", pair_attention_backward_op<pair_attention_backward>);
  m.impl("pair_attention_backward_over", OneByOne<pair_attention_backward_op<pair_attention_backward>>::call);
}

}  // namespace edgeless::cpu
