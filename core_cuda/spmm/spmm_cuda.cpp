// SpMM and SDDMM on CUDA: checks, allocation, choice of engine and plan. The kernels and their argument structs are in
// cuda/. Nothing here synchronizes with the device.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "../common/decisions.h"
#include "../common/launch.h"
#include "../common/segment_reduce_tensors.h"
#include "../common/thresholds.h"
#include "../common/vector_rows.h"
#include "../wsb/sum.h"
#include "cuda/kernels.h"
#include "cusparse_engine.h"
#include "cusparse_refusal.h"
#include "inputs.h"

namespace edgeless::cuda::spmm {
namespace {

using at::Tensor;

// Contiguous copies of the two scales, kept alive for the launch.
template <class A>
struct Scales {
  Tensor row, column;

  template <class Args>
  void set(Args& args, const OptTensor& row_scale, const OptTensor& column_scale) {
    if (row_scale) args.row_scale = (row = row_scale->contiguous()).template data_ptr<A>();
    if (column_scale) args.column_scale = (column = column_scale->contiguous()).template data_ptr<A>();
  }
};

// Returns whether all heads are contiguous and share one weight, so that they can be processed as one wide head.
bool joins_heads(const Tensor& x, const OptTensor& weight) {
  const bool same = !weight || weight->size(1) == 1 || weight->stride(1) == 0;
  return same && (x.size(1) == 1 || x.stride(1) == x.size(2) * x.stride(2));
}

// out = the SpMM of x [columns, H, F]; out must not be empty.
void sum_into(const Tensor& out, const Tensor& x, const OptTensor& weight, const OptTensor& src_scale,
              const OptTensor& dst_scale, at::TensorList csr, at::TensorList csc, at::IntArrayRef max_degrees) {
  const auto statistics = opmath_dtype(x.scalar_type());
  const OnDevice on_device(x.device());
  const Engine engine =
      decided_engine(chosen_engine(), csr, "spmm", x.scalar_type(), x.size(1) * x.size(2), weight.has_value());
  const bool by_blocks = engine == Engine::wsb         ? !wsb_refusal(x, weight, csr)
                         : engine == Engine::automatic ? blocks_pay(x, weight, csr)
                                                       : false;
  if (by_blocks && wsb_spmm(x, src_scale, dst_scale, csr, out)) return;
  if (is_cusparse(engine) && !cusparse_spmm_refusal(engine, x, weight, csr) &&
      cusparse_spmm(engine, x, weight, src_scale, dst_scale, csr, out)) {
    return;
  }
  const int64_t wide_row = x.size(1) * x.size(2);
  const Tensor joined = x.size(1) > 1 && joins_heads(x, weight)
                            ? x.as_strided({x.size(0), 1, wide_row}, {x.stride(0), wide_row, x.stride(2)})
                            : x;
  const int64_t fitting = vector_bytes(joined);
  const Tensor rows = fitting ? joined : padded_rows(joined);
  const int bytes = fitting ? static_cast<int>(fitting) : 16;
  with_arithmetic(x.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    SpmmArgs<A> args;
    Scales<A> scales;
    args.graph = compressed_graph(csr);
    const int64_t heads = rows.size(1);
    args.head_vectors = static_cast<int>(rows.size(2) * rows.element_size() / bytes);
    args.vectors = static_cast<int>(heads * args.head_vectors);
    args.x = reduce_rows(rows);
    if (weight) {
      args.weight = weight->data_ptr<A>();
      args.weight_edge = weight->stride(0), args.weight_head = weight->stride(1);
      args.weight_by_head = heads > 1 && weight->stride(1) != 0;
    }
    scales.set(args, dst_scale, src_scale);
    args.out = static_cast<char*>(out.data_ptr());
    args.dim = static_cast<int>(joined.size(2)), args.out_row = heads * args.dim;
    args.wide = out.scalar_type() != x.scalar_type();
    const int64_t numbers = bytes / x.element_size();
    args.whole = args.dim % numbers == 0;
    ReduceProblem problem =
        reduce_problem(args.graph, rows, args.vectors, GraphArrays(csr, csc, max_degrees).max_degrees[kInCsr]);
    problem.vector_bytes = bytes;
    const bool weighed = weight || src_scale;
    problem.narrow_sub_warps =
        narrow_sums_pay(args.graph.num_edges, args.graph.num_rows, x.element_size() == 2, weighed);
    budget_carry(problem, args.vectors * numbers * int64_t(sizeof(A)), out);
    const bool wide_index = csr[0].scalar_type() == at::kLong;
    args.plan = make_sum_plan(problem, weighed, args.weight_by_head, static_cast<int>(x.element_size()), wide_index);
    const Tensor carry = take_carry(problem, out, args);
    Tensor values;
    const int64_t value_bytes = args.graph.num_edges * int64_t(sizeof(A));
    const bool by_edge = weighed && !args.weight_by_head && !wide_index && bytes == 16;
    if (fills_values(by_edge, weight.has_value(), value_bytes, x.size(0) * args.vectors * int64_t(bytes), out.nbytes(),
                     args.plan.slices, args.plan.slice_vectors * int64_t(bytes))) {
      values = at::empty({args.graph.num_edges}, x.options().dtype(statistics));
      fill_values(args, values.data_ptr<A>(), on_device.queue());
      args.values = values.data_ptr<A>();
    }
    run_spmm(storage_of(x.scalar_type()), wide_index, bytes / 4, args, on_device.queue());
    return 0;
  });
}

Tensor spmm(const Tensor& given, const OptTensor& weight, const OptTensor& src_scale, const OptTensor& dst_scale,
            at::TensorList csr, at::TensorList csc, Optional<at::ScalarType> out_dtype, at::IntArrayRef max_degrees) {
  const char* op = "edgeless::spmm";
  const Tensor x = given.dim() == 2 ? given.unsqueeze(1) : given;
  check_spmm(op, x, weight, src_scale, dst_scale, csr);
  const auto kind = out_dtype.value_or(x.scalar_type());
  check_sum_dtype(op, "out_dtype", kind, x);
  at::DimVector sizes(given.sizes());
  sizes[0] = csr[0].size(0) - 1;
  Tensor out = at::empty(sizes, x.options().dtype(kind));
  if (out.numel() > 0) sum_into(out, x, weight, src_scale, dst_scale, csr, csc, max_degrees);
  return out;
}

void spmm_into(const Tensor& out, const Tensor& given, at::TensorList csr, at::IntArrayRef max_degrees) {
  const char* op = "edgeless::spmm_into";
  const Tensor x = given.dim() == 2 ? given.unsqueeze(1) : given;
  check_spmm(op, x, {}, {}, {}, csr);
  check_spmm_out(op, out, given, csr);
  const auto address = reinterpret_cast<uintptr_t>(out.const_data_ptr());
  TORCH_CHECK_VALUE(address % 16 == 0, op, ": out must begin at a whole number of 16 bytes, got address ", address);
  if (out.numel() > 0) sum_into(out, x, {}, {}, {}, csr, {}, max_degrees);
}

Tensor sddmm(const Tensor& dst, const Tensor& src, const OptTensor& src_scale, const OptTensor& dst_scale,
             at::TensorList csr, at::TensorList csc) {
  const char* op = "edgeless::sddmm";
  if (dst.dim() == 2 && src.dim() == 2) {
    return sddmm(dst.unsqueeze(1), src.unsqueeze(1), src_scale, dst_scale, csr, csc);
  }
  check_spmm(op, src, {}, src_scale, dst_scale, csr);
  check_shape(op, "dst", dst, {csr[0].size(0) - 1, src.size(1), src.size(2)});
  check_rows_dtype(op, "dst", dst);
  const auto statistics = opmath_dtype(src.scalar_type());
  TORCH_CHECK_VALUE(opmath_dtype(dst.scalar_type()) == statistics, op,
                    ": dst and src must both be float64 or neither, got ", dst.scalar_type(), " and ",
                    src.scalar_type());
  check_device(op, "dst", dst, src.device());
  const OnDevice on_device(src.device());
  Tensor products = at::empty({csr[1].size(0), src.size(1)}, src.options().dtype(statistics));
  if (products.numel() == 0 || src.numel() == 0) return products.zero_();
  if (is_cusparse(chosen_engine()) && !cusparse_sddmm_refusal(dst, src, csr) &&
      cusparse_sddmm(dst, src, src_scale, dst_scale, csr, products)) {
    return products;
  }
  const auto kind = dst.scalar_type() == src.scalar_type() ? src.scalar_type() : statistics;
  const Tensor own = rows_of_16_bytes(dst.to(kind)), columns = rows_of_16_bytes(src.to(kind));
  with_arithmetic(kind, [&](auto zero) {
    using A = decltype(zero);
    SddmmArgs<A> args;
    Scales<A> scales;
    args.graph = compressed_graph(csr);
    args.heads = static_cast<int>(src.size(1));
    args.own = reduce_rows(own), args.x = reduce_rows(columns);
    scales.set(args, dst_scale, src_scale);
    args.products = products.data_ptr<A>();
    args.vectors = static_cast<int>(columns.size(2) * columns.element_size() / 16);
    while (args.sub_warp_log2 < 5 && (1 << args.sub_warp_log2) < args.vectors) ++args.sub_warp_log2;
    args.edges_of_block = sampled_edges_of_block(args.graph.num_edges);
    run_sddmm(storage_of(kind), csr[0].scalar_type() == at::kLong, args, on_device.queue());
    return 0;
  });
  return products;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CUDA, m) {
  m.impl("spmm", spmm);
  m.impl("spmm_into", spmm_into);
  m.impl("sddmm", sddmm);
}

}  // namespace edgeless::cuda::spmm
