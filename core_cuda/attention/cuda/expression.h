// The kernel of an attention pass: its header and template arguments, for launches and printed plans. No CUDA and no
// torch.
#pragma once

#include "../../common/kernel_types.h"
#include "../../common/score.h"
#include "kernel.h"

namespace edgeless::cuda {

inline jit::Type functor_of(Score score) {
#define EDGELESS_FUNCTOR(name, functor) \
  case Score::name: return {"edgeless::cuda::" #functor};
  switch (score) { EDGELESS_SCORES(EDGELESS_FUNCTOR) }
#undef EDGELESS_FUNCTOR
  return {""};
}

inline jit::Expression expression_of(Pass pass, Score score, Storage storage, const Kernel& k) {
  struct Place {
    const char *header, *function;
  };
  static constexpr Place places[][2] = {
      {{"attention/cuda/forward.cuh", "forward_kernel"}, {"attention/cuda/mma_forward.cuh", "mma_forward_kernel"}},
      {{"attention/cuda/by_dst.cuh", "by_dst_kernel"}, {"attention/cuda/mma_by_dst.cuh", "mma_by_dst_kernel"}},
      {{"attention/cuda/by_src.cuh", "by_src_kernel"}, {"attention/cuda/mma_by_src.cuh", "mma_by_src_kernel"}}};
  const Place& at = places[static_cast<int>(pass)][k.mma];
  const jit::Type functor = functor_of(score), stored = type_of(storage);
  if (k.mma) return {at.header, at.function, {functor, stored, k.lanes, k.vectors, k.edges, k.whole, int{k.mode}}};
  const jit::Instance sub_warp{"SubWarpShape", {k.lanes, k.edges, k.spread}};
  return {at.header, at.function, {functor, stored, index_type(k.wide_index), k.vectors, sub_warp, int{k.mode}}};
}

}  // namespace edgeless::cuda
