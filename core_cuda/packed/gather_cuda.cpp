// gather_packed on CUDA; the kernel is in gather.cuh. Nothing here synchronizes with the device.
#include <torch/library.h>

#include <algorithm>

#include "../common/launch.h"
#include "gather.h"
#include "tensors.h"

namespace edgeless {
namespace {

using at::Tensor;

std::vector<Tensor> gather_packed_cuda(at::TensorList columns, at::IntArrayRef dims, at::IntArrayRef levels,
                                       at::IntArrayRef increments, const c10::List<Optional<Tensor>>& last,
                                       const Tensor& starts, const Tensor& begins, at::IntArrayRef sizes) {
  const OnDevice on_device(starts.device());
  auto [made, found] = packed_columns({columns, dims, levels, increments, last, starts, begins, sizes});
  for (size_t begin = 0; begin < found.size(); begin += kMostColumns) {
    PackedColumns launched;
    launched.count = static_cast<int>(std::min<size_t>(kMostColumns, found.size() - begin));
    std::copy_n(found.begin() + static_cast<ptrdiff_t>(begin), launched.count, launched.at);
    cuda::gather_packed(launched, on_device.queue());
  }
  return made;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CUDA, m) { m.impl("gather_packed", gather_packed_cuda); }

}  // namespace edgeless
