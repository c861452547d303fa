// Min and max on CUDA: checks, allocation, choice of the backward and its feature tiles. The kernels and their argument
// structs are in cuda/. Nothing here synchronizes with the device.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <optional>
#include <string>

#include "../common/engine.h"
#include "../common/kernel_types.h"
#include "../common/launch.h"
#include "../common/segment_reduce_tensors.h"
#include "../common/vector_rows.h"
#include "cuda/kernels.h"
#include "cuda/plan.h"
#include "inputs.h"

namespace edgeless::cuda::reduction {
namespace {

using at::Tensor;

std::tuple<Tensor, Tensor, Tensor> neighbor_reduce(const Tensor& x, at::TensorList csr, at::TensorList csc,
                                                   c10::string_view reduce, double fill, at::ScalarType arg_dtype,
                                                   c10::string_view ties, at::IntArrayRef max_degrees) {
  const char* op = "edgeless::neighbor_reduce";
  check_reduce(op, x, csr);
  check_rule(op, reduce, ties);
  const OnDevice on_device(x.device());
  ReduceArgs args;
  args.arg_size = static_cast<int>(arg_size(op, arg_dtype));
  args.graph = compressed_graph(csr);
  const int64_t rows = args.graph.num_rows, width = x.size(1);
  Tensor out = at::empty({rows, width}, x.options());
  Tensor arg = at::empty({rows, width}, x.options().dtype(arg_dtype));
  Tensor tied = at::zeros({rows}, x.options().dtype(at::kByte));
  if (out.numel() == 0) return {out, arg, tied};
  const Tensor packed = rows_of_16_bytes(x.unsqueeze(1));
  const int64_t numbers = 16 / x.element_size();
  const bool shares = ties != "first", wide_index = csr[0].scalar_type() == at::kLong;
  const Storage storage = storage_of(x.scalar_type());
  args.width = static_cast<int>(width), args.vectors = static_cast<int>(packed.size(2) / numbers);
  args.whole = width % numbers == 0;
  args.is_max = reduce == "max", args.zero_shares = ties == "scatter";
  args.fill = fill;
  args.x = reduce_rows(packed);
  args.out = out.data_ptr(), args.arg = arg.data_ptr(), args.tied = tied.data_ptr<uint8_t>();
  ReduceProblem problem =
      reduce_problem(args.graph, packed, args.vectors, GraphArrays(csr, csc, max_degrees).max_degrees[kInCsr]);
  problem.narrow_sub_warps = true;
  budget_carry(problem, args.vectors * best_segment_bytes(size_of(storage), wide_index, shares), out);
  args.plan = make_reduce_plan(problem);
  const Tensor carry = take_carry(problem, out, args);
  run_reduce(storage, wide_index, shares, args, on_device.queue());
  return {out, arg, tied};
}

// log2 of the features of a feature tile, 8 to 128: the most with which the sums stay in L2 and within half of the
// result's memory.
int slice_log2(const ScatterArgs& args, int64_t sum_bytes, int64_t l2_bytes, int64_t result_bytes) {
  const int64_t fits = std::min(l2_bytes * kScatterL2Percent / 100, std::max<int64_t>(result_bytes / 2, 1 << 20));
  int log2 = 3;
  while ((1 << log2) < args.width && log2 < (sum_bytes > 8 ? 6 : 7) &&
         (args.num_columns * sum_bytes << (log2 + 1)) <= fits) {
    ++log2;
  }
  return log2;
}

int bits_for(int64_t count) {
  int bits = 1;
  while ((int64_t(1) << bits) < count) ++bits;
  return bits;
}

// The checked arguments of a backward.
struct Backward {
  const Tensor &grad_out, &x, &out, &arg, &tied;
  GraphArrays graph;
  OptTensor positions;  // positions of edges within their CSR rows, in the order of graph.csc
  bool shares;
  Storage storage;
  int64_t rows, width;
  const jit::Queue& queue;

  // x or out in the layout of the kernels, which read them only if ties share the gradient.
  Tensor rows_where_shared(const Tensor& t) const { return shares ? rows_of_16_bytes(t.unsqueeze(1)) : t.unsqueeze(1); }
};

GradientProblem problem_of(const Backward& b) {
  return {b.storage,
          static_cast<int>(b.arg.element_size()),
          b.graph.csr[0].scalar_type() == at::kLong,
          b.shares,
          !b.graph.csc.empty(),
          b.rows,
          b.x.size(0),
          b.graph.csr[1].size(0),
          b.width};
}

GradientDevice gradient_device(const at::Tensor& x) {
  const int device = x.get_device();
  return {device_attribute(jit::Attribute::multiprocessors, device),
          device_attribute(jit::Attribute::shared_bytes_of_block, device),
          device_attribute(jit::Attribute::clusters, device) != 0};
}

Tensor find_positions(at::TensorList csr, const jit::Queue& queue) {
  Tensor positions = at::empty({csr[1].size(0)}, csr[1].options());
  const ReduceProblem problem = reduce_problem(compressed_graph(csr), csr[1], 8);
  edge_positions(compressed_graph(csr), make_reduce_plan(problem).part, positions.data_ptr<int32_t>(), queue);
  return positions;
}

void gather_gradient(const Backward& b, const Tensor& grad_x) {
  const Tensor grad = rows_of_16_bytes(b.grad_out.unsqueeze(1)), x = b.rows_where_shared(b.x);
  const Tensor out = b.rows_where_shared(b.out), where = b.arg.contiguous();
  const Tensor positions = b.positions ? *b.positions : find_positions(b.graph.csr, b.queue);
  GatherArgs args;
  args.graph = compressed_graph(b.graph.csc);
  if (b.positions) args.graph.edge_ids = nullptr;  // positions are in CSC order, not by edge id
  args.width = static_cast<int>(b.width);
  args.vectors = static_cast<int>(b.width * grad.element_size() / 16);
  args.grad = reduce_rows(grad), args.x = reduce_rows(x), args.out = reduce_rows(out);
  args.arg = where.data_ptr(), args.arg_size = static_cast<int>(where.element_size());
  args.positions = positions.const_data_ptr<int32_t>();
  args.grad_x = grad_x.data_ptr();
  ReduceProblem problem = reduce_problem(args.graph, grad, args.vectors, b.graph.max_degrees[kInCsc]);
  const int64_t numbers = 16 / grad.element_size();
  problem.vector_bytes = static_cast<int>(numbers * (grad.element_size() + where.element_size()));
  problem.narrow_sub_warps = true;
  choose_slices(problem, args.plan);
  budget_carry(problem, args.vectors * numbers * int64_t(sizeof(float)), grad_x);
  choose_shares(problem, args.plan);
  const Tensor carry = take_carry(problem, grad_x, args);
  gather_grad(b.storage, b.shares, args, b.queue);
}

// The arguments of the scattered backward, and the tensors they point into.
struct Sent {
  ScatterArgs args;
  Tensor packed, where, values, flags, largest;
};

Sent what_is_sent(const Backward& b, bool zero_shares, const Tensor& grad_x) {
  Sent sent;
  const Tensor& packed = sent.packed = b.rows_where_shared(b.x);
  const Tensor& where = sent.where = b.arg.contiguous();
  const Tensor &values = sent.values = b.shares ? b.out.contiguous() : b.out, &flags = sent.flags = b.tied.contiguous();
  ScatterArgs& args = sent.args;
  args.graph = compressed_graph(b.graph.csr);
  args.width = static_cast<int>(b.width), args.num_columns = b.x.size(0);
  args.grad = b.grad_out.data_ptr(), args.grad_row = b.grad_out.stride(0), args.grad_column = b.grad_out.stride(1);
  args.arg = where.data_ptr(), args.arg_size = static_cast<int>(where.element_size());
  args.shares = b.shares, args.zero_shares = zero_shares, args.tied = flags.data_ptr<uint8_t>();
  args.x = reduce_rows(packed), args.out = values.data_ptr(), args.grad_x = grad_x.data_ptr();
  args.headroom = bits_for(b.rows);
  const at::ScalarType bits = b.storage == Storage::f64 ? at::kLong : at::kInt;
  sent.largest = at::empty({b.width + 2}, b.x.options().dtype(bits));
  args.largest = sent.largest.data_ptr();
  return sent;
}

void send_gradient(const Backward& b, bool zero_shares, const Tensor& grad_x) {
  Sent sent = what_is_sent(b, zero_shares, grad_x);
  ScatterArgs& args = sent.args;
  const Tensor& packed = sent.packed;
  const bool wide_index = b.graph.csr[0].scalar_type() == at::kLong;
  const int64_t sum_bytes = b.storage == Storage::f64 ? 16 : 8;
  const int64_t l2_bytes = device_attribute(jit::Attribute::l2_bytes, b.x.get_device());
  args.columns_log2 = slice_log2(args, sum_bytes, l2_bytes, grad_x.nbytes());
  const int step = 1 << args.columns_log2;
  const Tensor sums = at::zeros({args.num_columns * step * sum_bytes / 8}, b.x.options().dtype(at::kLong));
  args.sums = reinterpret_cast<long long*>(sums.data_ptr<int64_t>());
  const int64_t numbers = 16 / b.x.element_size();
  ReduceProblem problem = reduce_problem(args.graph, packed, std::min<int64_t>(32, (step + numbers - 1) / numbers));
  problem.narrow_sub_warps = true;
  args.plan = make_reduce_plan(problem);
  measure(b.storage, args, b.queue);
  for (args.first = 0; args.first < b.width; args.first += step) {
    args.columns = std::min<int>(step, args.width - args.first);
    slice(b.storage, wide_index, args, b.queue);
  }
  args.first = 0, args.columns = args.width, args.columns_log2 = bits_for(b.width);
  rest(b.storage, wide_index, args, b.queue);
}

void own_gradient(const Backward& b, bool zero_shares, const BlockSums& sums, const Tensor& grad_x) {
  SharedScatterArgs shared;
  shared.owners_log2 = sums.blocks_log2, shared.nodes = static_cast<int>(sums.nodes);
  shared.groups = static_cast<unsigned>(sums.groups);
  Sent sent = what_is_sent(b, zero_shares, grad_x);
  sent.args.columns = sent.args.width, sent.args.columns_log2 = sums.columns_log2;
  shared.scatter = sent.args;
  measure(b.storage, shared.scatter, b.queue);
  shared_scatter_grad(b.storage, b.graph.csr[0].scalar_type() == at::kLong, shared, b.queue);
}

// The plan of the backward; nothing if the chosen engine does not support the inputs.
std::optional<GradientPlan> choose_engine(const Backward& b) {
  const GradientProblem problem = problem_of(b);
  const GradientDevice device = gradient_device(b.x);
  const std::string& name = chosen_gradient_engine();
  return name == kAnyGradientEngine ? plan_gradient(problem, device) : plan_gradient_by(name, problem, device);
}

Tensor positions_of_edges(at::TensorList csr) {
  check_edge_positions("edgeless::edge_positions", csr);
  const OnDevice on_device(csr[0].device());
  if (csr[0].scalar_type() == at::kInt) return find_positions(csr, on_device.queue());
  const Tensor counts = csr[0].diff(), begins = csr[0].slice(0, 0, -1).repeat_interleave(counts, {}, csr[1].size(0));
  const Tensor places = (at::arange(csr[1].size(0), csr[1].options()) - begins).to(at::kInt);
  return csr.size() == 3 ? at::empty_like(places).scatter_(0, csr[2], places) : places;
}

Tensor neighbor_reduce_backward(const Tensor& grad_out, const Tensor& x, const Tensor& out, const Tensor& arg,
                                const Tensor& tied, at::TensorList csr, at::TensorList csc, c10::string_view reduce,
                                c10::string_view ties, at::IntArrayRef max_degrees) {
  const char* op = "edgeless::neighbor_reduce_backward";
  check_reduce(op, x, csr);
  check_rule(op, reduce, ties);
  const int64_t rows = csr[0].size(0) - 1, width = x.size(1);
  check_shape(op, "grad_out", grad_out, {rows, width});
  check_dtype(op, "grad_out", grad_out, x.scalar_type());
  check_shape(op, "out", out, {rows, width});
  check_dtype(op, "out", out, x.scalar_type());
  check_shape(op, "arg", arg, {rows, width});
  arg_size(op, arg.scalar_type());
  check_shape(op, "tied", tied, {rows});
  check_dtype(op, "tied", tied, at::kByte);
  check_device(op, "grad_out", grad_out, x.device());
  check_device(op, "out", out, x.device());
  check_device(op, "arg", arg, x.device());
  check_device(op, "tied", tied, x.device());
  const GatheredOver over(csc);
  over.check(op, x.size(0), csr);
  const OnDevice on_device(x.device());
  Tensor grad_x = at::empty(x.sizes(), x.options());
  if (grad_x.numel() == 0 || csr[1].size(0) == 0) return grad_x.zero_();
  const Backward b{grad_out,
                   x,
                   out,
                   arg,
                   tied,
                   {csr, over.graph, max_degrees},
                   over.positions,
                   ties != "first",
                   storage_of(x.scalar_type()),
                   rows,
                   width,
                   on_device.queue()};
  const std::optional<GradientPlan> chosen = choose_engine(b);
  TORCH_CHECK_VALUE(chosen, op, ": the chosen engine must be one that these inputs allow, got '",
                    chosen_gradient_engine(), "'");
  switch (chosen->engine) {
    case GradientEngine::gather: gather_gradient(b, grad_x); break;
    case GradientEngine::shared_scatter: own_gradient(b, ties == "scatter", chosen->sums, grad_x); break;
    case GradientEngine::scatter: send_gradient(b, ties == "scatter", grad_x); break;
  }
  return grad_x;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CUDA, m) {
  m.impl("edge_positions", positions_of_edges);
  m.impl("neighbor_reduce", neighbor_reduce);
  m.impl("neighbor_reduce_backward", neighbor_reduce_backward);
}

}  // namespace edgeless::cuda::reduction
