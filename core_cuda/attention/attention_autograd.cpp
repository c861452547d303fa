// Autograd of the attention ops. The forward saves the inputs, the output and the softmax statistics, but no tensor per
// edge.
#include "../common/kept_result.h"
#include "../common/packed.h"
#include "calls.h"
#include "plain.h"

namespace edgeless {
namespace {

std::vector<Tensor> attention_backward(const AttentionCall& c, const AttentionGrads& g) {
  const bool of_weights = g.grad_weights.has_value();
  const auto make_plain = [&]() -> Plain {
    AttentionCall call = c;
    if (of_weights && !g.dropped_weights) call.dropout = 0;
    return [plain = PlainAttention(call), of_weights](const variable_list& inputs) {
      return variable_list{of_weights ? plain.weights(inputs) : plain.output(inputs)};
    };
  };
  return differentiable_again({c.dst, c.src, c.value, c.att, c.edge_attr, c.edge_proj, c.edge_scale},
                              {of_weights ? *g.grad_weights : *g.grad_out}, make_plain,
                              [&] { return call_attention_backward(c, g); });
}

// The saved call: its inputs are the saved tensors from `first` on, followed by the seed.
AttentionCall saved_call(const AutogradContext* ctx, const Saved& saved, size_t first) {
  std::array<OptTensor, kAttentionInputs> inputs;
  for (size_t i = 0; i < kAttentionInputs; ++i) inputs[i] = saved.optional(first + i);
  return saved_call(ctx, inputs, saved.graph, saved.optional(first + kAttentionInputs));
}

// True if attention_backward_into can overwrite the rows of src and value with their gradients: each row is written
// once, and no other gradient reads it afterwards.
bool can_be_written_over(const AttentionCall& c) {
  if (c.edge_attr || c.edge_scale || (c.score != Score::gatv2 && (c.score != Score::dot || !c.value))) return false;
  const auto apart = [&](const Tensor& t) { return can_be_written(t) && !t.is_alias_of(c.dst); };
  if (!apart(c.src)) return false;
  if (!c.value || !c.value->is_alias_of(c.src)) return !c.value || apart(*c.value);
  const auto columns = Packed::of({c.src, *c.value});
  return columns && columns->width[0] + columns->width[1] <= columns->stride &&
         (columns->begin[1] >= columns->width[0] || columns->begin[0] >= columns->width[1]);
}

struct Attention : Function<Attention> {
  static constexpr size_t kFirst = 2;  // index of the first saved input, after the output and the statistics

  static Tensor forward(AutogradContext* ctx, const Tensor& dst, const Tensor& src, const OptTensor& value,
                        const OptTensor& att, const OptTensor& edge_attr, const OptTensor& edge_proj,
                        const OptTensor& edge_scale, const AttentionCall& call, Optional<at::ScalarType> out_dtype,
                        Tensor* softmax_stats) {
    Tensor out;
    std::tie(out, *softmax_stats) = call_attention(call, out_dtype);
    save(ctx,
         {keep_result(ctx, out), *softmax_stats, dst, src, value, att, edge_attr, edge_proj, edge_scale, call.seed},
         call.graph);
    save_options(ctx, call);
    ctx->saved_data["donated"] = call.donated && !is_traced(src) && can_be_written_over(call) && saves_unseen();
    ctx->set_materialize_grads(false);
    return out;
  }

  // Computes the gradients of dst, src, value and att. The gradients of src and value overwrite the rows of src and
  // value.
  static std::vector<Tensor> over_the_sources(AutogradContext* ctx, const AttentionCall& call,
                                              const AttentionGrads& given) {
    note_written_over(ctx);
    const at::AutoDispatchBelowADInplaceOrView guard;
    // Detached, since the autograd history of the rows is not that of their gradients.
    variable_list into{at::empty(call.dst.sizes(), call.dst.options()), call.src.variable_data()};
    if (call.value) into.push_back(call.value->variable_data());
    const Tensor of_att = call_attention_backward_into(call, given, into);
    into.resize(kAttentionInputs);
    into[kAtt] = of_att;
    return into;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list results(kAttentionInputs + 3);
    if (!grads[0].defined()) return results;
    const Saved saved(ctx, kFirst + kAttentionInputs + 1);
    AttentionCall call = saved_call(ctx, saved, kFirst);
    AttentionGrads given{grads[0], {}, saved[0], saved[1]};
    given.side_by_side = !is_traced(grads[0]);
    Needs need(ctx);
    for (size_t i = 0; i < kAttentionInputs; ++i) given.needs[i] = need(saved[kFirst + i].defined());
    check_not_written_over(ctx, "attention");
    if (!result_is_kept(ctx)) given.out = std::get<0>(call_attention(call, saved[0].scalar_type()));
    call.dst = as_rows(call.dst), call.src = as_rows(call.src);
    const bool in_place = ctx->saved_data.at("donated").toBool() && is_last_backward(grads[0]) && given.needs[kDst] &&
                          given.needs[kSrc] && given.needs[kValue] == call.value.has_value();
    const auto found = in_place ? over_the_sources(ctx, call, given) : attention_backward(call, given);
    for (size_t i = 0; i < kAttentionInputs; ++i) {
      if (given.needs[i]) results[i] = i < 2 ? as_given(found[i], saved[kFirst + i]) : found[i];
    }
    return results;
  }
};

std::tuple<Tensor, Tensor> attention(const AttentionCall& call, Optional<at::ScalarType> out_dtype) {
  if (!at::GradMode::is_enabled()) return call_attention(call, out_dtype);
  Tensor softmax_stats;  // bypasses autograd: it has no gradient
  Tensor out = Attention::apply(call.dst, call.src, call.value, call.att, call.edge_attr, call.edge_proj,
                                call.edge_scale, call, out_dtype, &softmax_stats);
  return {std::move(out), std::move(softmax_stats)};
}

struct AttentionWeights : Function<AttentionWeights> {
  static Tensor forward(AutogradContext* ctx, const Tensor& softmax_stats, const Tensor& dst, const Tensor& src,
                        const OptTensor& att, const OptTensor& edge_attr, const OptTensor& edge_proj,
                        const AttentionCall& call) {
    save(ctx, {softmax_stats, dst, src, {}, att, edge_attr, edge_proj, {}, call.seed}, call.graph);
    save_options(ctx, call);
    return call_attention_weights(call, softmax_stats);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Saved saved(ctx, 1 + kAttentionInputs + 1);
    AttentionCall call = saved_call(ctx, saved, 1);
    call.dst = as_rows(call.dst), call.src = as_rows(call.src);
    AttentionGrads given{{}, grads[0], {}, saved[0]};
    given.dropped_weights = call.dropout > 0;
    Needs need(ctx);
    need();  // skips the statistics
    for (size_t i = 0; i < kAttentionInputs; ++i) given.needs[i] = need(saved[1 + i].defined());
    const auto found = attention_backward(call, given);
    const auto grad = [&](size_t i) {
      return !given.needs[i] ? Tensor() : i < 2 ? as_given(found[i], saved[1 + i]) : found[i];
    };
    return {Tensor(), grad(kDst), grad(kSrc), grad(kAtt), grad(kEdgeAttr), grad(kEdgeProj), Tensor()};
  }
};

Tensor attention_weights(const AttentionCall& call, const Tensor& softmax_stats) {
  if (!at::GradMode::is_enabled()) return call_attention_weights(call, softmax_stats);
  return AttentionWeights::apply(softmax_stats, call.dst, call.src, call.att, call.edge_attr, call.edge_proj, call);
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, Autograd, m) {
  m.impl("attention", attention_op<attention>);
  m.impl("attention_weights", attention_weights_op<attention_weights>);
  m.impl("attention_backward", attention_backward_op<attention_backward>);
}

}  // namespace edgeless
