// The linear maps in front of the attention, several of one input at once, and the row that is added behind it, on
// CUDA.
//
// The products are the libraries'. What is around them is not: the input's gradient is added up inside the products,
// the biases' gradients take two launches for all maps, and a cast of all that autocast rounds takes one.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "../common/launch.h"
#include "cuda/kernels.h"
#include "inputs.h"

namespace edgeless::cuda::maps {
namespace {

using at::Tensor;

// Products of one dtype need neither autograd nor autocast.
struct Below {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

Dtype dtype_of(const char* op, const char* name, at::ScalarType t) {
  switch (t) {
    case at::kFloat: return Dtype::f32;
    case at::kHalf: return Dtype::f16;
    case at::kBFloat16: return Dtype::bf16;
    case at::kDouble: return Dtype::f64;
    default: TORCH_CHECK_VALUE(false, op, ": ", name, " must be a floating dtype, got ", t);
  }
}

std::vector<Tensor> project(const Tensor& x, at::TensorList weights, const c10::List<OptTensor>& biases) {
  const Below below;
  check_maps("edgeless::project", x, weights, biases);
  std::vector<Tensor> outs;
  for (size_t k = 0; k < weights.size(); ++k) {
    const OptTensor bias = biases.get(k);
    outs.push_back(bias ? at::addmm(*bias, x, weights[k].t()) : at::mm(x, weights[k].t()));
  }
  return outs;
}

// sums[t][c] = sum over the rows of matrices[t][:, c]
std::vector<Tensor> sums_of_columns(const char* op, const std::vector<Tensor>& matrices) {
  std::vector<Tensor> sums, kept;
  if (matrices.empty()) return sums;
  const Tensor& some = matrices[0];
  const OnDevice on_device(some.device());
  const int64_t rows = some.size(0);
  for (const Tensor& matrix : matrices) {
    sums.push_back(rows ? at::empty({matrix.size(1)}, matrix.options())
                        : at::zeros({matrix.size(1)}, matrix.options()));
  }
  if (rows == 0) return sums;
  const auto statistics = some.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  for (size_t begin = 0; begin < matrices.size(); begin += kMostTensors) {
    ColumnSumsArgs args;
    args.num_rows = rows, args.chunks = chunks_of(rows);
    for (size_t t = begin; t < std::min(matrices.size(), begin + kMostTensors); ++t) {
      if (matrices[t].size(1) == 0) continue;
      const Tensor& packed = kept.emplace_back(
          matrices[t].stride(1) == 1 || matrices[t].size(1) == 1 ? matrices[t] : matrices[t].contiguous());
      Columns& columns = args.columns[args.tensors++];
      columns.rows = packed.const_data_ptr(), columns.row_stride = packed.stride(0);
      columns.width = static_cast<int>(packed.size(1));
      columns.first = args.total, columns.out = sums[t].data_ptr();
      args.total += columns.width;
    }
    if (args.tensors == 0) continue;
    const Tensor partial = at::empty({args.chunks, args.total}, some.options().dtype(statistics));
    args.partial = partial.data_ptr();
    C10_CUDA_CHECK(run_column_sums(dtype_of(op, "x", some.scalar_type()), args, on_device.stream()));
  }
  return sums;
}

std::vector<Tensor> project_backward(const c10::List<OptTensor>& grads, const Tensor& x, at::TensorList weights,
                                     c10::List<bool> needs) {
  const char* op = "edgeless::project_backward";
  const Below below;
  check_map_gradients(op, grads, x, weights, needs.size());
  const size_t maps = weights.size();
  std::vector<Tensor> results(1 + 2 * maps), summed;
  std::vector<size_t> which;
  for (size_t k = 0; k < maps; ++k) {
    const OptTensor grad = grads.get(k);
    if (grad) {
      if (needs[0]) {
        if (results[0].defined()) {
          results[0].addmm_(*grad, weights[k]);
        } else {
          results[0] = at::mm(*grad, weights[k]);
        }
      }
      if (needs[1 + k]) results[1 + k] = at::mm(grad->t(), x);
      if (needs[1 + maps + k]) summed.push_back(*grad), which.push_back(1 + maps + k);
    } else {
      if (needs[1 + k]) results[1 + k] = at::zeros_like(weights[k]);
      if (needs[1 + maps + k]) results[1 + maps + k] = at::zeros({weights[k].size(0)}, x.options());
    }
  }
  const std::vector<Tensor> sums = sums_of_columns(op, summed);
  for (size_t i = 0; i < which.size(); ++i) results[which[i]] = sums[i];
  if (needs[0] && !results[0].defined()) results[0] = at::zeros(x.sizes(), x.options());
  for (Tensor& result : results) {
    if (!result.defined()) result = at::empty({0}, x.options());
  }
  return results;
}

Tensor add_row(const Tensor& x, const Tensor& row) {
  const Below below;
  check_row("edgeless::add_row", x, row);
  return at::add(x, row).contiguous();
}

Tensor column_sums(const Tensor& x) {
  const char* op = "edgeless::column_sums";
  const Below below;
  check_dim(op, "x", x, 2, "[N, F]");
  return sums_of_columns(op, {x})[0];
}

std::vector<Tensor> cast_all(at::TensorList tensors, at::ScalarType dtype) {
  const char* op = "edgeless::cast_all";
  const Below below;
  const Dtype to = dtype_of(op, "dtype", dtype);
  std::vector<Tensor> cast, kept;
  if (tensors.empty()) return cast;
  const OnDevice on_device(tensors[0].device());
  for (size_t begin = 0; begin < tensors.size(); begin += kMostTensors) {
    CastArgs args;
    for (size_t t = begin; t < std::min(tensors.size(), begin + kMostTensors); ++t) {
      check_device(op, "tensors", tensors[t], tensors[0].device());
      const Tensor& packed = kept.emplace_back(tensors[t].contiguous());
      const Tensor& copy = cast.emplace_back(at::empty(packed.sizes(), packed.options().dtype(dtype)));
      if (packed.numel() == 0) continue;
      args.from[args.tensors] = packed.const_data_ptr(), args.to[args.tensors] = copy.data_ptr();
      args.dtype[args.tensors] = dtype_of(op, "tensors", packed.scalar_type());
      args.numbers[args.tensors++] = packed.numel();
    }
    if (args.tensors > 0) C10_CUDA_CHECK(run_cast(to, args, on_device.stream()));
  }
  return cast;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CUDA, m) {
  m.impl("project", project);
  m.impl("project_backward", project_backward);
  m.impl("add_row", add_row);
  m.impl("column_sums", column_sums);
  m.impl("cast_all", cast_all);
}

}  // namespace edgeless::cuda::maps
