// One call of an attention op on CUDA: converts tensors to kernel arguments and allocates temporary memory.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "../common/dropout.h"
#include "../common/launch.h"
#include "../common/storage_of.h"
#include "../common/vector_rows.h"
#include "blocks_cuda.h"
#include "calls.h"
#include "cuda/kernels.h"

namespace edgeless::cuda {

using at::Tensor;

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

inline Device device_of(const at::Device& device) {
  return {device_attribute(jit::Attribute::multiprocessors, device.index()),
          device_attribute(jit::Attribute::l2_bytes, device.index())};
}

// One call of an op: the arguments of its passes and the tensors that own their memory.
template <class A>
class Call {
 public:
  Args<A> args{};
  Problem problem{};

  // by_blocks: the passes run on weighted sparse blocks (`wsb`), which must support the call.
  explicit Call(const AttentionCall& in, bool by_blocks = false)
      : in_(in),
        by_blocks_(by_blocks),
        on_device_(in.device()),
        device_(device_of(in.device())),
        numbers_(in.dst.options().dtype(in.opmath())) {
    problem.score = in.score;
    const int64_t key_dim = in.score == Score::gat ? 0 : in.dim(), value_dim = in.value ? in.channels() : 0;
    const int64_t gathered = in.heads() * (key_dim + value_dim) * c10::elementSize(in.rows());
    const bool fives = !by_blocks && takes_fives(in.num_edges(), in.num_dst(), in.num_src(), gathered,
                                                 in.edge_attr && in.score == Score::gatv2, device_.l2_bytes);
    problem.storage = storage_of_rows(storage_of(in.rows()), key_dim, in.channels(), fives);
    problem.wide_index = in.graph.csr[0].scalar_type() == at::kLong;
    problem.heads = args.heads = static_cast<int>(in.heads());
    vector_ = vector_numbers(problem.storage);
    args.coefficient = static_cast<A>(in.coefficient);
    args.base_two_coefficient = static_cast<A>(in.coefficient * M_LOG2E);
    set_value(in.value);
    if (problem.score == Score::gat) {
      args.dst = scalars(in.dst), args.src = scalars(in.src);
    } else {
      args.dst = rows(in.dst), args.src = rows(in.src);
      args.dim = static_cast<int>(in.dim());
      problem.key_vectors = args.key_vectors = static_cast<int>(round_up(in.dim(), vector_) / vector_);
      if (!in.value) args.value_vectors = args.key_vectors;
    }
    if (in.att) set_att(*in.att);
    if (in.edge_scale) {
      args.scale = in.edge_scale->data_ptr<A>();
      args.scale_edge = in.edge_scale->stride(0), args.scale_head = in.edge_scale->stride(1);
    }
    if (in.dropout > 0) {
      args.has_dropout = true;
      args.seed = in.seed->data_ptr<int64_t>();
      set_dropout_rate(args, in.dropout);
    }
    if (in.edge_attr && problem.score == Score::gatv2) {
      problem.edge_term = true, problem.edge_dim = static_cast<int>(in.edge_dim());
      const Tensor attr =
          in.edge_attr->stride(1) == 1 || in.edge_dim() == 1 ? *in.edge_attr : in.edge_attr->contiguous();
      kept_.push_back(attr);
      args.edge_attr.base = static_cast<const char*>(attr.data_ptr());
      args.edge_attr.row = static_cast<uint32_t>(attr.stride(0) * attr.element_size());
      args.edge_dim = static_cast<int>(in.edge_dim());
      args.proj = keep(padded(in.edge_proj->transpose(1, 2), args.key_vectors * vector_));
      const Tensor given = in.edge_proj->contiguous();
      args.given_proj = keep(given);
      const auto in_pairs = [](const Tensor& t) { return vector_bytes(t) >= 2 * t.element_size(); };
      args.edge_in_pairs = in_pairs(attr.unsqueeze(1)) && in_pairs(given);
    }
  }

  const jit::Queue& queue() const { return on_device_.queue(); }
  const at::TensorOptions& numbers() const { return numbers_; }
  Tensor empty(at::IntArrayRef shape) const { return at::empty(shape, numbers_); }

  // Describes `t` to a pass that writes its rows.
  OutRows out_rows(const Tensor& t) const {
    const int64_t bytes = vector_bytes(t), vector = bytes_of_vector(problem.storage);
    OutRows out;
    out.base = static_cast<char*>(t.data_ptr());
    out.dim = static_cast<int32_t>(t.size(2));
    out.heads = static_cast<int32_t>(t.stride(0) / std::max<int64_t>(1, t.size(2)));
    out.wide = t.scalar_type() != in_.rows();
    out.aligned = bytes == 16;
    out.whole = bytes >= vector && !out.wide;
    out.halves = bytes >= 8 && !out.wide;
    return out;
  }

  // An att of the rows' dtype is read without conversion where it consists of whole vectors; the cosine's factor is
  // always converted to A.
  void set_att(const Tensor& att) {
    const bool whole = att.size(1) == att_width() || att_width() * att.element_size() % 16 == 0;
    args.att_stored = att.scalar_type() != in_.opmath() && problem.score != Score::cosine && whole;
    const Tensor numbers = args.att_stored ? att : att.to(in_.opmath());
    args.att = keep_tensor(padded(numbers.unsqueeze(1), att_width())).const_data_ptr();
  }

  void set_value(const OptTensor& value) {
    if (!value) return;
    args.value = rows(*value);
    args.value_vectors = static_cast<int>(round_up(value->size(2), vector_) / vector_);
  }

  void set_grad_out(const Tensor& grad_out, const Tensor& out) {
    const bool wide = out.scalar_type() != in_.rows();
    // The Delta kernel also rounds float32 gradients of 16-bit rows, since it reads them anyway.
    const bool rounds = wide && grad_out.scalar_type() == at::kFloat && fits(grad_out);
    const Tensor grad =
        rounds ? at::empty(grad_out.sizes(), in_.dst.options().dtype(in_.rows())) : grad_out.to(in_.rows());
    args.grad_out = rows(grad);
    args.saved_out = rows(out);
    if (!wide) return;
    if constexpr (std::is_same_v<A, float>) {
      prepare_rows();
      delta_ = empty({out.size(0), out.size(1)});
      row_delta(rounds ? scalars(grad_out) : args.grad_out, problem.storage, args.saved_out, out.size(0), args.heads,
                args.value_vectors, rounds ? grad.data_ptr() : nullptr, delta_.template data_ptr<float>(), queue());
      args.delta_given = delta_.template data_ptr<float>();
    }
  }

  // Keeps a tensor alive for the call; returns its data, null if it is empty.
  A* keep(const Tensor& t) {
    kept_.push_back(t);
    return t.numel() ? t.data_ptr<A>() : nullptr;
  }

  Tensor keep_tensor(const Tensor& t) { return kept_.emplace_back(t); }

  // Values per head in the kernels' att and in the partial sums (`shares`) of its gradient.
  int64_t att_width() const { return cuda::att_width(problem); }

  // Runs a pass over the graph. With `att_grad`, also stores the pass's partial sums of the gradient of att.
  void run(Pass pass, at::TensorList graph, int64_t num_gathered, bool att_grad = false) {
    args.graph = compressed_graph(graph);
    if (args.graph.num_rows == 0) return;
    prepare_rows();
    if constexpr (std::is_same_v<A, float>) {
      if (by_blocks_) return run_on_blocks(pass, in_, args, queue());
    }
    problem.pass = pass;
    problem.num_rows = args.graph.num_rows, problem.num_edges = args.graph.num_edges;
    problem.num_gathered = num_gathered;
    problem.max_degree = in_.graph.max_degrees[pass == Pass::by_src ? kInCsc : kInCsr];
    problem.value_vectors = args.value_vectors;
    // Counts inputs only: the plan, and with it the order of summation, must not depend on which gradients are needed.
    problem.edge_arrays = 0;
    for (const void* array : std::initializer_list<const void*>{args.scale, args.logit_term, args.value_term,
                                                                args.given, args.grad_weights, args.proj}) {
      problem.edge_arrays += array != nullptr;
    }
    problem.arrays = problem.edge_arrays > 0 || args.logits_out || args.ds_out || args.weights_out || args.grad_scale;
    problem.dropout = args.has_dropout;
    args.carry_size = carry_size(problem);
    const Plan plan = make_plan(problem, device_);
    TORCH_CHECK_VALUE(plan.kernel.vectors > 0, "edgeless: a head of attention may take up to ", kMostVectors * vector_,
                      " features in ", in_.rows(), " on CUDA, got ", in_.dim(), " and ", in_.channels());
    if (pass == Pass::forward) prepare_passes(problem, plan, device_, in_.graph.max_degrees[kInCsc], queue());
    // The destination and source passes of a gatv2 backward must agree on the meaning of Args::stats.
    const bool by_edge = has_edge_term(plan.kernel.mode);
    TORCH_INTERNAL_ASSERT(pass != Pass::by_src || problem.score != Score::gatv2 || by_edge == by_edge_);
    by_edge_ = by_edge;
    args.layout = plan.layout, args.part = plan.part;
    Tensor carry, shares;
    if (plan.hubs) {
      carry = empty({2 * plan.slots * args.heads * args.carry_size});
      args.carry = carry.data_ptr<A>();
    }
    if (att_grad) {
      shares = empty({plan.part.num_ranges, args.heads * att_width()});
      args.grad_att = shares.template data_ptr<A>();
    }
    run_pass(problem, plan, args, queue());
    if (plan.hubs) merge_segments(problem, plan, args, queue());
    if (att_grad) keep_att_shares(shares);
    args.carry = nullptr, args.grad_att = nullptr;
  }

  // Sums the partial sums of all passes to `to`: the gradient of att, [heads, att_width()], in A or the rows' dtype.
  void sum_att_shares(const Tensor& to) {
    TORCH_INTERNAL_ASSERT(att_shares_.size() <= 2);
    int64_t rows = 0;
    for (const Tensor& shares : att_shares_) rows += shares.size(0);
    att_shares_.resize(2);
    if (rows > 2 * kMostShares) att_shares_ = {summed_shares(att_shares_[0], att_shares_[1]), Tensor()};
    sum(att_shares_[0], att_shares_[1], 1, to);
  }

 private:
  static constexpr int64_t kMostShares = 128;  // rows of partial sums per pass that the last launch sums at once

  // Partial sums of more than 2 MiB are reduced to a few rows, to free their memory before the next pass.
  void keep_att_shares(const Tensor& shares) {
    const bool keep = shares.size(0) <= kMostShares || shares.numel() * int64_t(sizeof(A)) <= 2 << 20;
    att_shares_.push_back(keep ? shares : summed_shares(shares, {}));
  }

  Tensor summed_shares(const Tensor& some, const Tensor& more) {
    constexpr int kSums = 64;
    const Tensor few = empty({kSums, some.size(1)});
    sum(some, more, kSums, few);
    return few;
  }

  // Sums the rows of `some` and `more` to `to`, which holds `sums` rows of partial sums.
  void sum(const Tensor& some, const Tensor& more, int sums, const Tensor& to) {
    const auto rows = [](const Tensor& t) { return t.defined() ? t.size(0) : 0; };
    const auto base = [](const Tensor& t) { return t.defined() ? t.template data_ptr<A>() : nullptr; };
    sum_rows(base(some), rows(some), base(more), rows(more), to.numel() / sums, sums, to.data_ptr(),
             storage_of(to.scalar_type()), queue());
  }

  bool fits(const Tensor& t) const {
    return t.size(2) % vector_ == 0 && vector_bytes(t) >= std::min<int64_t>(16, vector_ * t.element_size());
  }

  // The kernels read whole vectors, with the same number of values from tensors of any dtype. Padded copies are made in
  // one launch, just before the first kernel runs.
  Rows rows(const Tensor& t) {
    const Tensor packed = fits(t) ? t : copies_.add(t, std::max(vector_, 16 / t.element_size()));
    kept_.push_back(packed);
    Rows r = scalars(packed);
    const int64_t bytes = bytes_of_vector(problem.storage);
    TORCH_INTERNAL_ASSERT(r.row % bytes == 0 && r.head % bytes == 0);
    return r;
  }

  void prepare_rows() {
    copies_.run();
    if (problem.score != Score::cosine || args.src_over_norm) return;
    args.src_over_norm = inverse_norms_of(args.src, in_.num_src());
    const bool same = args.dst.base == args.src.base && args.dst.row == args.src.row &&
                      args.dst.head == args.src.head && in_.num_dst() == in_.num_src();
    args.dst_over_norm = same ? args.src_over_norm : inverse_norms_of(args.dst, in_.num_dst());
  }

  const A* inverse_norms_of(const Rows& rows, int64_t count) {
    A* over = keep(empty({count, in_.heads()}));
    inverse_norms(rows, problem.storage, count, args.heads, args.key_vectors, args.coefficient, over, queue());
    return over;
  }

  Rows scalars(const Tensor& t) {
    Rows r;
    r.base = static_cast<const char*>(t.data_ptr());
    r.row = t.size(0) > 1 ? static_cast<uint32_t>(t.stride(0) * t.element_size()) : 0;
    r.head = t.size(1) > 1 ? t.stride(1) * t.element_size() : 0;
    return r;
  }

  // Pads `t` to [n, m, size] with zeros, contiguous and aligned to 16 bytes. `size` is a multiple of 16 bytes unless t
  // already has that size.
  Tensor padded(const Tensor& t, int64_t size) {
    if (t.size(2) != size) return copies_.add(t, size);
    const Tensor rows = t.contiguous();
    return reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % 16 ? rows.clone() : rows;
  }

  const AttentionCall& in_;
  bool by_blocks_ = false;
  OnDevice on_device_;
  Device device_;
  at::TensorOptions numbers_;
  int64_t vector_ = 1;
  bool by_edge_ = false;
  Tensor delta_;  // Delta where the destination pass cannot compute it
  PaddedRows copies_;
  std::vector<Tensor> att_shares_;  // a tensor per pass: [partial sums, heads * att_width()]
  std::vector<Tensor> kept_;
};

}  // namespace edgeless::cuda
