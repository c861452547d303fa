// Attention over pairs on CUDA: allocation and the sequence of kernels, which are in cuda/. Nothing here synchronizes
// with the device.
//
// Forward: vectors = W_r query per relation, values = x_u W_r per pair, queries <x_i, vectors_r> per segment, and one
// pass over the edges by destination. Backward: statistics per destination, one pass over the edges by pair, which
// writes ds per edge, and sums of ds per segment. The gradient of x sums the row dv W_r^T of every pair of a node and
// (sum ds) W_r query of every segment of the node. One SpMM computes both sums; the rows W_r query are stored after
// those of the pairs.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "../common/dropout.h"
#include "../common/launch.h"
#include "../common/storage_of.h"
#include "../relational/products_cuda.h"
#include "../spmm/calls.h"
#include "calls.h"
#include "cuda/kernels.h"

namespace edgeless::cuda {
namespace {

using at::Tensor;

// Returns `t` or a copy, contiguous and 16-byte aligned.
Tensor whole(const Tensor& t) {
  const Tensor rows = t.contiguous();
  return reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % 16 == 0 ? rows : rows.clone();
}

const void* at_of(const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }

// t is [n, width], contiguous.
Rows rows_of(const Tensor& t) {
  Rows rows;
  rows.base = static_cast<const char*>(t.const_data_ptr());
  rows.row = static_cast<uint32_t>(t.size(1) * t.element_size());
  return rows;
}

OutRows out_rows_of(const Tensor& t) {
  OutRows out;
  out.base = static_cast<char*>(t.mutable_data_ptr());
  out.dim = static_cast<int32_t>(t.size(1)), out.heads = 1;
  out.aligned = out.whole = true;
  return out;
}

// One of the two passes: its plan, arguments and fix-up workspace.
class PairPass {
 public:
  PairArgs args;

  PairPass(Pass pass, const Tensor& values, at::TensorList graph, int64_t gathered, int64_t max_degree,
           const PairDropout& dropout) {
    const int vectors = static_cast<int>(values.size(1) * values.element_size() / 16);
    problem_.pass = pass, problem_.score = Score::gat, problem_.storage = storage_of(values.scalar_type());
    problem_.value_vectors = vectors;
    args.graph = compressed_graph(graph);
    problem_.num_rows = args.graph.num_rows, problem_.num_edges = args.graph.num_edges;
    problem_.num_gathered = gathered, problem_.max_degree = max_degree;
    const int device = values.get_device();
    plan_ = pair_plan(problem_, {device_attribute(jit::Attribute::multiprocessors, device),
                                 device_attribute(jit::Attribute::l2_bytes, device)});
    args.part = plan_.part, args.layout = plan_.layout;
    args.heads = 1, args.key_vectors = args.value_vectors = vectors;
    args.carry_size = carry_size(problem_);
    args.value = rows_of(values);
    if (dropout) {
      args.drawn_by = dropout.edge_ids[pass == Pass::forward ? 0 : 1].const_data_ptr<int32_t>();
      args.seed = dropout.seed->const_data_ptr<int64_t>();
      set_dropout_rate(args, dropout.p);
    }
    if (plan_.hubs) carry_ = at::empty({2 * plan_.slots * args.carry_size}, values.options().dtype(at::kFloat));
    if (plan_.hubs) args.carry = carry_.mutable_data_ptr<float>();
  }

  int64_t blocks() const { return plan_.part.num_ranges; }
  void run(const jit::Queue& queue) const { run_pair_pass(problem_, plan_, args, queue); }

 private:
  Problem problem_;
  Plan plan_;
  Tensor carry_;
};

// Blocks of a row-wise pass: at least 32 rows each, and at most 8 blocks per SM.
int row_blocks(int64_t rows, const Tensor& on) {
  const int64_t most = 8 * int64_t{device_attribute(jit::Attribute::multiprocessors, on.get_device())};
  return static_cast<int>(std::clamp<int64_t>(rows / 32, 1, most));
}

// Collects reductions of partial sums and runs them in one launch.
class ShareSums {
 public:
  explicit ShareSums(const Tensor& like) : like_(like) {}

  // shares [count, width] of float; run() writes their sum to `to`, [width, ...].
  void add(const Tensor& shares, const Tensor& to) {
    SharesArgs::Sum& sum = args_.of[args_.sums++];
    sum.shares = shares.const_data_ptr<float>(), sum.count = shares.size(0), sum.out = to.mutable_data_ptr();
    args_.width = static_cast<int>(shares.size(1));
    kept_.push_back(shares);
  }

  void run(const jit::Queue& queue) {
    if (args_.sums) run_sum_shares(storage_of(like_.scalar_type()), args_, queue);
    args_.sums = 0;
    kept_.clear();
  }

 private:
  const Tensor& like_;
  SharesArgs args_;
  std::vector<Tensor> kept_;
};

// Checks the limits of the kernels, which are narrower than those of the op.
void check_rows(const char* op, const PairCall& in) {
  const int64_t size = in.x.element_size(), bytes = in.width() * size;
  TORCH_CHECK_VALUE(in.x.scalar_type() != at::kDouble, op,
                    ": x must be float32, bfloat16 or float16 on CUDA, got float64");
  TORCH_CHECK_VALUE(bytes > 0 && bytes % 16 == 0 && bytes <= 512, op,
                    ": rows of values must be whole vectors of 16 bytes and at most 32 of them, got ", in.width(),
                    " numbers");
  TORCH_CHECK_VALUE(in.depth() > 0 && in.depth() * size % 4 == 0, op, ": rows of x must be made of 4 bytes each, got ",
                    in.depth(), " numbers");
}

PairOutputs pair_attention(const PairCall& in, bool keep_sums) {
  const char* op = "edgeless::pair_attention";
  check_pair_attention(op, in);
  check_rows(op, in);
  const auto& [x, weight, query, key, bias, walks, negative_slope, max_degrees, dropout] = in;
  const OnDevice on_device(x.device());
  const int64_t depth = in.depth(), width = in.width();
  const Tensor matrices = weight.contiguous();
  const Tensor vectors = at::mv(matrices.view({-1, width}), query.reshape(-1)).view({walks.types(), depth});
  // Has space for the relations' rows after those of the pairs, so that the backward can reuse the memory for both.
  const Tensor values = at::empty({walks.pairs() + walks.types(), width}, x.options()).narrow(0, 0, walks.pairs());
  relational::multiply({x, walks.pair_nodes()}, matrices.unsqueeze(1), walks.offsets(), {values});
  const Tensor queries = call_sddmm(x.unsqueeze(1), vectors.unsqueeze(1), {walks.types_of_nodes(), {}}).view(-1);

  Tensor out = at::empty({walks.nodes(), width}, x.options());
  Tensor sums = at::empty({keep_sums && bias ? walks.nodes() : 0, width}, x.options());
  Tensor shift = at::empty({2, walks.nodes()}, queries.options());
  const Tensor keys = whole(key), added = bias ? whole(*bias) : Tensor();
  PairPass pass(Pass::forward, values, walks.by_dst(), walks.pairs(), in.max_degree(0), dropout);
  pass.args.coefficient = static_cast<float>(negative_slope);
  pass.args.key = at_of(keys), pass.args.bias = at_of(added);
  pass.args.logit_term = queries.const_data_ptr<float>();
  pass.args.out = out_rows_of(out), pass.args.shift = shift.mutable_data_ptr<float>();
  if (keep_sums && bias) pass.args.sums = out_rows_of(sums);
  pass.run(on_device.queue());
  return {out, values, vectors, queries, shift, sums};
}

// The forward's [pairs, width] values extended to [pairs + types, width]; undefined if their memory has another size.
Tensor with_types(const Tensor& values, int64_t types) {
  const int64_t rows = values.size(0) + types, width = values.size(1);
  const bool fits = values.storage_offset() == 0 &&
                    static_cast<int64_t>(values.storage().nbytes()) == rows * width * values.element_size();
  return fits ? values.as_strided({rows, width}, {width, 1}) : Tensor();
}

// kOver: the gradients of values may overwrite the values, because a row is written after all lanes have read it (as in
// attention_backward_into). The rows of the gradient of x then overwrite these gradients, where shapes allow it.
template <bool kOver>
std::vector<Tensor> pair_attention_backward(const PairCall& in, const PairResults& of, const Tensor& given_grad,
                                            const PairChoice& needs) {
  const char* op = "edgeless::pair_attention_backward";
  check_pair_attention(op, in);
  check_rows(op, in);
  check_pair_results(op, in, of, given_grad);
  const auto& [x, weight, query, key, bias, walks, negative_slope, max_degrees, dropout] = in;
  const auto& [out, values, vectors, queries, shift] = of;
  const int64_t types = walks.types(), pairs = walks.pairs(), segments = walks.segments(), nodes = walks.nodes();
  const int64_t depth = in.depth(), width = in.width();
  const auto [of_x, of_weight, of_query, of_key, of_bias] = needs;
  const OnDevice on_device(x.device());
  const jit::Queue& queue = on_device.queue();
  const auto storage = storage_of(x.scalar_type());
  const auto numbers = x.options().dtype(at::kFloat);
  std::vector<Tensor> results(kPairInputs);
  for (Tensor& t : results) t = at::empty({0}, x.options());
  const Tensor grad = whole(given_grad), result = whole(out), keys = whole(key);
  const bool of_edges = of_x || of_weight || of_query || of_key;
  if (!of_edges && !of_bias) return results;
  ShareSums sums(x);

  // Statistics per destination and, in the same pass, the gradient of the bias.
  RowSumsArgs deltas;
  deltas.a = at_of(grad), deltas.b = at_of(result);
  deltas.shift = shift.const_data_ptr<float>();
  deltas.rows = nodes, deltas.vectors = static_cast<int>(width * x.element_size() / 16);
  deltas.blocks = row_blocks(nodes, x);
  Tensor stats;
  if (of_edges) stats = at::empty({nodes, 4}, numbers);
  if (of_edges) deltas.stats = stats.mutable_data_ptr<float>();
  if (of_bias) {
    const Tensor shares = at::empty({deltas.blocks, width}, numbers);
    deltas.shares = shares.mutable_data_ptr<float>();
    sums.add(shares, results[kPairBias] = at::empty({width}, x.options()));
  }
  run_deltas(storage, deltas, queue);
  if (!of_edges) {
    sums.run(queue);
    return results;
  }

  // The pass over edges.
  const bool of_values = of_x || of_weight, of_vectors = of_weight || of_query;
  Tensor ds = at::empty({walks.edges()}, numbers), grad_values;
  PairPass pass(Pass::by_src, values, walks.by_pair(), nodes, in.max_degree(1), dropout);
  pass.args.coefficient = static_cast<float>(negative_slope);
  pass.args.key = at_of(keys);
  pass.args.logit_term = queries.const_data_ptr<float>();
  pass.args.grad_out = rows_of(grad), pass.args.stats = stats.mutable_data_ptr<float>();
  pass.args.ds_out = ds.mutable_data_ptr<float>();
  if (of_values) {
    grad_values = kOver ? values : at::empty({pairs, width}, x.options());
    pass.args.grad_value = out_rows_of(grad_values);
  }
  if (of_key) {
    const Tensor shares = at::empty({pass.blocks(), width}, numbers);
    pass.args.grad_att = shares.mutable_data_ptr<float>();
    sums.add(shares, results[kPairKey] = at::empty({width, 1}, x.options()));
  }
  pass.run(queue);
  sums.run(queue);
  if (!of_x && !of_vectors) return results;

  Tensor outer;
  if (of_weight) {
    outer = relational::outer_sums({x, walks.pair_nodes()}, {grad_values}, walks.offsets(), 1, true).squeeze(1);
  }

  // The gradient of x: rows of the pairs, followed by those of the relations, and their weights.
  const Tensor matrices = weight.contiguous();
  Tensor rows, weights = at::empty({(of_x ? pairs : 0) + segments}, numbers);
  PrepareArgs prepare;
  prepare.ds = ds.const_data_ptr<float>();
  prepare.ptr = walks.edges_of_segments()[0].const_data_ptr<int32_t>();
  prepare.at = walks.edges_of_segments()[1].const_data_ptr<int32_t>();
  prepare.weights = weights.mutable_data_ptr<float>(), prepare.segments = segments;
  const Tensor types_rows = vectors.contiguous();
  if (of_x) {
    const bool in_place = kOver && relational::multiplies_in_place(x, matrices.unsqueeze(1));
    if (in_place) rows = with_types(values, types);
    if (!rows.defined()) rows = at::empty({pairs + types, depth}, x.options());
    prepare.pairs = pairs, prepare.vectors = types_rows.const_data_ptr();
    prepare.vector_words = types_rows.numel() * types_rows.element_size() / 4;
    prepare.rows = rows.narrow(0, pairs, types).mutable_data_ptr();
  }
  run_prepare(prepare, queue);
  if (of_x) {
    relational::multiply({grad_values}, matrices.transpose(1, 2).unsqueeze(1), walks.offsets(),
                         {rows.narrow(0, 0, pairs)});
    const GraphArrays graph(walks.sums(), {}, {in.max_degree(2)});
    results[kPairX] = call_spmm(rows, weights.unsqueeze(1), {}, {}, graph);
  }
  if (!of_vectors) return results;
  const Tensor of_segments = weights.narrow(0, of_x ? pairs : 0, segments).unsqueeze(1);
  const Tensor grad_vectors =
      call_spmm(x, of_segments, {}, {}, {walks.nodes_of_types(), {}}, at::kFloat).contiguous();  // [R, K]
  if (!of_weight) outer = at::zeros({types, depth, width}, numbers);

  // Backward of vectors = W_r query.
  const Tensor queries_of_types = whole(query), read = whole(matrices);
  const Tensor grad_weight = at::empty(weight.sizes(), x.options());
  if (of_weight) results[kPairWeight] = grad_weight;
  RowSumsArgs outers;
  outers.a = outer.const_data_ptr(), outers.b = read.const_data_ptr(), outers.out = grad_weight.mutable_data_ptr();
  outers.row = queries_of_types.const_data_ptr(), outers.factor = grad_vectors.const_data_ptr<float>();
  outers.rows = types * depth, outers.vectors = deltas.vectors, outers.blocks = row_blocks(outers.rows, x);
  if (of_query) {
    const Tensor shares = at::empty({outers.blocks, width}, numbers);
    outers.shares = shares.mutable_data_ptr<float>();
    sums.add(shares, results[kPairQuery] = at::empty({width, 1}, x.options()));
  }
  run_outer_rows(storage, outers, queue);
  sums.run(queue);
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CUDA, m) {
  m.impl("pair_attention", pair_attention_op<pair_attention>);
  m.impl("pair_attention_backward", pair_attention_backward_op<pair_attention_backward<false>>);
  m.impl("pair_attention_backward_over", OneByOne<pair_attention_backward_op<pair_attention_backward<true>>>::call);
}

}  // namespace edgeless::cuda
