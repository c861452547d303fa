// A function of autograd whose backward needs the result that it returns. Users write over results every day, with
// nn.ReLU(inplace=True), `out += x` or `out[0] = 0`, and where the stock layer does not need its result, that trains.
//
// So the result is kept optimistically. What is saved is an alias with a version counter of its own, which autograd has
// nothing against; beside it stands a witness, an empty tensor that shares the version counter of the result, and the
// version at which it was saved. If the backward finds another version, it computes the result once more from the saved
// inputs: kernels give the same bits in every run, and the mask of the dropout comes from a saved seed. Only who writes
// in place pays, with one more forward.
//
// Hooks of saved tensors, as of checkpoints or offloading, get a copy: they may look at what they were shown when
// the user has written over the result, and what they give back tells nothing of its version.
//
// Writes that torch does not count (`out.data`, NumPy, DLPack) are not noticed; see docs/choosing.md.
#pragma once

#include <ATen/EmptyTensor.h>

#include "own_memory.h"

namespace edgeless {

// In the forward: what to save in the place of `result`, of which a function can keep one.
inline Tensor keep_result(AutogradContext* ctx, const Tensor& result) {
  if (result.is_inference()) return result;  // has no versions, and nothing that comes of it is saved
  if (!saves_unseen()) return result.clone();
  const auto& counter = result.unsafeGetTensorImpl()->version_counter();
  const Tensor witness = at::detail::empty_cpu({0}, at::kByte);
  witness.unsafeGetTensorImpl()->set_version_counter(counter);
  ctx->saved_data["witness"] = witness;
  ctx->saved_data["version"] = static_cast<int64_t>(counter.current_version());
  return result.variable_data();
}

// In the backward: whether what keep_result() gave still is the result. Compiled autograd puts another tensor, whose
// versions say nothing, in the place of the witness.
inline bool result_is_kept(const AutogradContext* ctx) {
  const auto found = ctx->saved_data.find("witness");
  if (found == ctx->saved_data.end()) return true;
  const Tensor& witness = found->second.toTensor();
  return !is_traced(witness) && witness._version() == ctx->saved_data.at("version").toInt();
}

}  // namespace edgeless
