// The edge term of attention on CUDA and its gradients, computed by kernels before and after the passes, in the space
// of the De edge features.
#pragma once

#include <array>

#include "call_cuda.h"
#include "cuda/edge_terms.h"

namespace edgeless::cuda {

// The graph of a call in the edge order of its passes. With by_position, per-edge arrays other than the features are in
// CSR order, and the source pass finds an edge's values by the CSC-to-CSR permutation. Calls with edge_scale, which is
// given by edge id, keep that order.
class EdgeOrder {
 public:
  EdgeOrder(const AttentionCall& in, bool may_be_by_position)
      : by_position(may_be_by_position && in.edge_attr && in.score != Score::gatv2 && in.score != Score::cosine &&
                    !in.edge_scale),
        graph_(in.graph) {}

  const bool by_position;

  at::TensorList csr() const { return by_position ? graph_.csr.slice(0, 2) : graph_.csr; }

  at::TensorList csc() {
    if (!by_position) return graph_.csc.slice(0, std::min<size_t>(3, graph_.csc.size()));
    csc_ = {graph_.csc[0], graph_.csc[1]};
    if (const Tensor found = places(); found.defined()) csc_.push_back(found);
    return csc_;
  }

 private:
  // The CSC-to-CSR permutation, from the graph if it holds one, else computed; undefined if it is the identity.
  Tensor places() const {
    if (graph_.csc.size() == 4) return graph_.csc[3];
    const Tensor ids = graph_.csc.size() == 3 ? graph_.csc[2] : Tensor();
    if (graph_.csr.size() < 3) return ids;
    const Tensor& in_csr = graph_.csr[2];
    const Tensor found = at::empty_like(in_csr);
    // Takes the minimum, since the unused entries beyond the last row may hold the id of any edge.
    found.scatter_reduce_(0, in_csr.to(at::kLong), at::arange(in_csr.size(0), in_csr.options()), "amin", false);
    return ids.defined() ? found.index_select(0, ids) : found;
  }

  const GraphArrays& graph_;
  std::vector<Tensor> csc_;
};

// Describes a call's edges to the edge kernels. `attr` must be contiguous and outlive the result.
inline EdgeFeatures edge_features(const AttentionCall& in, const Tensor& attr, bool by_position) {
  EdgeFeatures edges;
  edges.graph = compressed_graph(in.graph.csr);
  edges.wide_index = in.graph.csr[0].scalar_type() == at::kLong;
  edges.by_position = by_position;
  edges.attr = attr.const_data_ptr();
  edges.storage = storage_of(attr.scalar_type());
  edges.dim = static_cast<int>(in.edge_dim()), edges.heads = static_cast<int>(in.heads());
  return edges;
}

// The edge term of the score 'dot' is added to key and value: <q, W e> = <W^T q, e> and sum w (W e) = W sum w e. So all
// work per edge uses the De edge features, and the nodes' rows are projected before or after it.
//
// rows [n, H, D] -> W^T rows, [n, H, De]
inline Tensor to_edge_space(const Tensor& rows, const Tensor& proj) {
  return at::bmm(rows.to(proj.scalar_type()).transpose(0, 1), proj).transpose(0, 1).contiguous();
}

// sums [n, H, De] -> W sums, [n, H, D]
inline Tensor from_edge_space(const Tensor& sums, const Tensor& proj) {
  return at::bmm(sums.transpose(0, 1), proj.transpose(1, 2)).transpose(0, 1);
}

// Passes in CSR order cannot draw dropout, which depends on edge ids. For such passes, computes the dropout factors in
// advance and returns the call with these as edge_scale instead of dropout. Empty if the call needs no such change.
template <class A>
Optional<AttentionCall> with_drawn(const AttentionCall& in, const EdgeOrder& order) {
  if (!order.by_position || in.dropout == 0) return {};
  const OnDevice on_device(in.device());
  AttentionCall drawn = in;
  drawn.edge_scale = at::empty({in.num_edges(), in.heads()}, in.dst.options().dtype(in.opmath()));
  EdgeDrops<A> args;
  args.edges = edge_features(in, *in.edge_attr, true);
  args.seed = in.seed->const_data_ptr<int64_t>();
  set_dropout_rate(args, in.dropout);
  args.out = drawn.edge_scale->template data_ptr<A>();
  edge_drops(args, on_device.queue());
  drawn.dropout = 0, drawn.seed.reset();
  return drawn;
}

// Returns factor * <rows[r, h], attr[e]> for every edge e of row r, [E, H] and, if `more` is defined, <more[r, h],
// attr[e]>.
template <class A>
std::array<Tensor, 2> products_of_edges(const Call<A>& call, const AttentionCall& in, bool by_position,
                                        const Tensor& rows, double factor, const Tensor& more = {}) {
  const Tensor attr = in.edge_attr->contiguous();
  EdgeDots<A> args;
  args.edges = edge_features(in, attr, by_position);
  args.one_row = rows.dim() == 2;
  std::array<Tensor, 2> out{call.empty({in.num_edges(), in.heads()})};
  args.rows[0] = rows.data_ptr<A>(), args.factor[0] = A(factor), args.out[0] = out[0].template data_ptr<A>();
  if (more.defined()) {
    out[1] = at::empty_like(out[0]);
    args.rows[1] = more.data_ptr<A>(), args.out[1] = out[1].template data_ptr<A>();
  }
  edge_dots(args, call.queue());
  return out;
}

// The gradient of the edge features: the sum over heads of weight [E, H] times rows, which are [n, H, De] or [H, De].
template <class A>
void features_gradient(const Call<A>& call, const AttentionCall& in, bool by_position, const Tensor& weight,
                       const Tensor& rows, const Tensor& more_weight, const Tensor& more_rows, const Tensor& out) {
  EdgeSums<A> args;
  args.edges = edge_features(in, out, by_position);
  args.one_row = rows.dim() == 2;
  args.weight[0] = weight.data_ptr<A>(), args.rows[0] = rows.data_ptr<A>();
  if (more_weight.defined()) {
    args.weight[1] = more_weight.data_ptr<A>(), args.rows[1] = more_rows.data_ptr<A>();
  }
  args.out = out.data_ptr();
  edge_sums(args, call.queue());
}

// Runs edge_products and adds up the partial sums of its blocks: [columns, De].
template <class A>
Tensor sums_of_edges(const Call<A>& call, const AttentionCall& in, EdgeProducts<A>& args) {
  const int64_t columns = in.heads() * args.channels, units = (in.num_edges() + kEdgesOfUnit - 1) / kEdgesOfUnit;
  const Tensor sums = call.empty({columns, in.edge_dim()});
  if (units == 0 || sums.numel() == 0) return sums.zero_();
  args.blocks = static_cast<int>(std::min<int64_t>(units, kBlocksOfProducts * device_of(in.device()).multiprocessors));
  const Tensor partial = call.empty({args.blocks, columns, in.edge_dim()});
  args.partial = partial.template data_ptr<A>();
  edge_products(args, call.queue());
  sum_rows(args.partial, args.blocks, static_cast<const A*>(nullptr), int64_t(0), sums.numel(), 1, sums.data_ptr(),
           storage_of(sums.scalar_type()), call.queue());
  return sums;
}

// The sum over each row's edges of weight times edge features, [Nd, H, De]. The weights are the softmax of `logits`
// with dropout and scale, or `given` unchanged. Runs as a forward pass that gathers edges as if they were sources.
template <class A>
Tensor aggregate_edges(const AttentionCall& in, const EdgeOrder& order, const Tensor& logits, const Tensor& given) {
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
    call.run(Pass::forward, at::TensorList(graph, order.by_position ? 2 : 3), in.num_edges());
    parts.push_back(out);
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts, 2);
}

// The sum over n of a[n, h, i] b[n, h, j]: [H, I, J]. A GEMM per head has few output tiles, so few thread blocks would
// sum all rows; many rows are therefore split into parts with a GEMM each.
inline Tensor products_of_rows(const Tensor& a, const Tensor& b) {
  constexpr int64_t kParts = 128, kManyRows = 8192;  // fewer rows take less time than the parts' launches
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

// The edge term of the logits, [E, H].
template <class A>
Tensor logit_term(const Call<A>& call, const AttentionCall& in, bool by_position, const Tensor& projected_dst) {
  if (in.score != Score::gat) return products_of_edges(call, in, by_position, projected_dst, in.coefficient)[0];
  return products_of_edges(call, in, by_position, in.edge_proj->select(1, 0).contiguous(), 1)[0];
}

// The gradients of gat's edge term, <W_h, e>.
template <class A>
void gat_edge_gradients(const Call<A>& call, const AttentionCall& in, bool by_position, const Tensor& ds,
                        const AttentionChoice& needs, std::vector<Tensor>& grads) {
  if (needs[kEdgeAttr]) {
    const Tensor proj = in.edge_proj->select(1, 0).contiguous();
    features_gradient(call, in, by_position, ds, proj, {}, {}, grads[kEdgeAttr]);
  }
  if (!needs[kEdgeProj]) return;
  const Tensor attr = in.edge_attr->contiguous();
  EdgeProducts<A> args;
  args.edges = edge_features(in, attr, by_position);
  args.ds = ds.data_ptr<A>();
  grads[kEdgeProj].copy_(sums_of_edges(call, in, args).unsqueeze(1));
}

// True if edge_products computes all needed gradients of gatv2's edge term. It reads ds in CSR order.
template <class A>
bool makes_all_by_products(const AttentionCall& in, const AttentionChoice& needs) {
  const int heads = static_cast<int>(in.heads()), channels = static_cast<int>(in.dim());
  return in.edge_dim() <= kMostHidden && (!needs[kEdgeAttr] || makes_attr_grad<A>(heads, channels));
}

// The gradients of gatv2's edge term. With G = ds LeakyReLU'(hidden), [E, H D]: d attr = G (att W), d W = att sum of G
// e^T, and the edge term's contribution to d att, sum of W G^T e, is added to att_share (cuda/scores.cuh). For many
// features, and for d attr with many columns, G is materialized for a chunk of edges at a time. ds: by edge id, or in
// CSR order if the call's ds_in_order is set, which is makes_all_by_products().
template <class A>
void gatv2_edge_gradients(const Call<A>& call, const AttentionCall& in, const Tensor& ds, const AttentionChoice& needs,
                          std::vector<Tensor>& grads, Tensor& att_share) {
  const int64_t edges = in.num_edges(), width = in.heads() * in.dim();
  const Tensor proj = in.edge_proj->contiguous().view({width, in.edge_dim()});
  const Tensor weighted = (in.att->unsqueeze(2) * *in.edge_proj).to(in.opmath()).reshape({width, in.edge_dim()});
  const Tensor attr = in.edge_attr->contiguous();
  const bool of_attr = needs[kEdgeAttr], of_sums = needs[kEdgeProj] || needs[kAtt];
  EdgeProducts<A> args;
  args.edges = edge_features(in, attr, call.args.ds_in_order);
  args.ds = ds.data_ptr<A>(), args.dst = call.args.dst, args.src = call.args.src;
  args.channels = static_cast<int>(in.dim()), args.slope = A(in.coefficient);
  args.proj = proj.data_ptr<A>();
  // A function of sizes alone, so that sums do not depend on which gradients are needed.
  const bool few = in.edge_dim() <= kMostHidden;
  const bool of_attr_too = of_attr && few && makes_attr_grad<A>(args.edges.heads, args.channels);
  Tensor sums;
  if (few && (of_sums || of_attr_too)) {
    if (of_attr_too) {
      args.weighted = weighted.data_ptr<A>();
      args.attr_grad = grads[kEdgeAttr].data_ptr();
    }
    sums = sums_of_edges(call, in, args);
  } else if (of_sums) {
    sums = at::zeros({width, in.edge_dim()}, call.numbers());
  }
  if (!call.args.ds_in_order) {
    const auto ends = at::empty({2, edges}, in.graph.csr[1].options());
    const void *dst_end = ends[0].const_data_ptr(), *src_end = ends[1].const_data_ptr();
    ends_of_edges(args.edges, ends[0].data_ptr(), ends[1].data_ptr(), call.queue());
    const int64_t chunk = std::max<int64_t>(1024, (int64_t(32) << 20) / (width * int64_t(sizeof(A))));
    for (int64_t first = 0; first < edges; first += chunk) {
      const int64_t count = std::min(chunk, edges - first);
      const Tensor some = attr.narrow(0, first, count).to(in.opmath());
      Tensor hidden = at::mm(some, proj.t());
      hidden_gradients(args, first, count, dst_end, src_end, hidden.data_ptr<A>(), call.queue());
      if (of_attr) grads[kEdgeAttr].narrow(0, first, count).copy_(at::mm(hidden, weighted));
      if (of_sums && !few) sums.addmm_(hidden.t(), some);
    }
  }
  if (needs[kEdgeProj]) grads[kEdgeProj].copy_(in.att->unsqueeze(2) * sums.view_as(*in.edge_proj));
  if (needs[kAtt]) att_share.add_((proj * sums).sum(1).view({in.heads(), in.dim()}));
}

}  // namespace edgeless::cuda
