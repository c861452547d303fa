// Attention over unique (source, type) ("pairs") as one autograd node. It saves the inputs, the products of the pairs,
// one value per segment and per row, and the result without its bias: no rows per edge.
#include <ATen/ATen.h>

#include "../attention/plain.h"
#include "../common/kept_result.h"
#include "../common/own_memory.h"
#include "../pair_attention/calls.h"
#include "../relational/plain.h"
#include "../spmm/edge_ends.h"

namespace edgeless {
namespace {

// Plain form, edge by edge, for second derivatives. Inputs: x, weight, query, key and bias.
class PlainPairAttention {
 public:
  explicit PlainPairAttention(const PairCall& call)
      : walks_(call.walks.all.vec()), slope_(call.negative_slope), dropout_(call.dropout.p) {
    if (dropout_ > 0) ids_ = call.dropout.edge_ids[0], seed_ = call.dropout.seed->clone();
  }

  variable_list operator()(const variable_list& inputs) const {
    const PairWalks walks("edgeless::pair_attention", walks_);
    const auto wide = [&](PairInput i) { return inputs[i].to(opmath_dtype(inputs[i].scalar_type())); };
    const Tensor x = wide(kPairX), weight = wide(kPairWeight);
    const Tensor values =
        typed_mm_op(EdgeEnds(walks.pair_nodes(), walks.nodes()).gather(x), weight, walks.offsets().to(at::kLong), {});
    const Tensor vectors = at::matmul(weight, wide(kPairQuery)).squeeze(2);
    const EdgeEnds to = EdgeEnds::of_rows(walks.by_dst()[0], walks.edges()), from(walks.by_dst()[1], walks.pairs());
    const EdgeEnds types(walks.types_of_nodes()[1].index_select(0, walks.by_dst()[2]), walks.types());
    const Tensor of_rows = from.gather(values);
    const Tensor queries = (to.gather(x) * types.gather(vectors)).sum(1, /*keepdim=*/true);
    Tensor weights = to.softmax(at::leaky_relu(queries + at::matmul(of_rows, wide(kPairKey)), slope_));
    if (dropout_ > 0) {
      weights = weights * dropout_factors(ids_, seed_, dropout_, walks.edges(), 1, weights.options());
    }
    const Tensor out = to.sum(weights * of_rows);
    return {inputs[kPairBias].defined() ? out + inputs[kPairBias] : out};
  }

 private:
  std::vector<Tensor> walks_;
  double slope_, dropout_;
  Tensor ids_;
  OptTensor seed_;
};

struct PairAttention : Function<PairAttention> {
  enum Kept : size_t { kOut, kValues, kVectors, kQueries, kShift, kX, kWeight, kQuery, kKey, kBias, kSeed, kWalks };

  // call holds the same tensors and the arguments without a gradient.
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, const Tensor& query,
                        const Tensor& key, const OptTensor& bias, const PairCall& call, PairOutputs* results) {
    *results = call_pair_attention(call, true);
    const auto& [out, values, vectors, queries, shift, sums] = *results;
    // The softmax gradient's delta comes from the sums without bias. Rounded to 16 bits together with a bias, they
    // would lose the small differences that matter where a softmax has few edges and the gradients of its logits
    // cancel.
    variable_list all{bias ? sums : keep_result(ctx, out),
                      values,
                      vectors,
                      queries,
                      shift,
                      x,
                      weight,
                      query,
                      key,
                      bias.value_or(Tensor()),
                      call.dropout.seed.value_or(Tensor())};
    for (const at::TensorList& more : {call.walks.all, call.dropout.edge_ids}) {
      all.insert(all.end(), more.begin(), more.end());
    }
    ctx->save_for_backward(std::move(all));
    ctx->saved_data["negative_slope"] = call.negative_slope;
    ctx->saved_data["max_degrees"] = call.max_degrees.vec();
    ctx->saved_data["dropout"] = call.dropout.p;
    ctx->saved_data["donated"] = !is_traced(x) && saves_unseen();
    ctx->set_materialize_grads(false);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(kPairInputs + 2);
    const variable_list saved = ctx->get_saved_variables();
    const auto given = [&](size_t i) { return saved[i].defined() ? OptTensor(saved[i]) : OptTensor(); };
    const OptTensor bias = given(kBias);
    const at::TensorList lists = at::TensorList(saved).slice(kWalks);
    const std::vector<int64_t> degrees = ctx->saved_data.at("max_degrees").toIntVector();
    const PairCall call{saved[kX],
                        saved[kWeight],
                        saved[kQuery],
                        saved[kKey],
                        bias,
                        {"edgeless::pair_attention", lists.slice(0, PairWalks::kSize)},
                        ctx->saved_data.at("negative_slope").toDouble(),
                        degrees,
                        {ctx->saved_data.at("dropout").toDouble(), given(kSeed), lists.slice(PairWalks::kSize)}};
    Needs need(ctx);
    PairChoice needs{};
    for (size_t i = 0; i < kPairInputs; ++i) needs[i] = need(i != kPairBias || bias.has_value());
    check_not_written_over(ctx, "attention");
    const bool over = ctx->saved_data.at("donated").toBool() && is_last_backward(grads[0]);
    const auto run = [&] {
      const Tensor out = result_is_kept(ctx) ? saved[kOut] : std::get<0>(call_pair_attention(call, false));
      const PairResults results{out, saved[kValues], saved[kVectors], saved[kQueries], saved[kShift]};
      if (!over) return call_pair_attention_backward(call, results, grads[0], needs);
      note_written_over(ctx);
      return call_pair_attention_backward_over(call, results, grads[0], needs);
    };
    variable_list found = differentiable_again(
        {saved[kX], saved[kWeight], saved[kQuery], saved[kKey], bias}, {grads[0]},
        [&]() -> Plain { return PlainPairAttention(call); }, run);
    for (size_t i = 0; i < kPairInputs; ++i) {
      if (!needs[i]) found[i] = Tensor();
    }
    found.resize(kPairInputs + 2);  // call and results have no gradient
    return found;
  }
};

PairOutputs pair_attention(const PairCall& call, bool keep_sums) {
  if (!at::GradMode::is_enabled()) return call_pair_attention(call, keep_sums);
  PairOutputs results;
  std::get<0>(results) = PairAttention::apply(call.x, call.weight, call.query, call.key, call.bias, call, &results);
  // The autograd node owns the values, and its backward may overwrite them.
  std::get<1>(results) = at::empty({0}, call.x.options());
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, Autograd, m) { m.impl("pair_attention", pair_attention_op<pair_attention>); }

}  // namespace edgeless
