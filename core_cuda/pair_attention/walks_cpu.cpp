// pair_walks on the CPU, where no fused kernel reads its arrays: the reference for the GPU, which runs the same
// functions.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <algorithm>

#include "walks_inputs.h"

namespace edgeless {
namespace {

template <class I>
void make_walks(const WalksArgs<I>& args) {
  for (int64_t i = 0; i <= std::max(args.edges, args.nodes); ++i) prepare_walks(args, i);
  I before = 0;
  for (int64_t i = 0; i <= args.segments; ++i) {
    const I count = args.begins[i];
    args.begins[i] = before, before += count;
  }
  for (int64_t i = 0; i < args.segments; ++i) walk_segment(args, i);
  for (int64_t i = 0; i < std::max(args.pairs, args.nodes); ++i) {
    for (int which = 0; which < 3; ++which) {
      args.longest[which] = std::max(args.longest[which], walk_length(args, which, i));
    }
  }
}

WalkTensors pair_walks_cpu(const at::Tensor& indptr, at::TensorList by_pair, const at::Tensor& pair_nodes,
                           const at::Tensor& pair_of_edge, at::TensorList by_node, at::TensorList segments,
                           const at::Tensor& segment_ptr, const at::Tensor& order) {
  const WalkInputs given("pair_walks", indptr, by_pair, pair_nodes, pair_of_edge, by_node, segments, segment_ptr,
                         order);
  WalkTensors made;
  at::Tensor kept;
  AT_DISPATCH_INDEX_TYPES(given.dtype(), "pair_walks", [&] { make_walks(given.args<index_t>(made, kept)); });
  return made;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CPU, m) { m.impl("pair_walks", pair_walks_cpu); }

}  // namespace edgeless
