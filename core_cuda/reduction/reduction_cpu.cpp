// Min/max over in-neighbours on the CPU: checks, allocation, and parts and columns dealt out to threads.
#include <torch/library.h>

#include "../common/cpu/partition.h"
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
  args.is_min = reduce == "min";
  args.x = rows_of(packed);
  return args;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> neighbor_reduce(const at::Tensor& x, at::TensorList csr,
                                                               at::TensorList /*csc*/, c10::string_view reduce,
                                                               double fill, at::ScalarType arg_dtype,
                                                               c10::string_view ties) {
  const char* op = "edgeless::neighbor_reduce";
  check_reduce(op, x, csr);
  const at::Tensor packed = packed_rows(x);
  ReduceArgs args = reduce_args(op, packed, csr, reduce, ties);
  args.arg_size = arg_size(op, arg_dtype);
  args.fill = fill;
  const int64_t rows = args.graph.num_rows;
  at::Tensor out = empty_rows({rows, args.width}, x.options());
  at::Tensor arg = empty_rows({rows, args.width}, x.options().dtype(arg_dtype));
  at::Tensor tied = at::empty({rows}, x.options().dtype(at::kByte));
  if (out.numel() == 0) return {out, arg, tied.zero_()};
  args.out = out_rows(out);
  args.arg = arg.data_ptr();
  args.tied = tied.data_ptr<uint8_t>();
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

at::Tensor neighbor_reduce_backward(const at::Tensor& grad_out, const at::Tensor& x, const at::Tensor& out,
                                    const at::Tensor& arg, const at::Tensor& tied, at::TensorList csr,
                                    at::TensorList /*csc*/, c10::string_view reduce, c10::string_view ties) {
  const char* op = "edgeless::neighbor_reduce_backward";
  check_reduce(op, x, csr);
  const at::Tensor packed = packed_rows(x), grad = packed_rows(grad_out), saved = packed_rows(out);
  ReduceArgs args = reduce_args(op, packed, csr, reduce, ties);
  const int64_t rows = args.graph.num_rows;
  check_shape(op, "grad_out", grad_out, {rows, args.width});
  check_dtype(op, "grad_out", grad_out, x.scalar_type());
  check_shape(op, "out", out, {rows, args.width});
  check_dtype(op, "out", out, x.scalar_type());
  check_shape(op, "arg", arg, {rows, args.width});
  check_shape(op, "tied", tied, {rows});
  check_dtype(op, "tied", tied, at::kByte);
  const auto statistics = statistics_dtype(x.scalar_type());
  at::Tensor grad_x = empty_rows(x.sizes(), x.options().dtype(statistics)).zero_();
  const at::Tensor where = arg.contiguous(), flags = tied.contiguous();
  if (grad_x.numel() > 0 && rows > 0) {
    args.arg = where.data_ptr();
    args.arg_size = arg_size(op, arg.scalar_type());
    args.grad_out = rows_of(grad);
    args.saved_out = rows_of(saved);
    args.tied = ties == "first" ? nullptr : flags.data_ptr<uint8_t>();
    args.grad_x = grad_x.data_ptr();
    with_arithmetic(x.scalar_type(), [&](auto zero) {
      using A = decltype(zero);
      const auto kernels = choose_reduce_kernels<A>();
      constexpr int64_t columns = 64 / sizeof(A);  // a cache line: no two threads write the same one
      const int64_t lines = (args.width + columns - 1) / columns;
      const int64_t slices = std::min<int64_t>(lines, at::get_num_threads());
      for_each_part<A>(slices, kernels.scratch_size(args), [&](int64_t slice, A* memory) {
        const int64_t first = lines * slice / slices * columns, last = lines * (slice + 1) / slices * columns;
        kernels.backward(args, first, std::min(last, args.width), memory);
      });
      return 0;
    });
  }
  return grad_x.to(x.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CPU, m) {
  m.impl("neighbor_reduce", neighbor_reduce);
  m.impl("neighbor_reduce_backward", neighbor_reduce_backward);
}

}  // namespace edgeless::cpu
