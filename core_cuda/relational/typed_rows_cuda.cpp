// Ops on rows by type beside products, on CUDA: sums, and a blend of two rows. Nothing waits for the device.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <climits>
#include <vector>

#include "../common/launch.h"
#include "../common/storage_of.h"
#include "cuda/typed_rows.h"
#include "inputs.h"

namespace edgeless::cuda::relational {
namespace {

using at::Tensor;

constexpr int64_t kLeast = 64;  // least entries per chunk

// Entries per chunk, such that every SM gets several blocks.
int chunk_of(int64_t entries, int device) {
  const int64_t wanted = 8 * device_attribute(jit::Attribute::multiprocessors, device);
  return static_cast<int>(std::clamp<int64_t>((entries + wanted - 1) / wanted, kLeast, INT_MAX / 2));
}

TypedRowsArgs args_of(const Tensor& rows, const Tensor& offsets, const OptTensor& ids) {
  TypedRowsArgs args;
  args.entries.offsets = offsets.const_data_ptr(), args.entries.wide = offsets.scalar_type() == at::kLong;
  args.entries.given = true;
  args.entries.count = rows.size(0), args.entries.types = static_cast<int>(offsets.size(0) - 1);
  args.rows = ids ? ids->const_data_ptr() : nullptr;
  args.width = static_cast<int>(rows.size(1));
  args.chunk = chunk_of(rows.size(0), rows.get_device());
  return args;
}

// Workspace for the sums of every chunk.
Tensor partial_of(const TypedRowsArgs& args, const Tensor& like) {
  return at::empty({num_tiles(args.entries.count, args.entries.types, args.chunk), args.width},
                   like.options().dtype(opmath_dtype(like.scalar_type())));
}

Tensor typed_sums(const Tensor& given, const Tensor& given_offsets) {
  check_typed_sums("edgeless::typed_sums", given, given_offsets);
  const OnDevice on_device(given.device());
  const Tensor x = given.contiguous(), offsets = given_offsets.contiguous();
  Tensor sums = at::empty({offsets.size(0) - 1, x.size(1)}, x.options());
  if (x.numel() == 0 || sums.numel() == 0) return sums.zero_();
  TypedRowsArgs args = args_of(x, offsets, {});
  const Tensor partial = partial_of(args, x);
  args.grad = x.const_data_ptr(), args.partial = partial.mutable_data_ptr(), args.sums = sums.mutable_data_ptr();
  run_typed_sums(storage_of(x.scalar_type()), args, on_device.queue());
  return sums;
}

Tensor typed_blend(const Tensor& given_y, const Tensor& given_x, const Tensor& given_alpha, const Tensor& given_offsets,
                   const OptTensor& given_rows) {
  check_typed_blend("edgeless::typed_blend", given_y, given_x, given_alpha, given_offsets, given_rows);
  const OnDevice on_device(given_y.device());
  const Tensor y = given_y.contiguous(), x = given_x.contiguous(), alpha = given_alpha.contiguous();
  const Tensor offsets = given_offsets.contiguous();
  const OptTensor rows = contiguous(given_rows);
  Tensor out = at::empty({y.size(0), y.size(1)}, y.options());
  if (out.numel() == 0) return out;
  if (alpha.size(0) == 0) return out.zero_();
  TypedRowsArgs args = args_of(y, offsets, rows);
  args.y = y.const_data_ptr(), args.x = x.const_data_ptr(), args.alpha = alpha.const_data_ptr();
  args.out_y = out.mutable_data_ptr();
  run_typed_blend(storage_of(y.scalar_type()), args, on_device.queue());
  return out;
}

std::vector<Tensor> typed_blend_backward(const Tensor& given_grad, const Tensor& given_y, const Tensor& given_x,
                                         const Tensor& given_alpha, const Tensor& given_offsets,
                                         const OptTensor& given_rows, c10::List<bool> needs) {
  const char* op = "edgeless::typed_blend_backward";
  check_typed_blend(op, given_y, given_x, given_alpha, given_offsets, given_rows);
  check_blend_grad(op, given_grad, given_y, needs);
  const OnDevice on_device(given_y.device());
  const Tensor grad = given_grad.contiguous(), y = given_y.contiguous(), x = given_x.contiguous();
  const Tensor alpha = given_alpha.contiguous(), offsets = given_offsets.contiguous();
  const OptTensor rows = contiguous(given_rows);
  std::vector<Tensor> results;
  for (const Tensor& like : {y, x, alpha}) {
    results.push_back(needs[results.size()] ? at::empty(like.sizes(), like.options()) : at::empty({0}, like.options()));
  }
  if (y.numel() == 0 || alpha.size(0) == 0) {
    for (Tensor& result : results) result.zero_();
    return results;
  }
  TypedRowsArgs args = args_of(y, offsets, rows);
  args.grad = grad.const_data_ptr(), args.y = y.const_data_ptr(), args.x = x.const_data_ptr();
  args.alpha = alpha.const_data_ptr();
  if (needs[0]) args.out_y = results[0].mutable_data_ptr();
  if (needs[1]) args.out_x = results[1].mutable_data_ptr();
  const Tensor partial = needs[2] ? partial_of(args, y) : Tensor();
  if (needs[2]) args.partial = partial.mutable_data_ptr(), args.sums = results[2].mutable_data_ptr();
  args.total = true;
  run_typed_sums(storage_of(y.scalar_type()), args, on_device.queue());
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CUDA, m) {
  m.impl("typed_sums", typed_sums);
  m.impl("typed_blend", typed_blend);
  m.impl("typed_blend_backward", typed_blend_backward);
}

}  // namespace edgeless::cuda::relational
