// Attention over pairs as one node of autograd. Kept are the inputs, the products of pairs, a number for every piece
// and every row, and the result without its bias: nothing of the size of the edge set.
#include "../common/kept_result.h"
#include "../pair_attention/inputs.h"

namespace edgeless {
namespace {

using PairResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

PairResults pair_attention(const Tensor& x, const Tensor& weight, const Tensor& query, const Tensor& key,
                           const OptTensor& bias, at::TensorList walks, double negative_slope,
                           at::IntArrayRef max_degrees, bool keep_sums);

PairResults compute(const Tensor& x, const Tensor& weight, const Tensor& query, const Tensor& key,
                    const OptTensor& bias, at::TensorList walks, double negative_slope, at::IntArrayRef max_degrees,
                    bool keep_sums) {
  static const Kernels kernels("edgeless::pair_attention", pair_attention);
  return kernels(x, weight, query, key, bias, walks, negative_slope, max_degrees, keep_sums);
}

using BackwardSignature = std::vector<Tensor>(const Tensor& grad, const Tensor& out, const Tensor& values,
                                              const Tensor& vectors, const Tensor& queries, const Tensor& shift,
                                              const Tensor& x, const Tensor& weight, const Tensor& query,
                                              const Tensor& key, const OptTensor& bias, at::TensorList walks,
                                              double negative_slope, c10::List<bool> needs,
                                              at::IntArrayRef max_degrees);

// Without a gradient.
struct PairOptions {
  at::TensorList walks;
  double negative_slope;
  at::IntArrayRef max_degrees;
};

struct PairAttention : torch::autograd::Function<PairAttention> {
  static constexpr bool is_traceable = true;
  enum Kept : size_t { kOut, kValues, kVectors, kQueries, kShift, kX, kWeight, kQuery, kKey, kBias, kWalks };

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& query,
                        const Tensor& key, const OptTensor& bias, const PairOptions& options, PairResults* results) {
    *results = compute(x, weight, query, key, bias, options.walks, options.negative_slope, options.max_degrees, true);
    const auto& [out, values, vectors, queries, shift, sums] = *results;
    // Delta is made of the sums: rounded with a bias to 16 bits they would lose what is left where a softmax has few
    // edges and the gradients of logits cancel.
    variable_list all{bias ? sums : keep_result(ctx, out),
                      values,
                      vectors,
                      queries,
                      shift,
                      x,
                      weight,
                      query,
                      key,
                      bias.value_or(Tensor())};
    all.insert(all.end(), options.walks.begin(), options.walks.end());
    ctx->save_for_backward(std::move(all));
    ctx->saved_data["negative_slope"] = options.negative_slope;
    ctx->saved_data["max_degrees"] = options.max_degrees.vec();
    ctx->set_materialize_grads(false);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    constexpr size_t inputs = 5;
    if (!grads[0].defined()) return variable_list(inputs + 2);
    const variable_list saved = ctx->get_saved_variables();
    const OptTensor bias = saved[kBias].defined() ? OptTensor(saved[kBias]) : OptTensor();
    const at::TensorList walks = at::TensorList(saved).slice(kWalks);
    const double slope = ctx->saved_data.at("negative_slope").toDouble();
    const std::vector<int64_t> degrees = ctx->saved_data.at("max_degrees").toIntVector();
    Needs need(ctx);
    c10::List<bool> needs;
    for (size_t i = 0; i < inputs; ++i) needs.push_back(need(i < 4 || bias.has_value()));
    const auto run = [&] {
      Tensor out = saved[kOut];
      if (!result_is_kept(ctx)) {
        out = std::get<0>(
            compute(saved[kX], saved[kWeight], saved[kQuery], saved[kKey], bias, walks, slope, degrees, false));
      }
      static const Kernels kernels("edgeless::pair_attention_backward", static_cast<BackwardSignature*>(nullptr));
      return kernels(grads[0], out, saved[kValues], saved[kVectors], saved[kQueries], saved[kShift], saved[kX],
                     saved[kWeight], saved[kQuery], saved[kKey], bias, walks, slope, needs, degrees);
    };
    variable_list found = once_differentiable(
        "attention", {grads[0], saved[kOut], saved[kX], saved[kWeight], saved[kQuery], saved[kKey], bias}, run);
    for (size_t i = 0; i < inputs; ++i) {
      if (!needs[i]) found[i] = Tensor();
    }
    found.resize(inputs + 2);  // of the options and of what goes past autograd
    return found;
  }
};

PairResults pair_attention(const Tensor& x, const Tensor& weight, const Tensor& query, const Tensor& key,
                           const OptTensor& bias, at::TensorList walks, double negative_slope,
                           at::IntArrayRef max_degrees, bool keep_sums) {
  if (!at::GradMode::is_enabled()) {
    return compute(x, weight, query, key, bias, walks, negative_slope, max_degrees, keep_sums);
  }
  PairResults results;
  std::get<0>(results) =
      PairAttention::apply(x, weight, query, key, bias, PairOptions{walks, negative_slope, max_degrees}, &results);
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, Autograd, m) { m.impl("pair_attention", pair_attention); }

}  // namespace edgeless
