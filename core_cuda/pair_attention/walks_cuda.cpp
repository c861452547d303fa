// pair_walks on CUDA; the algorithm is in cuda/walks.cuh. Nothing here synchronizes with the device.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include "../common/launch.h"
#include "cuda/walks.h"
#include "walks_inputs.h"

namespace edgeless::cuda {
namespace {

WalkTensors pair_walks(const at::Tensor& indptr, at::TensorList by_pair, const at::Tensor& pair_nodes,
                       const at::Tensor& pair_of_edge, at::TensorList by_node, at::TensorList segments,
                       const at::Tensor& segment_ptr, const at::Tensor& order) {
  const WalkInputs given("pair_walks", indptr, by_pair, pair_nodes, pair_of_edge, by_node, segments, segment_ptr,
                         order);
  const OnDevice on_device(given.device());
  WalkTensors made;
  AT_DISPATCH_INDEX_TYPES(given.dtype(), "pair_walks", [&] {
    at::Tensor kept;
    const WalksArgs<index_t> args = given.args<index_t>(made, kept);
    const auto bytes = static_cast<int64_t>(walks_scratch<index_t>(args.segments));
    const at::Tensor scratch = at::empty({bytes}, kept.options().dtype(at::kByte));
    make_walks(args, scratch.mutable_data_ptr(), on_device.queue());
  });
  return made;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CUDA, m) { m.impl("pair_walks", pair_walks); }

}  // namespace edgeless::cuda
