// What edge features add to the attention on CUDA, and their gradients: around the passes, in the De features of an
// edge or a chunk of edges at a time.
#pragma once

#include <array>

#include "call_cuda.h"

namespace edgeless::cuda {

// Destination and source of each edge by its original id.
struct EdgeEnds {
  Tensor dst, src;
};

template <class A>
EdgeEnds ends_of(const Call<A>& call, const AttentionCall& in) {
  EdgeEnds ends{at::empty_like(in.graph.csr[1]), at::empty_like(in.graph.csr[1])};
  with_index(in.graph.csr[0], [&](auto zero) {
    using I = decltype(zero);
    C10_CUDA_CHECK(
        edge_ends<I>(compressed_graph(in.graph.csr), ends.dst.data_ptr<I>(), ends.src.data_ptr<I>(), call.stream()));
    return 0;
  });
  return ends;
}

// The edge term of the score 'dot' stands in key and value: <q, W e> = <W^T q, e> and sum w (W e) = W sum w e, so all
// that is done by edge is done in the De features of an edge, with the nodes' rows projected before or after.
//
// rows [n, H, D] -> W^T rows, [n, H, De]
inline Tensor to_edge_space(const Tensor& rows, const Tensor& proj) {
  return at::bmm(rows.to(proj.scalar_type()).transpose(0, 1), proj).transpose(0, 1).contiguous();
}

// sums [n, H, De] -> W sums, [n, H, D]
inline Tensor from_edge_space(const Tensor& sums, const Tensor& proj) {
  return at::bmm(sums.transpose(0, 1), proj.transpose(1, 2)).transpose(0, 1);
}

template <class A>
Tensor edge_products(const Call<A>& call, const AttentionCall& in, const Tensor& rows, const EdgeEnds& ends,
                     double factor) {
  Tensor out = call.empty({in.num_edges(), in.heads()});
  const Tensor attr = in.edge_attr->contiguous();
  with_index(ends.dst, [&](auto zero) {
    using I = decltype(zero);
    C10_CUDA_CHECK((edge_dot<A, I>(rows.data_ptr<A>(), ends.dst.data_ptr<I>(), attr.data_ptr(), storage_of(in.rows()),
                                   in.num_edges(), int(in.heads()), int(in.edge_dim()), A(factor),
                                   out.template data_ptr<A>(), call.stream())));
    return 0;
  });
  return out;
}

// [Nd, H, De]: the sum over a row's edges of a weight times the edge's features. The weights are the softmax of
// `logits` with dropout and scale, or `given` as they are. Edges are gathered as if they were sources.
template <class A>
Tensor aggregate_edges(const AttentionCall& in, const Tensor& logits, const Tensor& given) {
  const int64_t most = 4 * 32 * 16 / in.edge_attr->element_size();
  std::vector<Tensor> parts;
  const Tensor ids = in.graph.csr.size() == 3 ? in.graph.csr[2] : at::arange(in.num_edges(), in.graph.csr[1].options());
  for (int64_t first = 0; first < in.edge_dim(); first += most) {
    const int64_t width = std::min(most, in.edge_dim() - first);
    const Tensor attr = in.edge_attr->narrow(1, first, width).unsqueeze(1);
    AttentionCall edges = in;
    edges.dst = in.dst.narrow(2, 0, 1), edges.src = attr.expand({in.num_edges(), in.heads(), width});
    edges.value = attr, edges.score = Score::gat, edges.coefficient = 1;
    edges.edge_attr.reset(), edges.edge_proj.reset();
    Call<A> call(edges);
    call.args.dst = call.args.src = {};
    call.args.logit_term = logits.defined() ? logits.data_ptr<A>() : nullptr;
    call.args.given = given.defined() ? given.data_ptr<A>() : nullptr;
    Tensor out = call.empty({in.num_dst(), in.heads(), width});
    call.args.out = call.out_rows(out);
    const Tensor graph[] = {in.graph.csr[0], ids, ids};
    call.run(Pass::forward, graph, in.num_edges());
    parts.push_back(out);
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts, 2);
}

// The sum over the rows of a[n, h, i] b[n, h, j]: [H, I, J]. A product a head has few tiles of so few numbers, and a
// block for each would add up all rows: many rows are cut into parts, each with a product of its own.
inline Tensor products_of_rows(const Tensor& a, const Tensor& b) {
  constexpr int64_t kParts = 128, kManyRows = 8192;  // fewer take less time than the parts' launches
  const int64_t of_part = a.size(0) < kManyRows ? 0 : a.size(0) / kParts, rows = of_part * kParts;
  const auto rest = [&](const Tensor& t) { return t.slice(0, rows).transpose(0, 1); };  // [H, N, I]
  const Tensor sum = at::bmm(rest(a).transpose(1, 2), rest(b));
  if (rows == 0) return sum;
  const Tensor parts = at::empty({a.size(1), kParts, a.size(2), b.size(2)}, sum.options());
  for (int64_t head = 0; head < a.size(1); ++head) {
    const auto of = [&](const Tensor& t) {
      return t.narrow(0, 0, rows).select(1, head).unflatten(0, {kParts, of_part});
    };
    Tensor to = parts[head];
    at::bmm_out(to, of(a).transpose(1, 2), of(b));
  }
  return sum + parts.sum(1);
}

// What is added to the logit by edge, if anything: [E, H].
template <class A>
Tensor logit_term(const Call<A>& call, const AttentionCall& in, const EdgeEnds& ends, const Tensor& projected_dst) {
  if (in.score == Score::gat) return at::mm(in.edge_attr->to(in.opmath()), in.edge_proj->select(1, 0).t());
  return edge_products(call, in, projected_dst, ends, in.coefficient);
}

// gatv2's edge term, in chunks of edges: G = ds LeakyReLU'(hidden) [chunk, H D] is made of the term in place, then
// d attr = G (att W), d W = att G^T e, and att gets the edge term's share, sum of W G^T e (scores.cuh).
template <class A>
void gatv2_edge_gradients(const Call<A>& call, const AttentionCall& in, const Tensor& ds, const AttentionChoice& needs,
                          std::vector<Tensor>& grads, Tensor& att_share) {
  const EdgeEnds ends = ends_of(call, in);
  const int64_t edges = in.num_edges(), width = in.heads() * in.dim();
  const Tensor proj = in.edge_proj->contiguous().view({width, in.edge_dim()});
  const Tensor weighted = (in.att->unsqueeze(2) * *in.edge_proj).view({width, in.edge_dim()});
  Tensor sums = at::zeros({width, in.edge_dim()}, call.numbers());
  const int64_t chunk = std::max<int64_t>(1024, (int64_t(32) << 20) / (width * int64_t(sizeof(A))));
  for (int64_t first = 0; first < edges; first += chunk) {
    const int64_t count = std::min(chunk, edges - first);
    const Tensor attr = in.edge_attr->narrow(0, first, count).to(in.opmath());
    Tensor hidden = at::mm(attr, proj.t());
    with_index(ends.dst, [&](auto zero) {
      using I = decltype(zero);
      C10_CUDA_CHECK((hidden_gradient<A, I>(call.args.dst, call.args.src, storage_of(in.rows()), ends.dst.data_ptr<I>(),
                                            ends.src.data_ptr<I>(), ds.data_ptr<A>(), first, count, int(in.heads()),
                                            int(in.dim()), A(in.coefficient), hidden.data_ptr<A>(), call.stream())));
      return 0;
    });
    if (needs[kEdgeAttr]) grads[kEdgeAttr].narrow(0, first, count).copy_(at::mm(hidden, weighted));
    if (needs[kEdgeProj] || needs[kAtt]) sums.addmm_(hidden.t(), attr);
  }
  if (needs[kEdgeProj]) grads[kEdgeProj].copy_(in.att->unsqueeze(2) * sums.view_as(*in.edge_proj));
  if (needs[kAtt]) att_share.add_((proj * sums).sum(1).view({in.heads(), in.dim()}));
}

}  // namespace edgeless::cuda
