// SpMM and SDDMM on the CPU: checks, allocation, and the distribution of merge-path parts to threads.
#include <torch/library.h>

#include "../common/cpu/partition.h"
#include "../common/cpu/room.h"
#include "../common/cpu/tensors.h"
#include "cpu/args.h"
#include "cpu/kernels.h"
#include "inputs.h"

namespace edgeless::cpu {
namespace {

template <class A>
struct ScaleMemory {
  at::Tensor row, column;

  void set(SpmmArgs<A>& args, const OptTensor& row_scale, const OptTensor& column_scale) {
    if (row_scale) args.row_scale = (row = row_scale->contiguous()).template data_ptr<A>();
    if (column_scale) args.column_scale = (column = column_scale->contiguous()).template data_ptr<A>();
  }
};

template <class A>
void run_spmm(SpmmPass pass, SpmmArgs<A>& args, const at::TensorOptions& options) {
  args.items_per_part = choose_items_per_part(args.graph);
  const int64_t parts = num_parts(args.graph, args.items_per_part);
  const auto kernels = choose_spmm_kernels<A>();
  const int64_t scratch = kernels.scratch_size(args);
  at::Tensor carry;
  if (parts > 1 && pass == SpmmPass::product) {
    carry = at::empty({parts * 2 * args.heads * args.width}, options);
    args.carry = carry.data_ptr<A>();
  }
  for_each_part<A>(parts, scratch, [&](int64_t part, A* memory) { kernels.run(pass, args, part, memory); });
  if (!args.carry) return;
  for_each_part<A>(parts, scratch, [&](int64_t part, A* memory) { kernels.merge(args, part, memory); });
}

// out = the SpMM of x [columns, H, F].
void sum_into(const at::Tensor& out, const at::Tensor& x, const OptTensor& weight, const OptTensor& src_scale,
              const OptTensor& dst_scale, at::TensorList csr) {
  if (out.numel() == 0) return;
  const auto statistics = opmath_dtype(x.scalar_type());
  with_arithmetic(x.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    SpmmArgs<A> args{};
    const at::Tensor packed = packed_rows(x);
    ScaleMemory<A> scales;
    args.graph = compressed(csr);
    args.heads = weight && weight->stride(1) != 0 ? x.size(1) : 1;  // heads with one weight are one wide head
    args.width = x.size(1) * x.size(2) / args.heads;
    args.x = rows_of(packed);
    if (weight) {
      args.weight = weight->const_data_ptr<A>();
      args.weight_edge_stride = weight->stride(0);
      args.weight_head_stride = weight->stride(1);
    }
    scales.set(args, dst_scale, src_scale);
    args.out = out_rows(out);
    run_spmm(SpmmPass::product, args, x.options().dtype(statistics));
    return 0;
  });
}

at::Tensor spmm(const at::Tensor& x, const OptTensor& weight, const OptTensor& src_scale, const OptTensor& dst_scale,
                at::TensorList csr, at::TensorList csc, Optional<at::ScalarType> out_dtype,
                at::IntArrayRef /*max_degrees*/) {
  const char* op = "edgeless::spmm";
  if (x.dim() == 2) return spmm(x.unsqueeze(1), weight, src_scale, dst_scale, csr, csc, out_dtype, {}).squeeze(1);
  check_spmm(op, x, weight, src_scale, dst_scale, csr);
  const auto kind = out_dtype.value_or(x.scalar_type());
  check_sum_dtype(op, "out_dtype", kind, x);
  at::Tensor out = empty_rows({csr[0].size(0) - 1, x.size(1), x.size(2)}, x.options().dtype(kind));
  sum_into(out, x, weight, src_scale, dst_scale, csr);
  return out;
}

void spmm_into(const at::Tensor& out, const at::Tensor& given, at::TensorList csr, at::IntArrayRef /*max_degrees*/) {
  const char* op = "edgeless::spmm_into";
  const at::Tensor x = given.dim() == 2 ? given.unsqueeze(1) : given;
  check_spmm(op, x, {}, {}, {}, csr);
  check_spmm_out(op, out, given, csr);
  sum_into(out, x, {}, {}, {}, csr);
}

at::Tensor sddmm(const at::Tensor& dst, const at::Tensor& src, const OptTensor& src_scale, const OptTensor& dst_scale,
                 at::TensorList csr, at::TensorList csc) {
  const char* op = "edgeless::sddmm";
  if (dst.dim() == 2 && src.dim() == 2) {
    return sddmm(dst.unsqueeze(1), src.unsqueeze(1), src_scale, dst_scale, csr, csc);
  }
  check_spmm(op, src, {}, src_scale, dst_scale, csr);
  check_shape(op, "dst", dst, {csr[0].size(0) - 1, src.size(1), src.size(2)});
  check_rows_dtype(op, "dst", dst);
  TORCH_CHECK_VALUE(opmath_dtype(dst.scalar_type()) == opmath_dtype(src.scalar_type()), op, ": dst and src must ",
                    "both be float64 or neither, got ", dst.scalar_type(), " and ", src.scalar_type());
  check_device(op, "dst", dst, src.device());
  const auto statistics = opmath_dtype(src.scalar_type());
  at::Tensor products = empty_rows({csr[1].size(0), src.size(1)}, src.options().dtype(statistics));
  if (products.numel() == 0 || src.numel() == 0) return products.zero_();
  with_arithmetic(src.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    SpmmArgs<A> args{};
    const at::Tensor columns = packed_rows(src), rows = packed_rows(dst);
    ScaleMemory<A> scales;
    args.graph = compressed(csr);
    args.heads = src.size(1);
    args.width = src.size(2);
    args.x = rows_of(columns);
    args.own = rows_of(rows);
    scales.set(args, dst_scale, src_scale);
    args.products = products.data_ptr<A>();
    run_spmm(SpmmPass::sampled, args, products.options());
    return 0;
  });
  return products;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CPU, m) {
  m.impl("spmm", WithRoom<spmm>::call);
  m.impl("spmm_into", WithRoom<spmm_into>::call);
  m.impl("sddmm", WithRoom<sddmm>::call);
}

}  // namespace edgeless::cpu
