// gather_dots, which only the benchmark calls: checks and one launch.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "../common/launch.h"
#include "cuda/dots.h"
#include "inputs.h"

namespace edgeless::cuda::gathers {
namespace {

using at::Tensor;

Tensor gather_dots(const Tensor& x, const Tensor& indptr, const Tensor& indices, bool by_neighbor, bool vectors,
                   int64_t passes) {
  check_gather_dots(x, indptr, indices, vectors, passes);
  const OnDevice on_device(x.device());
  Tensor out = at::empty({x.size(0)}, x.options());
  DotsArgs args;
  args.graph = {indptr.const_data_ptr(), indices.const_data_ptr(), nullptr, x.size(0), indices.size(0)};
  args.x = x.const_data_ptr<float>(), args.dim = static_cast<int>(x.size(1));
  args.passes = static_cast<int>(passes), args.out = out.data_ptr<float>();
  run_dots(indices.scalar_type() == at::kLong, by_neighbor, vectors, args, on_device.queue());
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CUDA, m) { m.impl("gather_dots", gather_dots); }

}  // namespace edgeless::cuda::gathers
