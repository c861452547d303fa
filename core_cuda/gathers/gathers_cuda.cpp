// gather_dots, which the bench alone calls: checks and one launch.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "../common/checks.h"
#include "../common/launch.h"
#include "cuda/dots.h"

namespace edgeless::cuda::gathers {
namespace {

using at::Tensor;

Tensor gather_dots(const Tensor& x, const Tensor& indptr, const Tensor& indices, bool by_neighbor, bool vectors,
                   int64_t passes) {
  const char* op = "edgeless::gather_dots";
  check_dim(op, "x", x, 2, "[N, F]");
  check_dtype(op, "x", x, at::kFloat);
  check_dim(op, "indptr", indptr, 1, "[N + 1]");
  check_dim(op, "indices", indices, 1, "[E]");
  const bool wide = indices.scalar_type() == at::kLong;
  TORCH_CHECK_VALUE(wide || indices.scalar_type() == at::kInt, op, ": indices must be int32 or int64, got ",
                    indices.scalar_type());
  check_dtype(op, "indptr", indptr, indices.scalar_type());
  check_device(op, "indptr", indptr, x.device());
  check_device(op, "indices", indices, x.device());
  TORCH_CHECK_VALUE(indptr.size(0) == x.size(0) + 1, op, ": indptr must have shape [N + 1] = [", x.size(0) + 1,
                    "], got ", indptr.sizes());
  TORCH_CHECK_VALUE(x.is_contiguous() && indptr.is_contiguous() && indices.is_contiguous(), op,
                    ": x, indptr and indices must be contiguous");
  TORCH_CHECK_VALUE(passes >= 0 && passes <= 1 << 20, op, ": passes must be in [0, 2**20], got ", passes);
  TORCH_CHECK_VALUE(!vectors || (x.size(1) % 4 == 0 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0), op,
                    ": vectors need rows of a multiple of 4 numbers that begin on 16 bytes, got F = ", x.size(1));
  const OnDevice on_device(x.device());
  Tensor out = at::empty({x.size(0)}, x.options());
  DotsArgs args;
  args.graph = {indptr.const_data_ptr(), indices.const_data_ptr(), nullptr, x.size(0), indices.size(0)};
  args.x = x.const_data_ptr<float>(), args.dim = static_cast<int>(x.size(1));
  args.passes = static_cast<int>(passes), args.out = out.data_ptr<float>();
  C10_CUDA_CHECK(run_dots(wide, by_neighbor, vectors, args, on_device.stream()));
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CUDA, m) { m.impl("gather_dots", gather_dots); }

}  // namespace edgeless::cuda::gathers
