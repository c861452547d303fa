// Min and max over in-neighbors on the CPU: checks, allocation, and the distribution of parts and columns to threads.
//
// The gradient is gathered over the CSC if the caller passes it, else scattered (cpu/gradient.h).
#include <torch/library.h>

#include "../common/cpu/partition.h"
#include "../common/cpu/room.h"
#include "../common/cpu/tensors.h"
#include "cpu/args.h"
#include "cpu/kernels.h"
#include "inputs.h"

namespace edgeless::cpu {
namespace {

ReduceArgs reduce_args(const char* op, const at::Tensor& packed, at::TensorList csr, c10::string_view reduce,
                       c10::string_view ties) {
  check_rule(op, reduce, ties);
  ReduceArgs args{};
  args.zero_shares = ties == "scatter";
  args.graph = compressed(csr);
  args.items_per_part = choose_items_per_part(args.graph);
  args.width = packed.size(1);
  args.graph_columns = packed.size(0);
  args.is_min = reduce == "min";
  args.x = rows_of(packed);
  return args;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> neighbor_reduce(const at::Tensor& x, at::TensorList csr,
                                                               at::TensorList /*csc*/, c10::string_view reduce,
                                                               double fill, at::ScalarType arg_dtype,
                                                               c10::string_view ties, at::IntArrayRef /*max_degrees*/) {
  const char* op = "edgeless::neighbor_reduce";
  check_reduce(op, x, csr);
  const at::Tensor packed = packed_rows(x);
  ReduceArgs args = reduce_args(op, packed, csr, reduce, ties);
  const bool wanted = arg_dtype != at::kBool;
  args.arg_size = wanted ? arg_size(op, arg_dtype) : 1;
  args.fill = fill;
  const int64_t rows = args.graph.num_rows;
  at::Tensor out = empty_rows({rows, args.width}, x.options());
  at::Tensor arg = empty_rows({wanted ? rows : 0, args.width}, x.options().dtype(arg_dtype));
  at::Tensor tied = at::empty({wanted ? rows : 0}, x.options().dtype(at::kByte));
  if (out.numel() == 0) return {out, arg, tied.zero_()};
  args.out = out_rows(out);
  args.arg = wanted ? arg.data_ptr() : nullptr;
  if (ties == "first" || !wanted) {
    tied.zero_();
  } else {
    args.tied = tied.data_ptr<uint8_t>();
  }
  with_arithmetic(x.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    const auto kernels = choose_reduce_kernels<A>();
    const int64_t parts = num_parts(args.graph, args.items_per_part), scratch = kernels.scratch_size(args);
    at::Tensor carry;
    if (parts > 1) {
      const int64_t bytes = ((args.width + 15) / 16 * 16) * 2 * int64_t(sizeof(A)) + 64;
      carry = at::empty({parts * 2 * bytes}, x.options().dtype(at::kByte));
      args.carry = carry.data_ptr();
    }
    for_each_part<A>(parts, scratch, [&](int64_t part, A* memory) { kernels.run(args, part, memory); });
    if (parts > 1) {
      for_each_part<A>(parts, scratch, [&](int64_t part, A* memory) { kernels.merge(args, part, memory); });
    }
    return 0;
  });
  return {out, arg, tied};
}

// The position of every edge within its row, by edge id.
at::Tensor positions_in_rows(const Compressed& graph, const at::TensorOptions& options) {
  at::Tensor positions = empty_rows({graph.num_edges}, options.dtype(at::kInt));
  int32_t* out = positions.data_ptr<int32_t>();
  const int64_t items = choose_items_per_part(graph), parts = num_parts(graph, items);
  for_each_part<char>(parts, 0, [&](int64_t part, char*) {
    Walk walk(graph, items, part);
    for (Segment segment; walk.next(&segment);) {
      const int64_t begin = graph.row_begin(segment.row);
      for (int64_t p = segment.begin; p < segment.end; ++p) out[graph.edge_id(p)] = static_cast<int32_t>(p - begin);
    }
  });
  return positions;
}

bool any_nonzero(const uint8_t* flags, int64_t n) {
  uint8_t any = 0;
  for (int64_t i = 0; i < n; ++i) any |= flags[i];
  return any != 0;
}

at::Tensor edge_positions(at::TensorList csr) {
  check_edge_positions("edgeless::edge_positions", csr);
  return positions_in_rows(compressed(csr), csr[0].options());
}

template <class A>
void gather_gradient(ReduceArgs& args, const Optional<at::Tensor>& known, const at::TensorOptions& options) {
  const auto kernels = choose_reduce_kernels<A>();
  args.items_per_part = choose_items_per_part(args.transposed);
  const int64_t parts = num_parts(args.transposed, args.items_per_part), scratch = kernels.scratch_size(args);
  at::Tensor positions, carry;
  if (known) {  // positions are in CSC order, not by edge id
    args.positions = known->const_data_ptr<int32_t>();
    args.transposed.edge_ids = nullptr;
  } else if (args.graph.edge_ids) {
    positions = positions_in_rows(args.graph, options);
    args.positions = positions.data_ptr<int32_t>();
  }
  if (parts > 1) {
    carry = at::empty({parts * 2 * args.width * int64_t(sizeof(A))}, options.dtype(at::kByte));
    args.carry = carry.data_ptr();
  }
  for_each_part<A>(parts, scratch, [&](int64_t part, A* memory) { kernels.gather(args, part, memory); });
  if (parts > 1) {
    for_each_part<A>(parts, scratch, [&](int64_t part, A* memory) { kernels.merge_gather(args, part, memory); });
  }
}

// Calls work(first, last, scratch) for feature tiles of `columns` columns.
template <class A, class F>
void for_each_slice(const ReduceArgs& args, int64_t columns, int64_t scratch, F&& work) {
  for_each_part<A>((args.width + columns - 1) / columns, scratch, [&](int64_t slice, A* memory) {
    work(slice * columns, std::min((slice + 1) * columns, args.width), memory);
  });
}

at::Tensor neighbor_reduce_backward(const at::Tensor& grad_out, const at::Tensor& x, const at::Tensor& out,
                                    const at::Tensor& arg, const at::Tensor& tied, at::TensorList csr,
                                    at::TensorList csc, c10::string_view reduce, c10::string_view ties,
                                    at::IntArrayRef /*max_degrees*/) {
  const char* op = "edgeless::neighbor_reduce_backward";
  check_reduce(op, x, csr);
  const bool may_share = ties != "first";  // if not, x and out are not read
  const at::Tensor packed = may_share ? packed_rows(x) : x, grad = packed_rows(grad_out);
  const at::Tensor saved = may_share ? packed_rows(out) : grad;
  ReduceArgs args = reduce_args(op, packed, csr, reduce, ties);
  const int64_t rows = args.graph.num_rows;
  check_shape(op, "grad_out", grad_out, {rows, args.width});
  check_dtype(op, "grad_out", grad_out, x.scalar_type());
  check_shape(op, "out", out, {rows, args.width});
  check_dtype(op, "out", out, x.scalar_type());
  check_shape(op, "arg", arg, {rows, args.width});
  check_shape(op, "tied", tied, {rows});
  check_dtype(op, "tied", tied, at::kByte);
  const GatheredOver over(csc);
  over.check(op, x.size(0), csr);
  const at::Tensor where = arg.contiguous(), flags = tied.contiguous();
  const bool shares = may_share && any_nonzero(flags.data_ptr<uint8_t>(), rows), gathers = !csc.empty();
  // share() adds to grad_x, which must not be rounded before.
  const auto dtype = shares && gathers ? opmath_dtype(x.scalar_type()) : x.scalar_type();
  at::Tensor grad_x = empty_rows(x.sizes(), x.options().dtype(dtype));
  if (grad_x.numel() == 0 || args.graph.num_edges == 0) return grad_x.zero_().to(x.scalar_type());
  args.arg = where.data_ptr();
  args.arg_size = arg_size(op, arg.scalar_type());
  args.grad_out = rows_of(grad);
  args.saved_out = rows_of(saved);
  args.tied = shares ? flags.data_ptr<uint8_t>() : nullptr;
  args.grad_x = out_rows(grad_x);
  with_arithmetic(x.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    const auto kernels = choose_reduce_kernels<A>();
    constexpr int64_t line = 64 / sizeof(A);  // feature tiles are whole cache lines, to avoid false sharing
    const int64_t lines = (args.width + line - 1) / line;
    int64_t per_slice = (lines + at::get_num_threads() - 1) / at::get_num_threads();
    if (gathers) {
      args.transposed = compressed(over.graph);
      gather_gradient<A>(args, over.positions, x.options());
      if (!shares) return 0;
      for_each_slice<A>(args, per_slice * line, kernels.scratch_size(args),
                        [&](int64_t first, int64_t last, A* memory) { kernels.share(args, first, last, memory); });
    } else {
      constexpr int64_t cache = int64_t{4} << 20;  // bytes per thread
      per_slice = std::max<int64_t>(1, std::min(per_slice, cache / (args.graph_columns * 64)));
      args.slice = per_slice * line;
      for_each_slice<A>(args, args.slice, kernels.scratch_size(args),
                        [&](int64_t first, int64_t last, A* memory) { kernels.scatter(args, first, last, memory); });
    }
    return 0;
  });
  return grad_x.to(x.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CPU, m) {
  m.impl("edge_positions", WithRoom<edge_positions>::call);
  m.impl("neighbor_reduce", WithRoom<neighbor_reduce>::call);
  m.impl("neighbor_reduce_backward", WithRoom<neighbor_reduce_backward>::call);
}

}  // namespace edgeless::cpu
