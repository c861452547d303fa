#include "sum.h"

#include <ATen/ATen.h>

#include "../common/launch.h"
#include "../common/segment_reduce_tensors.h"
#include "../common/storage_of.h"
#include "../common/vector_rows.h"
#include "blocks_cuda.h"
#include "cuda/sum.h"

namespace edgeless::cuda {
namespace {

using at::Tensor;

// [N, H, F] as [N, H * F] with 16-byte aligned rows.
Tensor rows_of(const Tensor& x) {
  return rows_of_16_bytes(x.reshape({x.size(0), 1, x.size(1) * x.size(2)})).squeeze(1);
}

// Rows times their scale, rounded to 16 bits as PyTorch rounds the product.
Tensor scaled_rows(const Tensor& x, const Tensor& scale, const jit::Queue& queue) {
  Tensor out = at::empty(x.sizes(), x.options());
  wsb::ScaleArgs args;
  args.x = static_cast<const char*>(x.const_data_ptr()), args.x_row = x.stride(0) * x.element_size();
  args.rows = x.size(0), args.vectors = static_cast<int>(x.size(1) / 8);
  args.scale = scale.const_data_ptr<float>(), args.out = static_cast<char*>(out.data_ptr());
  wsb::run_scale(storage_of(x.scalar_type()), args, queue);
  return out;
}

}  // namespace

bool wsb_spmm(const Tensor& x, const OptTensor& src_scale, const OptTensor& dst_scale, at::TensorList csr,
              const Tensor& out) {
  if (device_attribute(jit::Attribute::capability_major, x.get_device()) < 8) return false;
  const auto side = blocks_of(csr);
  const OnDevice on_device(x.device());
  Tensor rows = rows_of(x);
  if (src_scale) rows = scaled_rows(rows, src_scale->contiguous(), on_device.queue());
  wsb::SumArgs args;
  args.blocks = blocks_as_kernels_read(*side);
  args.graph = compressed_graph(csr);
  args.wide_index = csr[0].scalar_type() == at::kLong;
  args.x = static_cast<const char*>(rows.const_data_ptr()), args.x_row = rows.stride(0) * rows.element_size();
  args.vectors = static_cast<int>(rows.size(1) / 8);
  const Tensor row_scale = dst_scale ? dst_scale->contiguous() : Tensor();
  if (row_scale.defined()) args.row_scale = row_scale.const_data_ptr<float>();
  args.out = out.data_ptr(), args.wide = out.scalar_type() == at::kFloat;
  const int device = x.get_device();
  // An SM holds sixteen warps. Warps share windows if there is work for fewer than sixteen times as many warps as the
  // device holds, since otherwise the last wave would leave SMs idle.
  const int64_t warps = args.blocks.windows * ((args.vectors + 7) / 8);
  args.shared_windows = warps < 16 * 16 * device_attribute(jit::Attribute::multiprocessors, device);
  // Feature tiles of 64 elements come first if such a tile of all of x fits in L2; else windows come first, so that L2
  // holds whole rows of neighboring windows.
  args.by_window =
      static_cast<int64_t>(rows.nbytes()) / args.vectors * 8 > device_attribute(jit::Attribute::l2_bytes, device);
  wsb::run_sum(storage_of(x.scalar_type()), args, on_device.queue());
  return true;
}

}  // namespace edgeless::cuda
