// Memory of a function of autograd that its backward may write over, or give back before it ends: of tensors that the
// function made itself, saved, and showed to nobody. Torch's compiler calls such memory donated.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <vector>

#include "autograd.h"

namespace edgeless {

// In the forward: whether what is saved stays with the function. A hook of saved tensors may keep what it is shown.
inline bool saves_unseen() { return !torch::autograd::Engine::get_default_engine().get_default_saved_variable_hooks(); }

// In the backward: whether it is the last one, run once and for what it was given as it is.
inline bool is_last_backward(const Tensor& grad) {
  return !at::GradMode::is_enabled() && !torch::autograd::get_current_graph_task_keep_graph() && !is_traced(grad) &&
         !is_batched(grad);
}

// In the backward: whether the gradients it was given go away with it. Some may be columns of one tensor; one that is
// a view keeps the tensor that it is a view of.
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

// Before a backward writes over what was saved: none can follow it, not even where it does not come to its end.
inline void note_written_over(AutogradContext* ctx) { ctx->saved_data["written over"] = true; }

// At the beginning of a backward of an attention or a layer, whichever it is called.
inline void check_not_written_over(AutogradContext* ctx, const char* what) {
  TORCH_CHECK(!ctx->saved_data.count("written over"), "edgeless: the last backward of this ", what,
              " did not come to its end and left no other; run the forward again, or that backward with "
              "retain_graph=True");
}

// Frees a tensor's memory while others still hold the tensor, who do not look at it again.
inline void give_back(const Tensor& t) {
  c10::StorageImpl* storage = t.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(at::DataPtr(nullptr, t.device()));
  storage->set_nbytes(static_cast<size_t>(0));
}

}  // namespace edgeless
