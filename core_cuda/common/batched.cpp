// Batched gradients: torch.autograd.grad(is_grads_batched=True) and torch.autograd.functional.jacobian(vectorize=True).
// Both run a backward once, on tensors that represent a batch of gradients. Torch's fallback calls an op once per batch
// element but does not support lists of tensors; this fallback does. It is registered for every op that a backward
// calls.
#include <ATen/ATen.h>
#include <ATen/LegacyBatchedTensorImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "optional.h"

namespace edgeless {
namespace {

using at::Tensor;
using c10::IValue;

// Returns `value` with every tensor t, also within lists, replaced by f(t).
template <class F>
IValue map_tensors(const IValue& value, F&& f) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> all;
    for (const Tensor& t : value.toTensorVector()) all.push_back(t.defined() ? f(t) : t);
    return all;
  }
  if (value.isOptionalTensorList()) {
    const auto given = value.toOptionalTensorList();
    c10::List<Optional<Tensor>> all;
    for (size_t i = 0; i < given.size(); ++i) {
      const Optional<Tensor> t = given.get(i);
      all.push_back(t && t->defined() ? Optional<Tensor>(f(*t)) : t);
    }
    return all;
  }
  return value;
}

struct Batch {
  int64_t level = -1, size = 0;  // level and size of the innermost batch dimension among all arguments
};

const at::BatchDim* find(const Tensor& t, int64_t level) {
  const auto* impl = at::maybeGetBatchedImpl(t);
  if (!impl) return nullptr;
  for (const at::BatchDim& d : impl->bdims()) {
    if (d.level() == level) return &d;
  }
  return nullptr;
}

Batch innermost(at::ArrayRef<IValue> arguments) {
  Batch batch;
  for (const IValue& argument : arguments) {
    map_tensors(argument, [&](const Tensor& t) {
      if (const auto* impl = at::maybeGetBatchedImpl(t)) {
        const at::BatchDim& last = impl->bdims().back();  // levels ascend
        if (last.level() > batch.level) batch = {last.level(), impl->value().size(last.dim())};
      }
      return t;
    });
  }
  return batch;
}

// Returns element `index` of `t` along the batch dimension of `level`, with its other batch dimensions.
Tensor at_index(const Tensor& t, int64_t level, int64_t index) {
  const at::BatchDim* own = find(t, level);
  if (!own) return t;
  const auto* impl = at::unsafeGetBatchedImpl(t);
  at::BatchDims others;
  for (const at::BatchDim& d : impl->bdims()) {
    if (d.level() != level) others.emplace_back(d.level(), d.dim() - (d.dim() > own->dim()));
  }
  const Tensor value = impl->value().select(own->dim(), index);
  return others.empty() ? value : at::makeBatched(value, others);
}

// Stacks the results of all batch elements into one batched result.
IValue together(const std::vector<IValue>& results, int64_t level) {
  size_t next = 0;  // index of a tensor in the order of map_tensors()
  std::vector<std::vector<Tensor>> tensors;
  for (const IValue& result : results) {
    tensors.emplace_back();
    map_tensors(result, [&](const Tensor& t) {
      tensors.back().push_back(t);
      return t;
    });
  }
  return map_tensors(results[0], [&](const Tensor&) {
    std::vector<Tensor> of_indices;
    for (const auto& all : tensors) of_indices.push_back(all[next]);
    ++next;
    return at::addBatchDim(at::stack(of_indices), level, 0);
  });
}

void one_by_one(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size(), returns = op.schema().returns().size();
  const std::vector<IValue> arguments(stack->end() - static_cast<int64_t>(count), stack->end());
  torch::jit::drop(*stack, count);
  const Batch batch = innermost(arguments);
  TORCH_CHECK(batch.size > 0, "edgeless: a batch of gradients must not be empty");
  std::vector<std::vector<IValue>> results(returns);
  for (int64_t i = 0; i < batch.size; ++i) {
    torch::jit::Stack one;
    for (const IValue& argument : arguments) {
      one.push_back(map_tensors(argument, [&](const Tensor& t) { return at_index(t, batch.level, i); }));
    }
    op.callBoxed(&one);
    for (size_t r = 0; r < returns; ++r) results[r].push_back(std::move(one[r]));
  }
  for (const auto& result : results) stack->push_back(together(result, batch.level));
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, Batched, m) {
  for (const char* op : {"attention_backward", "spmm", "sddmm", "neighbor_reduce_backward", "project_backward",
                         "project_sum_backward", "column_sums", "node_logits_backward", "cast_all", "typed_mm",
                         "typed_outer", "typed_sums", "typed_blend_backward", "relational_sum_backward",
                         "relational_layer_backward", "pair_attention_backward", "pair_maps_backward"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&one_by_one>());
  }
}

}  // namespace edgeless
