// Keys and values per unique (source, type) as one autograd node, which saves only its inputs.
#include "pair_maps.h"

#include <ATen/ATen.h>

#include "../attention/calls.h"
#include "../common/own_memory.h"
#include "../projection/inputs.h"
#include "plain.h"

namespace edgeless {

void check_pair_maps(const char* op, const PairMapsCall& in) {
  for (const auto& [name, rows, matrices] :
       {std::tuple<const char*, const Tensor&, const Tensor&>{"k", in.k, in.k_weight}, {"v", in.v, in.v_weight}}) {
    check_rows_dtype(op, name, rows);
    check_dim(op, name, rows, 2, "[N, H * K]");
    TORCH_CHECK_VALUE(matrices.dim() == 4, op, ": ", name, "_weight must be [types, H, K, M], got shape ",
                      matrices.sizes());
    check_shape(op, name, rows, {in.k.size(0), matrices.size(1) * matrices.size(2)});
    check_dtype(op, name, rows, in.k.scalar_type());
    check_device(op, name, rows, in.k.device());
  }
  const auto dtype = in.k_weight.scalar_type();
  TORCH_CHECK_VALUE(dtype == in.k.scalar_type() || dtype == opmath_dtype(in.k.scalar_type()), op,
                    ": k_weight must be of k's dtype or its statistics', got ", dtype);
  const int64_t types = in.k_weight.size(0), heads = in.k_weight.size(1);
  check_shape(op, "v_weight", in.v_weight, {types, heads, in.v_weight.size(2), in.v_weight.size(3)});
  check_shape(op, "k_scale", in.k_scale, {types, heads});
  for (const auto& [name, t] : {std::pair<const char*, const Tensor&>{"k_weight", in.k_weight},
                                {"v_weight", in.v_weight},
                                {"k_scale", in.k_scale}}) {
    check_dtype(op, name, t, dtype);
    check_device(op, name, t, in.k.device());
  }
  check_segments(op, "by_dst", in.by_dst, types, in.k.device());
}

void check_pair_map_grads(const char* op, const PairMapsCall& in, const Tensor& grad_keys, const Tensor& grad_values) {
  check_like(op, "grad_keys", grad_keys, {in.pairs(), in.k_weight.size(1) * in.k_weight.size(3)}, in.k);
  check_like(op, "grad_values", grad_values, {in.pairs(), in.v_weight.size(1) * in.v_weight.size(3)}, in.k);
}

void check_pair_dot_attention(const char* op, const PairDotCall& in) {
  check_pair_maps(op, in.maps);
  TORCH_CHECK_VALUE(in.csr.size() == 2 && in.csr[0].dim() == 1 && in.csr[0].size(0) > 0, op,
                    ": csr must hold [indptr, indices], got ", in.csr.size(), " tensors");
  check_like(op, "q", in.q, {in.csr[0].size(0) - 1, in.heads() * in.maps.k_weight.size(3)}, in.maps.k);
}

namespace {

// One scale per matrix, in the opmath dtype.
Tensor scale_of(const PairMapsCall& in) {
  return in.k_scale.to(opmath_dtype(in.k.scalar_type())).unsqueeze(2).unsqueeze(3);
}

}  // namespace

std::tuple<Tensor, Tensor> pair_maps_of_parts(const PairMapsCall& in) {
  check_pair_maps("edgeless::pair_maps", in);
  const BelowAutograd below;
  const auto dtype = in.k.scalar_type();
  return {call_relational_sum(in.k, in.k_weight * scale_of(in), {}, in.by_dst, {}, in.pairs(), dtype),
          call_relational_sum(in.v, in.v_weight, {}, in.by_dst, {}, in.pairs(), dtype)};
}

std::vector<Tensor> pair_maps_backward_of_parts(const Tensor& grad_keys, const Tensor& grad_values,
                                                const PairMapsCall& in, const PairMapChoice& needs) {
  const char* op = "edgeless::pair_maps_backward";
  check_pair_maps(op, in);
  check_pair_map_grads(op, in, grad_keys, grad_values);
  const BelowAutograd below;
  const auto dtype = in.k_weight.scalar_type();
  std::vector<Tensor> results(kPairMapInputs);
  const bool of_keys = needs[kKeyWeight] || needs[kKeyScale];
  if (needs[kPairKeys] || of_keys) {
    // The matrices have the opmath dtype; otherwise the gradients of scales would be sums of rounded values.
    const Tensor scale = scale_of(in), matrices = in.k_weight * scale;
    const auto found = call_relational_sum_backward(grad_keys, in.k, matrices, {}, in.by_dst, in.by_src,
                                                    c10::List<bool>({needs[kPairKeys], of_keys, false}));
    if (needs[kPairKeys]) results[kPairKeys] = found[0];
    if (needs[kKeyWeight]) results[kKeyWeight] = (found[1] * scale).to(dtype);
    if (needs[kKeyScale]) results[kKeyScale] = (found[1] * in.k_weight).sum({2, 3}).to(dtype);
  }
  if (needs[kPairValues] || needs[kValueWeight]) {
    const auto found = call_relational_sum_backward(grad_values, in.v, in.v_weight, {}, in.by_dst, in.by_src,
                                                    c10::List<bool>({needs[kPairValues], needs[kValueWeight], false}));
    if (needs[kPairValues]) results[kPairValues] = found[0];
    if (needs[kValueWeight]) results[kValueWeight] = found[1];
  }
  for (Tensor& result : results) {
    if (!result.defined()) result = at::empty({0}, in.k.options());
  }
  return results;
}

Tensor pair_dot_attention_of_parts(const PairDotCall& in) {
  check_pair_dot_attention("edgeless::pair_dot_attention", in);
  const BelowAutograd below;
  const auto maps = pair_maps_of_parts(in.maps);
  const auto rows = [&](const Tensor& t) { return t.unflatten(1, {in.heads(), t.size(1) / in.heads()}); };
  const auto call = AttentionCall::plain(rows(in.q), rows(std::get<0>(maps)), rows(std::get<1>(maps)),
                                         GraphArrays(in.csr, {}, in.max_degrees), Score::dot, in.coefficient);
  return std::get<0>(call_attention(call, in.q.scalar_type())).flatten(1);
}

namespace {

std::tuple<Tensor, Tensor> apart(const PairMapsCall& in, bool /*joined*/) { return pair_maps_of_parts(in); }

struct PairMaps : Function<PairMaps> {
  // call has the same tensors and the graph
  static variable_list forward(AutogradContext* ctx, const Tensor& k, const Tensor& v, const Tensor& k_weight,
                               const Tensor& v_weight, const Tensor& k_scale, const PairMapsCall& call, bool joined) {
    save(ctx, {k, v, k_weight, v_weight, k_scale}, {call.by_dst, call.by_src});
    auto [keys, values] = call_pair_maps(call, joined);
    return {keys, values};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Saved saved(ctx, kPairMapInputs);
    const PairMapsCall call{saved[kPairKeys], saved[kPairValues], saved[kKeyWeight], saved[kValueWeight],
                            saved[kKeyScale], saved.graph.csr,    saved.graph.csc};
    PairMapChoice needs;
    for (size_t i = 0; i < kPairMapInputs; ++i) needs[i] = ctx->needs_input_grad(i);
    const bool over = !at::GradMode::is_enabled() && !is_traced(grads[0]) && are_nobody_elses(grads);
    const auto make_plain = [&]() -> Plain {
      return [sum = PlainRelationalSum(call.by_dst, call.pairs())](const variable_list& inputs) {
        const Tensor scale = inputs[kKeyScale].unsqueeze(2).unsqueeze(3);
        const auto wide = [](const Tensor& t) { return t.to(opmath_dtype(t.scalar_type())); };
        return variable_list{sum(inputs[kPairKeys], wide(inputs[kKeyWeight]) * wide(scale), {}),
                             sum(inputs[kPairValues], inputs[kValueWeight], {})};
      };
    };
    variable_list found =
        differentiable_again({call.k, call.v, call.k_weight, call.v_weight, call.k_scale}, grads, make_plain, [&] {
          const auto backward = over ? call_pair_maps_backward_over : call_pair_maps_backward;
          return backward(grads[0], grads[1], call, needs);
        });
    for (size_t i = 0; i < kPairMapInputs; ++i) {
      if (!needs[i]) found[i] = Tensor();
    }
    found.resize(kPairMapInputs + 2);  // call and joined have no gradient
    return found;
  }
};

std::tuple<Tensor, Tensor> differentiable_maps(const PairMapsCall& in, bool joined) {
  if (!at::GradMode::is_enabled()) return call_pair_maps(in, joined);
  const variable_list found = PairMaps::apply(in.k, in.v, in.k_weight, in.v_weight, in.k_scale, in, joined);
  return {found[0], found[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CPU, m) {
  m.impl("pair_maps", pair_maps_op<apart>);
  m.impl("pair_dot_attention", pair_dot_attention_op<pair_dot_attention_of_parts>);
  m.impl("pair_maps_backward", pair_maps_backward_op<pair_maps_backward_of_parts>);
  m.impl("pair_maps_backward_over", OneByOne<pair_maps_backward_op<pair_maps_backward_of_parts>>::call);
}

TORCH_LIBRARY_IMPL(edgeless, Autograd, m) { m.impl("pair_maps", pair_maps_op<differentiable_maps>); }

}  // namespace edgeless
