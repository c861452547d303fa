// Saves the result that a forward returns, for autograd functions whose backward reads it. Users overwrite results in
// place (nn.ReLU(inplace=True), `out += x`, `out[0] = 0`), and upstream layers that do not save their result support
// that.
//
// So the result is saved optimistically, as an alias with a version counter of its own, which autograd accepts. A
// witness, an empty tensor that shares the result's version counter, is saved with the version at that time. If the
// backward finds another version, it recomputes the result from the saved inputs: kernels give the same bits in every
// run, and the dropout mask follows from a saved seed. Only in-place writes cost that second forward.
//
// Saved-tensor hooks, such as those of checkpointing or offloading, get a copy: a hook may read its tensor after the
// user has overwritten the result, and the tensor that the hook returns does not carry the result's version.
//
// Writes that torch does not count (`out.data`, NumPy, DLPack) are not detected; see docs/choosing.md.
#pragma once

#include <ATen/EmptyTensor.h>

#include "own_memory.h"

namespace edgeless {

// In the forward: returns the tensor to save instead of `result`. A function can keep one result.
inline Tensor keep_result(AutogradContext* ctx, const Tensor& result) {
  if (result.is_inference()) return result;  // inference tensors have no version and record no backward
  if (!saves_unseen()) return result.clone();
  const auto& counter = result.unsafeGetTensorImpl()->version_counter();
  const Tensor witness = at::detail::empty_cpu({0}, at::kByte);
  witness.unsafeGetTensorImpl()->set_version_counter(counter);
  ctx->saved_data["witness"] = witness;
  ctx->saved_data["version"] = static_cast<int64_t>(counter.current_version());
  return result.variable_data();
}

// In the backward: true if the tensor from keep_result() still holds the result. Compiled autograd replaces the witness
// by a tensor with unrelated versions.
inline bool result_is_kept(const AutogradContext* ctx) {
  const auto found = ctx->saved_data.find("witness");
  if (found == ctx->saved_data.end()) return true;
  const Tensor& witness = found->second.toTensor();
  return !is_traced(witness) && witness._version() == ctx->saved_data.at("version").toInt();
}

}  // namespace edgeless
