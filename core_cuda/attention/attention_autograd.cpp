// The gradients of the attention ops. Kept for the backward are the inputs, the output and the softmax's statistics:
// nothing of the size of the edge set.
#include "../common/kept_result.h"
#include "calls.h"

namespace edgeless {
namespace {

std::vector<Tensor> attention_backward(const OptTensor& grad_out, const OptTensor& grad_weights, const OptTensor& out,
                                       const Tensor& softmax_stats, const Tensor& dst, const Tensor& src,
                                       const OptTensor& value, const OptTensor& att, const OptTensor& edge_attr,
                                       const OptTensor& edge_proj, const OptTensor& edge_scale, at::TensorList csr,
                                       at::TensorList csc, const OptTensor& seed, c10::string_view score,
                                       double coefficient, double dropout, bool dropped_weights, AttentionChoice needs,
                                       bool side_by_side, at::IntArrayRef longest) {
  return once_differentiable(
      "attention", {grad_out, grad_weights, out, softmax_stats, dst, src, value, att, edge_attr, edge_proj, edge_scale},
      [&] {
        return call_attention_backward(grad_out, grad_weights, out, softmax_stats, dst, src, value, att, edge_attr,
                                       edge_proj, edge_scale, csr, csc, seed, score, coefficient, dropout,
                                       dropped_weights, needs, side_by_side, longest);
      });
}

struct Attention : torch::autograd::Function<Attention> {
  static constexpr bool is_traceable = true;
  using Compute = std::function<std::tuple<Tensor, Tensor>(const OptTensor& att)>;

  static Tensor forward(AutogradContext* ctx, const Tensor& dst, const Tensor& src, const OptTensor& value,
                        const OptTensor& att, const OptTensor& edge_attr, const OptTensor& edge_proj,
                        const OptTensor& edge_scale, const AttentionOptions& options, const Compute& compute,
                        Tensor* softmax_stats) {
    const OptTensor used = in_arithmetic(att, src.scalar_type());  // kept like that, without a node of its own
    if (att) ctx->saved_data["att_dtype"] = static_cast<int64_t>(att->scalar_type());
    Tensor out;
    std::tie(out, *softmax_stats) = compute(used);
    save(ctx,
         {keep_result(ctx, out), *softmax_stats, dst, src, value, used, edge_attr, edge_proj, edge_scale, options.seed},
         options.csr, options.csc);
    options.save(ctx);
    ctx->set_materialize_grads(false);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    constexpr size_t first = 2, seed = first + kAttentionInputs;
    variable_list results(kAttentionInputs + 3);
    if (!grads[0].defined()) return results;
    const Saved saved(ctx, seed + 1);
    const SavedAttentionOptions options(ctx);
    Needs need(ctx);
    AttentionChoice needs{};
    for (size_t i = 0; i < kAttentionInputs; ++i) needs[i] = need(saved[first + i].defined());
    const Tensor out =
        result_is_kept(ctx)
            ? saved[0]
            : std::get<0>(call_attention(saved[2], saved[3], saved.optional(4), saved.optional(5), saved.optional(6),
                                         saved.optional(7), saved.optional(8), saved.csr, saved.csc,
                                         saved.optional(seed), options.score, options.coefficient, options.dropout,
                                         saved[0].scalar_type(), options.longest));
    const auto found = attention_backward(
        grads[0], {}, out, saved[1], as_rows(saved[2]), as_rows(saved[3]), saved.optional(4), saved.optional(5),
        saved.optional(6), saved.optional(7), saved.optional(8), saved.csr, saved.csc, saved.optional(seed),
        options.score, options.coefficient, options.dropout, false, needs, !is_traced(grads[0]), options.longest);
    for (size_t i = 0; i < kAttentionInputs; ++i) {
      if (needs[i]) results[i] = i < 2 ? as_given(found[i], saved[first + i]) : found[i];
    }
    if (needs[kAtt]) {
      results[kAtt] = results[kAtt].to(static_cast<at::ScalarType>(ctx->saved_data.at("att_dtype").toInt()));
    }
    return results;
  }
};

std::tuple<Tensor, Tensor> attention(const Tensor& dst, const Tensor& src, const OptTensor& value, const OptTensor& att,
                                     const OptTensor& edge_attr, const OptTensor& edge_proj,
                                     const OptTensor& edge_scale, at::TensorList csr, at::TensorList csc,
                                     const OptTensor& seed, c10::string_view score, double coefficient, double dropout,
                                     Optional<at::ScalarType> out_dtype, at::IntArrayRef longest) {
  const Attention::Compute compute = [&](const OptTensor& used) {
    return call_attention(dst, src, value, used, edge_attr, edge_proj, edge_scale, csr, csc, seed, score, coefficient,
                          dropout, out_dtype, longest);
  };
  if (!at::GradMode::is_enabled()) return compute(att);
  const AttentionOptions options{csr, csc, seed, score, coefficient, dropout, longest};
  Tensor softmax_stats;  // beside autograd: it has no gradient
  Tensor out =
      Attention::apply(dst, src, value, att, edge_attr, edge_proj, edge_scale, options, compute, &softmax_stats);
  return {std::move(out), std::move(softmax_stats)};
}

struct AttentionWeights : torch::autograd::Function<AttentionWeights> {
  static constexpr bool is_traceable = true;
  using Compute = std::function<Tensor()>;

  static Tensor forward(AutogradContext* ctx, const Tensor& softmax_stats, const Tensor& dst, const Tensor& src,
                        const OptTensor& att, const OptTensor& edge_attr, const OptTensor& edge_proj,
                        const AttentionOptions& options, const Compute& compute) {
    save(ctx, {softmax_stats, dst, src, att, edge_attr, edge_proj, options.seed}, options.csr, options.csc);
    options.save(ctx);
    return compute();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    constexpr size_t seed = 6;
    const Saved saved(ctx, seed + 1);
    const SavedAttentionOptions options(ctx);
    Needs need(ctx);
    std::array<bool, seed> wanted{};  // of the inputs in their own order, of which attention knows all but the first
    for (size_t i = 0; i < seed; ++i) wanted[i] = need(saved[i].defined());
    const AttentionChoice needs{wanted[1], wanted[2], false, wanted[3], wanted[4], wanted[5], false};
    const auto found = attention_backward({}, grads[0], {}, saved[0], as_rows(saved[1]), as_rows(saved[2]), {},
                                          saved.optional(3), saved.optional(4), saved.optional(5), {}, saved.csr,
                                          saved.csc, saved.optional(seed), options.score, options.coefficient,
                                          options.dropout, options.dropout > 0, needs, false, options.longest);
    const auto grad = [&](size_t i) {
      return !needs[i] ? Tensor() : i < 2 ? as_given(found[i], saved[1 + i]) : found[i];
    };
    return {Tensor(), grad(0), grad(1), grad(3), grad(4), grad(5), Tensor(), Tensor()};
  }
};

Tensor attention_weights(const Tensor& softmax_stats, const Tensor& dst, const Tensor& src, const OptTensor& att,
                         const OptTensor& edge_attr, const OptTensor& edge_proj, at::TensorList csr, at::TensorList csc,
                         const OptTensor& seed, c10::string_view score, double coefficient, double dropout) {
  static const Kernels kernels("edgeless::attention_weights", attention_weights);
  const AttentionWeights::Compute compute = [&] {
    return kernels(softmax_stats, dst, src, att, edge_attr, edge_proj, csr, csc, seed, score, coefficient, dropout);
  };
  if (!at::GradMode::is_enabled()) return compute();
  const AttentionOptions options{csr, csc, seed, score, coefficient, dropout, {}};
  return AttentionWeights::apply(softmax_stats, dst, src, att, edge_attr, edge_proj, options, compute);
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, Autograd, m) {
  m.impl("attention", attention);
  m.impl("attention_weights", attention_weights);
  m.impl("attention_backward", attention_backward);
}

}  // namespace edgeless
