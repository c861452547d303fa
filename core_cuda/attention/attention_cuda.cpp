// The attention ops on CUDA: checks, allocation and the order of the passes. The kernels and what they are given are
// in cuda/. Nothing here waits for the device.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <vector>

#include "../common/dropout.h"
#include "../common/launch.h"
#include "../common/storage_of.h"
#include "../common/vector_rows.h"
#include "../graph/graph_cuda.h"
#include "cuda/kernels.h"
#include "inputs.h"

namespace edgeless::cuda {
namespace {

using at::Tensor;

Score score_of(ScoreKind kind) {
  switch (kind) {
    case ScoreKind::dot: return Score::dot;
    case ScoreKind::gatv2: return Score::gatv2;
    case ScoreKind::cosine: return Score::cosine;
    default: return Score::gat;
  }
}

template <class F>
auto with_index(const Tensor& index, F&& f) {
  return index.scalar_type() == at::kLong ? f(int64_t{}) : f(int32_t{});
}

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

OutRows out_rows(const Tensor& t, at::ScalarType storage) {
  OutRows out;
  out.base = static_cast<char*>(t.data_ptr());
  out.dim = static_cast<int32_t>(t.size(2));
  out.heads = static_cast<int32_t>(t.stride(0) / std::max<int64_t>(1, t.size(2)));
  out.wide = t.scalar_type() != storage;
  out.aligned = t.size(2) * t.element_size() % 16 == 0 && vector_bytes(t) == 16;
  out.whole = out.aligned && !out.wide;
  return out;
}

Device device_of(const at::Device& device) {
  return {device_attribute(cudaDevAttrMultiProcessorCount, device.index()),
          device_attribute(cudaDevAttrL2CacheSize, device.index())};
}

// One call of an op: the arguments of its passes and the tensors that keep their memory alive.
template <class A>
class Call {
 public:
  Args<A> args{};
  Problem problem{};

  explicit Call(const AttentionInputs& in)
      : in_(in),
        on_device_(in.device()),
        device_(device_of(in.device())),
        numbers_(in.dst.options().dtype(in.statistics())) {
    problem.score = score_of(in.score);
    problem.storage = storage_of(in.rows());
    problem.wide_index = in.csr[0].scalar_type() == at::kLong;
    problem.heads = args.heads = static_cast<int>(in.heads());
    vector_ = 16 / static_cast<int64_t>(c10::elementSize(in.rows()));
    args.coefficient = static_cast<A>(in.coefficient);
    set_value(in.value);
    if (problem.score == Score::gat) {
      args.dst = scalars(in.dst), args.src = scalars(in.src);
    } else {
      args.dst = rows(in.dst), args.src = rows(in.src);
      args.key_vectors = static_cast<int>(round_up(in.dim(), vector_) / vector_);
      if (!in.value) args.value_vectors = args.key_vectors;
    }
    if (in.att) args.att = keep(padded(in.att->unsqueeze(1), att_width()));
    if (in.edge_scale) {
      args.scale = in.edge_scale->data_ptr<A>();
      args.scale_edge = in.edge_scale->stride(0), args.scale_head = in.edge_scale->stride(1);
    }
    if (in.dropout > 0) {
      args.has_dropout = true;
      args.seed = in.seed->data_ptr<int64_t>();
      args.threshold = dropout_threshold(in.dropout);
      args.keep_scale = in.dropout < 1 ? static_cast<A>(1 / (1 - in.dropout)) : A(0);
    }
    if (in.edge_attr && problem.score == Score::gatv2) {
      problem.edge_term = true;
      const Tensor attr =
          in.edge_attr->stride(1) == 1 || in.edge_dim() == 1 ? *in.edge_attr : in.edge_attr->contiguous();
      kept_.push_back(attr);
      args.edge_attr.base = static_cast<const char*>(attr.data_ptr());
      args.edge_attr.row = static_cast<uint32_t>(attr.stride(0) * attr.element_size());
      args.edge_dim = static_cast<int>(in.edge_dim());
      args.proj = keep(padded(in.edge_proj->transpose(1, 2), args.key_vectors * vector_));
    }
  }

  cudaStream_t stream() const { return on_device_.stream(); }
  const at::TensorOptions& numbers() const { return numbers_; }
  Tensor empty(at::IntArrayRef shape) const { return at::empty(shape, numbers_); }

  void set_value(const OptTensor& value) {
    if (!value) return;
    args.value = rows(*value);
    args.value_vectors = static_cast<int>(round_up(value->size(2), vector_) / vector_);
  }

  void set_grad_out(const Tensor& grad_out, const Tensor& out) {
    args.grad_out = rows(grad_out.to(in_.rows()));
    args.saved_out = rows(out);
    if (out.scalar_type() == in_.rows()) return;
    if constexpr (std::is_same_v<A, float>) {
      prepare_rows();
      delta_ = empty({out.size(0), out.size(1)});
      C10_CUDA_CHECK(row_delta(args.grad_out, problem.storage, args.saved_out, out.size(0), args.heads,
                               args.value_vectors, delta_.template data_ptr<float>(), stream()));
      args.delta_given = delta_.template data_ptr<float>();
    }
  }

  // Memory that the edges' terms need is kept as well.
  A* keep(const Tensor& t) {
    kept_.push_back(t);
    return t.numel() ? t.data_ptr<A>() : nullptr;
  }

  Tensor keep_tensor(const Tensor& t) { return kept_.emplace_back(t); }

  // Numbers of a head in the kernels' att, and in the shares of its gradient.
  int64_t att_width() const { return problem.score == Score::cosine ? 1 : args.key_vectors * vector_; }

  // Runs a pass over the graph; `att_sums` [n, H, D padded] receives n shares of the gradient of att.
  void run(Pass pass, at::TensorList graph, int64_t num_gathered, const Tensor& att_sums = {}) {
    args.graph = compressed_graph(graph);
    if (args.graph.num_rows == 0) {
      if (att_sums.defined()) att_sums.zero_();
      return;
    }
    prepare_rows();
    problem.pass = pass;
    problem.num_rows = args.graph.num_rows, problem.num_edges = args.graph.num_edges;
    problem.num_gathered = num_gathered;
    problem.key_vectors = args.key_vectors, problem.value_vectors = args.value_vectors;
    problem.options = args.has_dropout || args.scale || args.logit_term || args.value_term || args.given ||
                      args.logits_out || args.grad_weights || args.ds_out || args.weights_out || args.grad_scale ||
                      problem.edge_term;
    args.carry_size = carry_size(pass);
    problem.carry_bytes = args.carry_size * args.heads * int64_t(sizeof(A));
    // Pieces of hubs may take half a result where there is memory left of the peak. A forward has nothing but its
    // result, and the last pass of a backward stands beside all results (one fewer where the values are the keys):
    // there they take a sixteenth, of float results a crumb.
    const int64_t result = problem.num_rows * args.heads * args.value_vectors * 16;
    const bool scarce = pass == Pass::forward || (pass == Pass::by_src && !values_are_keys(problem.score));
    const int64_t crumb = 256 << 10, share = result / (scarce ? in_.rows() == at::kFloat ? 512 : 16 : 2);
    problem.carry_budget = std::max(crumb, scarce && in_.rows() == at::kFloat ? std::min(2 * crumb, share) : share);
    // Of sizes alone: a gradient must not depend on which others are asked for.
    const bool att_shares =
        pass == Pass::by_dst ? values_are_keys(problem.score) : pass == Pass::by_src && problem.score == Score::gatv2;
    problem.range_bytes = att_shares ? args.heads * att_width() * int64_t(sizeof(A)) : 0;
    problem.range_budget = std::max<int64_t>(2 << 20, result / 4);
    const Plan plan = make_plan(problem, device_);
    TORCH_CHECK_VALUE(plan.layout.vectors > 0, "edgeless: a head of attention may take up to ", 4 * 32 * vector_,
                      " features in ", in_.rows(), " on CUDA, got ", in_.dim(), " and ", in_.channels());
    // The two passes of a gatv2 backward must agree on what Args::stats means.
    const bool by_edge = plan.mode == 2;
    TORCH_INTERNAL_ASSERT(pass != Pass::by_src || problem.score != Score::gatv2 || by_edge == by_edge_);
    by_edge_ = by_edge;
    args.layout = plan.layout, args.part = plan.part;
    Tensor carry, shares;
    if (plan.hubs) {
      carry = empty({2 * plan.slots * args.heads * args.carry_size});
      args.carry = carry.data_ptr<A>();
    }
    if (att_sums.defined()) {
      shares = empty({plan.part.num_ranges, att_sums[0].numel()});
      args.grad_att = shares.template data_ptr<A>();
    }
    C10_CUDA_CHECK(run_pass(problem, plan, args, stream()));
    if (plan.hubs) C10_CUDA_CHECK(merge_pieces(problem, plan, args, stream()));
    if (att_sums.defined()) sum_over_rows(shares, att_sums);
    args.carry = nullptr, args.grad_att = nullptr;
  }

  // t [rows, ...], to [sums, ...]
  void sum_over_rows(const Tensor& t, const Tensor& to) {
    const int sums = static_cast<int>(to.size(0));
    C10_CUDA_CHECK(sum_rows(t.data_ptr<A>(), t.size(0), to.numel() / sums, sums, to.template data_ptr<A>(), stream()));
  }

 private:
  int carry_size(Pass pass) const {
    const int keys = problem.score == Score::gat ? 1 : static_cast<int>(args.key_vectors * vector_);
    const int values = static_cast<int>(args.value_vectors * vector_);
    if (pass == Pass::forward) return values + 2;
    return keys + (pass == Pass::by_src && !values_are_keys(problem.score) ? values : 0);
  }

  // The kernels read vectors of 16 bytes, and of every tensor as many numbers as of the rows, whatever its own type.
  // Copies are made when the first kernel is about to run: all by one launch.
  Rows rows(const Tensor& t) {
    const bool fits = t.size(2) % vector_ == 0 && vector_bytes(t) == 16;
    const Tensor packed = fits ? t : copies_.add(t, vector_);
    kept_.push_back(packed);
    Rows r = scalars(packed);
    TORCH_INTERNAL_ASSERT(r.row % 16 == 0 && r.head % 16 == 0);
    return r;
  }

  void prepare_rows() {
    copies_.run();
    if (problem.score != Score::cosine || args.src_over_norm) return;
    args.src_over_norm = over_norms_of(args.src, in_.num_src());
    const bool same = args.dst.base == args.src.base && args.dst.row == args.src.row &&
                      args.dst.head == args.src.head && in_.num_dst() == in_.num_src();
    args.dst_over_norm = same ? args.src_over_norm : over_norms_of(args.dst, in_.num_dst());
  }

  const A* over_norms_of(const Rows& rows, int64_t count) {
    A* over = keep(empty({count, in_.heads()}));
    C10_CUDA_CHECK(
        over_norms(rows, problem.storage, count, args.heads, args.key_vectors, args.coefficient, over, stream()));
    return over;
  }

  Rows scalars(const Tensor& t) {
    Rows r;
    r.base = static_cast<const char*>(t.data_ptr());
    r.row = t.size(0) > 1 ? static_cast<uint32_t>(t.stride(0) * t.element_size()) : 0;
    r.head = t.size(1) > 1 ? t.stride(1) * t.element_size() : 0;
    return r;
  }

  // [n, m, size] contiguous, filled up with zeros; `size` is a multiple of 16 bytes unless t has it.
  Tensor padded(const Tensor& t, int64_t size) { return t.size(2) == size ? t.contiguous() : copies_.add(t, size); }

  const AttentionInputs& in_;
  OnDevice on_device_;
  Device device_;
  at::TensorOptions numbers_;
  int64_t vector_ = 1;
  bool by_edge_ = false;
  Tensor delta_;  // where the pass by destination cannot make it
  PaddedRows copies_;
  std::vector<Tensor> kept_;
};

// Destination and source of each edge by its original id.
struct EdgeEnds {
  Tensor dst, src;
};

template <class A>
EdgeEnds ends_of(const Call<A>& call, const AttentionInputs& in) {
  EdgeEnds ends{at::empty_like(in.csr[1]), at::empty_like(in.csr[1])};
  with_index(in.csr[0], [&](auto zero) {
    using I = decltype(zero);
    C10_CUDA_CHECK(
        edge_ends<I>(compressed_graph(in.csr), ends.dst.data_ptr<I>(), ends.src.data_ptr<I>(), call.stream()));
    return 0;
  });
  return ends;
}

// The edge term of the score 'dot' stands in key and value: <q, W e> = <W^T q, e> and sum w (W e) = W sum w e, so all
// that is done by edge is done in the De features of an edge, with the nodes' rows projected before or after.
//
// rows [n, H, D] -> W^T rows, [n, H, De]
Tensor to_edge_space(const Tensor& rows, const Tensor& proj) {
  return at::bmm(rows.to(proj.scalar_type()).transpose(0, 1), proj).transpose(0, 1).contiguous();
}

// sums [n, H, De] -> W sums, [n, H, D]
Tensor from_edge_space(const Tensor& sums, const Tensor& proj) {
  return at::bmm(sums.transpose(0, 1), proj.transpose(1, 2)).transpose(0, 1);
}

template <class A>
Tensor edge_products(const Call<A>& call, const AttentionInputs& in, const Tensor& rows, const EdgeEnds& ends,
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
Tensor aggregate_edges(const AttentionInputs& in, const Tensor& logits, const Tensor& given) {
  const int64_t most = 4 * 32 * 16 / in.edge_attr->element_size();
  std::vector<Tensor> parts;
  const Tensor ids = in.csr.size() == 3 ? in.csr[2] : at::arange(in.num_edges(), in.csr[1].options());
  for (int64_t first = 0; first < in.edge_dim(); first += most) {
    const int64_t width = std::min(most, in.edge_dim() - first);
    const Tensor attr = in.edge_attr->narrow(1, first, width).unsqueeze(1);
    AttentionInputs edges = in;
    edges.dst = in.dst.narrow(2, 0, 1), edges.src = attr.expand({in.num_edges(), in.heads(), width});
    edges.value = attr, edges.score = ScoreKind::gat, edges.coefficient = 1;
    edges.edge_attr.reset(), edges.edge_proj.reset();
    Call<A> call(edges);
    call.args.dst = call.args.src = {};
    call.args.logit_term = logits.defined() ? logits.data_ptr<A>() : nullptr;
    call.args.given = given.defined() ? given.data_ptr<A>() : nullptr;
    Tensor out = call.empty({in.num_dst(), in.heads(), width});
    call.args.out = out_rows(out, in.rows());
    const Tensor graph[] = {in.csr[0], ids, ids};
    call.run(Pass::forward, graph, in.num_edges());
    parts.push_back(out);
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts, 2);
}

// What is added to the logit by edge, if anything: [E, H].
template <class A>
Tensor logit_term(const Call<A>& call, const AttentionInputs& in, const EdgeEnds& ends, const Tensor& projected_dst) {
  if (in.score == ScoreKind::gat) return at::mm(in.edge_attr->to(in.statistics()), in.edge_proj->select(1, 0).t());
  return edge_products(call, in, projected_dst, ends, in.coefficient);
}

template <class A>
void forward(const AttentionInputs& in, Tensor& out, Tensor& logsumexp) {
  Call<A> call(in);
  call.args.logsumexp = logsumexp.data_ptr<A>();
  const bool dot_edges = in.edge_attr && in.score == ScoreKind::dot;
  Tensor term, result = out;
  if (in.edge_attr && in.score != ScoreKind::gatv2) {
    const EdgeEnds ends = dot_edges ? ends_of(call, in) : EdgeEnds{};
    term = logit_term(call, in, ends, dot_edges ? to_edge_space(in.dst, *in.edge_proj) : Tensor());
    call.args.logit_term = call.keep(term);
  }
  if (dot_edges) {
    call.args.logits_out = call.keep(term);
    result = call.empty(out.sizes());
  }
  call.args.out = out_rows(result, in.rows());
  call.run(Pass::forward, in.csr, in.num_src());
  if (dot_edges) out.copy_(result + from_edge_space(aggregate_edges<A>(in, term, {}), *in.edge_proj));
}

// Dropout and scale must fit in.
template <class A>
Tensor weights(const AttentionInputs& in, const Tensor& logsumexp) {
  Call<A> call(in);
  Tensor term, result = call.empty({in.num_edges(), in.heads()});
  if (in.edge_attr && in.score != ScoreKind::gatv2) {
    const bool dot = in.score == ScoreKind::dot;
    term = logit_term(call, in, dot ? ends_of(call, in) : EdgeEnds{},
                      dot ? to_edge_space(in.dst, *in.edge_proj) : Tensor());
    call.args.logit_term = call.keep(term);
  }
  const Tensor statistics = logsumexp.contiguous();
  call.args.logsumexp = call.keep(statistics);
  call.args.weights_out = result.template data_ptr<A>();
  if (!result.numel()) return result;
  call.run(Pass::by_dst, in.csr, in.num_src());
  return result;
}

// The order of the gradients and of `needs`.
enum { kDst, kSrc, kValue, kAtt, kEdgeAttr, kEdgeProj, kEdgeScale, kNumInputs };

// gatv2's edge term, in chunks of edges: G = ds LeakyReLU'(hidden) [chunk, H D] is made of the term in place, then
// d attr = G (att W), d W = att G^T e, and att gets the edge term's share, sum of W G^T e (scores.cuh).
template <class A>
void gatv2_edge_gradients(const Call<A>& call, const AttentionInputs& in, const Tensor& ds,
                          const std::array<bool, kNumInputs>& needs, std::vector<Tensor>& grads, Tensor& att_share) {
  const EdgeEnds ends = ends_of(call, in);
  const int64_t edges = in.num_edges(), width = in.heads() * in.dim();
  const Tensor proj = in.edge_proj->contiguous().view({width, in.edge_dim()});
  const Tensor weighted = (in.att->unsqueeze(2) * *in.edge_proj).view({width, in.edge_dim()});
  Tensor sums = at::zeros({width, in.edge_dim()}, call.numbers());
  const int64_t chunk = std::max<int64_t>(1024, (int64_t(32) << 20) / (width * int64_t(sizeof(A))));
  for (int64_t first = 0; first < edges; first += chunk) {
    const int64_t count = std::min(chunk, edges - first);
    const Tensor attr = in.edge_attr->narrow(0, first, count).to(in.statistics());
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

// Makes gradients parts of one tensor, in the order that the inputs themselves have as parts of one: the linear maps
// behind them then take one product, not several. `which`: of kDst, kSrc and kValue, those with an input.
void put_side_by_side(const AttentionInputs& in, std::vector<int> which, std::vector<Tensor>& grads) {
  const auto input = [&](int i) -> const Tensor& { return i == kDst ? in.dst : i == kSrc ? in.src : *in.value; };
  const int64_t width = in.heads() * in.dim(), parts = static_cast<int64_t>(which.size());
  for (const int i : which) {
    const Tensor& t = input(i);
    if (!t.storage().is_alias_of(in.dst.storage()) || t.sizes() != in.dst.sizes()) return;
    if (t.stride(0) != in.dst.stride(0) || t.stride(1) != in.dim() || t.stride(2) != 1) return;
  }
  if (parts * width > in.dst.stride(0)) return;  // the same columns twice
  std::sort(which.begin(), which.end(),
            [&](int a, int b) { return input(a).storage_offset() < input(b).storage_offset(); });
  const Tensor all = at::empty({in.num_dst(), parts * width}, in.dst.options());
  for (int64_t k = 0; k < parts; ++k) grads[which[k]] = all.narrow(1, k * width, width).view(in.dst.sizes());
}

// Up to that, all gradients lie side by side; above, those of one pass, so that none stands there before its pass.
constexpr int64_t kFewRows = 1 << 15;

template <class A>
void backward(const AttentionInputs& in, const OptTensor& grad_out, const OptTensor& grad_weights, const OptTensor& out,
              const Tensor& logsumexp, const std::array<bool, kNumInputs>& needs, bool side_by_side,
              std::vector<Tensor>& grads) {
  Call<A> call(in);
  auto& args = call.args;
  const int64_t edges = in.num_edges(), heads = in.heads();
  const bool dot_edges = in.edge_attr && in.score == ScoreKind::dot;
  const bool edge_grads = in.edge_attr && (needs[kEdgeAttr] || needs[kEdgeProj] || (needs[kAtt] && in.edge_attr) ||
                                           (dot_edges && needs[kDst]));
  const Tensor statistics = logsumexp.contiguous();
  args.logsumexp = call.keep(statistics);
  // Pairs save the pass by source a sector an edge; float rows of the other scores leave no memory for them.
  const bool pairs = in.score == ScoreKind::gatv2 || in.rows() == at::kHalf || in.rows() == at::kBFloat16;
  const Tensor stats = call.empty({in.num_dst(), heads, pairs ? 2 : 1});
  (pairs ? args.stats : args.delta) = stats.template data_ptr<A>();
  Tensor edge_weights;
  if (grad_out) {
    call.set_grad_out(*grad_out, *out);
  } else {
    edge_weights = grad_weights->contiguous();
    const Tensor softmax = weights<A>(in, logsumexp);
    const Tensor delta = call.keep_tensor(call.empty({in.num_dst(), heads}));
    with_index(in.csr[0], [&](auto zero) {
      using I = decltype(zero);
      C10_CUDA_CHECK((row_dot<A, I>(compressed_graph(in.csr), softmax.data_ptr<A>(), edge_weights.data_ptr<A>(),
                                    int(heads), delta.template data_ptr<A>(), call.stream())));
      return 0;
    });
    args.grad_weights = edge_weights.data_ptr<A>();
    args.delta_given = delta.template data_ptr<A>();
  }

  // by destination
  EdgeEnds ends;
  Tensor term, value_term, ds, weights_out, projected_dst, projected_grad;
  if (dot_edges) {
    ends = ends_of(call, in);
    projected_dst = to_edge_space(in.dst, *in.edge_proj);
    if (grad_out) {
      projected_grad = to_edge_space(*grad_out, *in.edge_proj);
      value_term = edge_products(call, in, projected_grad, ends, 1);
      args.value_term = call.keep(value_term);
    }
  }
  if (in.edge_attr && in.score != ScoreKind::gatv2) {
    term = logit_term(call, in, ends, projected_dst);
    args.logit_term = call.keep(term);
  }
  if (edge_grads) {
    ds = call.empty({edges, heads});
    args.ds_out = call.keep(ds);
    if (dot_edges && grad_out && (needs[kEdgeAttr] || needs[kEdgeProj])) {
      weights_out = call.empty({edges, heads});
      args.weights_out = call.keep(weights_out), args.weights_scaled = true;
    }
  }
  if (needs[kEdgeScale] && grad_out) args.grad_scale = grads[kEdgeScale].template data_ptr<A>();
  std::vector<int> sources{kSrc};
  if (in.value) sources.push_back(kValue);
  side_by_side &= std::all_of(sources.begin(), sources.end(), [&](int i) { return needs[i]; });
  const bool few = in.num_dst() <= kFewRows;
  if (side_by_side && few && needs[kDst]) {
    std::vector<int> all = sources;
    all.push_back(kDst);
    put_side_by_side(in, all, grads);
  }
  Tensor grad_dst = grads[kDst];
  if (needs[kDst]) {
    if (dot_edges) grad_dst = call.empty(in.dst.sizes());
    args.grad_dst = out_rows(grad_dst, in.rows());
  }
  // Half of it is written by either pass; the cosine's factor has all from the first.
  constexpr int64_t kSums = 16;
  const int64_t halves = in.score == ScoreKind::cosine ? 1 : 2;
  const Tensor att_sums = needs[kAtt] ? call.empty({halves * kSums, heads, call.att_width()}) : Tensor();
  const auto half = [&](int64_t i) {
    return needs[kAtt] && i < halves ? att_sums.narrow(0, i * kSums, kSums) : Tensor();
  };
  call.run(Pass::by_dst, in.csr, in.num_src(), half(0));
  args.ds_out = args.weights_out = args.grad_scale = nullptr;

  // by source; the attention vector needs it as well, and then a transpose that nobody else asked for
  Tensor grad_value;
  if (needs[kSrc] || needs[kValue] || half(1).defined()) {
    std::vector<Tensor> transpose(in.csc.begin(), in.csc.end());
    if (transpose.empty()) {
      TORCH_CHECK_VALUE(!needs[kSrc] && !needs[kValue],
                        "edgeless::attention_backward: csc is needed for the gradient of a source tensor");
      const OptTensor ids = in.csr.size() == 3 ? OptTensor(in.csr[2]) : OptTensor();
      auto [indptr, indices, edge_ids] = csr_transpose_cuda(in.csr[0], in.csr[1], ids, in.num_src());
      transpose = {indptr, indices, edge_ids};
    }
    // Not before: what the pass by destination kept for itself is free by now.
    if (side_by_side && !few && sources.size() > 1) put_side_by_side(in, sources, grads);
    const auto make = [&](int which, const Tensor& like) {
      if (!grads[which].numel()) grads[which] = at::empty(like.sizes(), like.options());
      return out_rows(grads[which], in.rows());
    };
    if (needs[kSrc]) args.grad_src = make(kSrc, in.src);
    if (needs[kValue]) args.grad_value = make(kValue, *in.value);
    args.delta_given = nullptr;
    call.run(Pass::by_src, transpose, in.num_dst(), half(1));
  }

  Tensor att_grad;
  if (needs[kAtt]) {
    const int64_t width = in.att->size(1);
    att_grad = call.att_width() == width ? grads[kAtt] : call.empty({heads, call.att_width()});
    call.sum_over_rows(att_sums, att_grad.unsqueeze(0));
    att_grad = att_grad.narrow(1, 0, width);
  }
  if (in.edge_attr && in.score == ScoreKind::gatv2 && edge_grads) {
    gatv2_edge_gradients(call, in, ds, needs, grads, att_grad);
  }
  if (needs[kAtt] && att_grad.data_ptr() != grads[kAtt].data_ptr()) grads[kAtt].copy_(att_grad);
  if (in.edge_attr && in.score == ScoreKind::gat && edge_grads) {
    if (needs[kEdgeAttr]) grads[kEdgeAttr].copy_(at::mm(ds, in.edge_proj->select(1, 0)));
    if (needs[kEdgeProj]) grads[kEdgeProj].copy_(at::mm(ds.t(), in.edge_attr->to(in.statistics())).unsqueeze(1));
  }
  if (dot_edges && edge_grads) {
    const double scale = in.coefficient;
    const Tensor key_sums = aggregate_edges<A>(in, {}, ds);
    if (needs[kDst]) grads[kDst].copy_(grad_dst + scale * from_edge_space(key_sums, *in.edge_proj));
    if (needs[kEdgeProj]) {
      const auto by_head = [&](const Tensor& rows) { return rows.to(in.statistics()).permute({1, 2, 0}); };
      Tensor sum = scale * at::bmm(by_head(in.dst), key_sums.transpose(0, 1));
      if (grad_out) sum += at::bmm(by_head(*grad_out), aggregate_edges<A>(in, {}, weights_out).transpose(0, 1));
      grads[kEdgeProj].copy_(sum);
    }
    if (needs[kEdgeAttr]) {
      const Tensor scaled = projected_dst * scale;
      with_index(ends.dst, [&](auto zero) {
        using I = decltype(zero);
        C10_CUDA_CHECK((edge_combine<A, I>(
            ds.data_ptr<A>(), scaled.data_ptr<A>(), grad_out ? weights_out.data_ptr<A>() : nullptr,
            grad_out ? projected_grad.data_ptr<A>() : nullptr, ends.dst.data_ptr<I>(), edges, int(heads),
            int(in.edge_dim()), grads[kEdgeAttr].data_ptr(), storage_of(in.rows()), call.stream())));
        return 0;
      });
    }
  }
}

std::tuple<Tensor, Tensor> attention(const Tensor& given_dst, const Tensor& given_src, const OptTensor& value,
                                     const OptTensor& att, const OptTensor& edge_attr, const OptTensor& edge_proj,
                                     const OptTensor& edge_scale, at::TensorList csr, at::TensorList csc,
                                     const OptTensor& seed, c10::string_view score, double coefficient, double dropout,
                                     Optional<at::ScalarType> out_dtype) {
  const char* op = "edgeless::attention";
  const ScoreKind kind_of_score = parse_score(op, std::string_view(score.data(), score.size()));
  const Tensor dst = with_dim(given_dst, kind_of_score), src = with_dim(given_src, kind_of_score);
  AttentionInputs in{dst, src, value, att,           edge_attr,   edge_proj, edge_scale,
                     csr, csc, seed,  kind_of_score, coefficient, dropout};
  check_inputs(op, in);
  const auto kind = out_dtype.value_or(in.rows());
  TORCH_CHECK_VALUE(kind == in.rows() || kind == in.statistics(), op, ": out_dtype must be ", in.rows(), " or ",
                    in.statistics(), ", got ", kind);
  Tensor out = at::empty({in.num_dst(), in.heads(), in.channels()}, dst.options().dtype(kind));
  Tensor logsumexp = at::empty({in.num_dst(), in.heads()}, dst.options().dtype(in.statistics()));
  if (logsumexp.numel() == 0) return {out, logsumexp};
  if (!in.value && !values_are_keys(score_of(in.score))) in.value = src;
  with_arithmetic(in.rows(), [&](auto zero) {
    forward<decltype(zero)>(in, out, logsumexp);
    return 0;
  });
  return {out, logsumexp};
}

Tensor attention_weights(const Tensor& logsumexp, const Tensor& given_dst, const Tensor& given_src,
                         const OptTensor& att, const OptTensor& edge_attr, const OptTensor& edge_proj,
                         at::TensorList csr, at::TensorList csc, const OptTensor& seed, c10::string_view score,
                         double coefficient, double dropout) {
  const char* op = "edgeless::attention_weights";
  const ScoreKind kind_of_score = parse_score(op, std::string_view(score.data(), score.size()));
  const Tensor dst = with_dim(given_dst, kind_of_score), src = with_dim(given_src, kind_of_score);
  const AttentionInputs in{dst, src, {},   att,           edge_attr,   edge_proj, {},
                           csr, csc, seed, kind_of_score, coefficient, dropout};
  check_inputs(op, in);
  check_shape(op, "logsumexp", logsumexp, {in.num_dst(), in.heads()});
  check_dtype(op, "logsumexp", logsumexp, in.statistics());
  check_device(op, "logsumexp", logsumexp, in.device());
  return with_arithmetic(in.rows(), [&](auto zero) { return weights<decltype(zero)>(in, logsumexp); });
}

std::vector<Tensor> attention_backward(const OptTensor& grad_out, const OptTensor& grad_weights, const OptTensor& out,
                                       const Tensor& logsumexp, const Tensor& dst, const Tensor& src,
                                       const OptTensor& value, const OptTensor& att, const OptTensor& edge_attr,
                                       const OptTensor& edge_proj, const OptTensor& edge_scale, at::TensorList csr,
                                       at::TensorList csc, const OptTensor& seed, c10::string_view score,
                                       double coefficient, double dropout, bool dropped_weights,
                                       std::array<bool, kNumInputs> needs, bool side_by_side) {
  const char* op = "edgeless::attention_backward";
  const ScoreKind kind_of_score = parse_score(op, std::string_view(score.data(), score.size()));
  AttentionInputs in{dst, src, value, att,           edge_attr,   edge_proj, edge_scale,
                     csr, csc, seed,  kind_of_score, coefficient, dropout};
  check_inputs(op, in);
  check_shape(op, "logsumexp", logsumexp, {in.num_dst(), in.heads()});
  check_device(op, "logsumexp", logsumexp, in.device());
  TORCH_CHECK_VALUE(grad_out.has_value() != grad_weights.has_value(), op, ": give either grad_out or grad_weights");
  if (grad_out) {
    TORCH_CHECK_VALUE(out.has_value(), op, ": grad_out needs out");
    check_shape(op, "grad_out", *grad_out, {in.num_dst(), in.heads(), in.channels()});
    check_shape(op, "out", *out, grad_out->sizes());
    check_device(op, "grad_out", *grad_out, in.device());
    check_device(op, "out", *out, in.device());
  } else {
    check_shape(op, "grad_weights", *grad_weights, {in.num_edges(), in.heads()});
    check_dtype(op, "grad_weights", *grad_weights, in.statistics());
    check_device(op, "grad_weights", *grad_weights, in.device());
    in.edge_scale.reset();
    if (!dropped_weights) in.dropout = 0;
  }
  const OptTensor given[] = {dst, src, value, att, edge_attr, edge_proj, edge_scale};
  const bool nothing = logsumexp.numel() == 0 || src.numel() == 0 || (grad_out && grad_out->numel() == 0);
  std::vector<Tensor> grads(kNumInputs);
  for (int i = 0; i < kNumInputs; ++i) {
    needs[i] = needs[i] && given[i].has_value();
    const bool later = (i == kSrc || i == kValue) && !nothing && (grad_out || i == kSrc);  // see backward()
    grads[i] =
        at::empty(needs[i] && !later ? given[i]->sizes() : at::IntArrayRef{0}, (needs[i] ? *given[i] : dst).options());
    if (nothing || (grad_weights && (i == kValue || i == kEdgeScale))) grads[i].zero_();
  }
  if (nothing) return grads;
  if (grad_weights) {
    needs[kValue] = needs[kEdgeScale] = false;
    in.value.reset();
  }
  const bool value_is_src = grad_out && !in.value && !values_are_keys(score_of(in.score));
  const bool needs_src = needs[kSrc];
  if (value_is_src) {
    in.value = src;
    needs[kValue] = needs_src;
  }
  side_by_side = side_by_side && grad_out && !value_is_src && in.score != ScoreKind::gat;
  with_arithmetic(in.rows(), [&](auto zero) {
    backward<decltype(zero)>(in, grad_out, grad_weights, out, logsumexp, needs, side_by_side, grads);
    return 0;
  });
  if (value_is_src) {
    if (needs_src) grads[kSrc] += grads[kValue];
    grads[kValue] = at::empty({0}, dst.options());
  }
  return grads;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CUDA, m) {
  m.impl("attention", attention);
  m.impl("attention_weights", attention_weights);
  m.impl("attention_backward", attention_backward);
}

}  // namespace edgeless::cuda
