// Memory that the backward of an autograd function may overwrite or free early: tensors that the function created,
// saved, and never exposed. torch.compile calls such buffers donated.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <vector>

#include "autograd.h"

namespace edgeless {

// In the forward: true if no saved-tensor hook is active. A hook may keep a reference to the tensors it receives.
inline bool saves_unseen() { return !torch::autograd::Engine::get_default_engine().get_default_saved_variable_hooks(); }

// In the backward: true if no other backward can follow (neither create_graph nor retain_graph) and `grad` is a plain
// tensor, neither traced nor batched.
inline bool is_last_backward(const Tensor& grad) {
  return !at::GradMode::is_enabled() && !torch::autograd::get_current_graph_task_keep_graph() && !is_traced(grad) &&
         !is_batched(grad);
}

// In the backward: true if `grads` hold the only references to their memory. Several may be columns of one tensor; a
// view also holds a reference to its base.
inline bool are_nobody_elses(const variable_list& grads) {
  std::vector<const at::TensorBase*> holders;
  for (const Tensor& t : grads) {
    if (!t.defined() || is_batched(t) || !t.has_storage()) return false;
    holders.push_back(&t);
    if (t.is_view()) holders.push_back(&t._base());
  }
  return std::all_of(holders.begin(), holders.end(), [&](const at::TensorBase* t) {
    const auto shares = [&](const at::TensorBase* other) { return other->is_alias_of(*t); };
    const auto sharers = static_cast<size_t>(std::count_if(holders.begin(), holders.end(), shares));
    return t->use_count() == 1 && t->storage().use_count() == sharers;
  });
}

// To be called before a backward overwrites saved tensors: from then on no other backward can run, even if this one
// fails.
inline void note_written_over(AutogradContext* ctx) { ctx->saved_data["written over"] = true; }

// To be called first in every backward. `what` names the op in the message: "attention" or "layer".
inline void check_not_written_over(AutogradContext* ctx, const char* what) {
  TORCH_CHECK(!ctx->saved_data.count("written over"), "edgeless: the last backward of this ", what,
              " did not come to its end and left no other; run the forward again, or that backward with "
              "retain_graph=True");
}

// Frees the storage of a tensor that other code still references but does not read again.
inline void give_back(const Tensor& t) {
  c10::StorageImpl* storage = t.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(at::DataPtr(nullptr, t.device()));
  storage->set_nbytes(static_cast<size_t>(0));
}

}  // namespace edgeless
