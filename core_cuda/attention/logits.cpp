// What nodes bring to logits that are linear in them: <x[n, h], a[h]> for some vectors a of the same nodes.
//
// One product with the vectors on a block diagonal, [K H, H C], reads x once for all of them, and so does the gradient
// of the vectors; the products of zero that it adds cost less than strided products by head would.
#include <ATen/ATen.h>

#include "../common/autograd.h"
#include "../common/checks.h"

namespace edgeless {
namespace {

// vectors [1, H, C] each, to [K H, H C]
Tensor block_diagonal(at::TensorList vectors) {
  const int64_t num = vectors.size();
  const c10::SymInt heads = vectors[0].sym_size(1), channels = vectors[0].sym_size(2);
  const Tensor blocks = at::zeros_symint({num, heads, heads, channels}, vectors[0].options());
  for (int64_t k = 0; k < num; ++k) blocks.select(0, k).diagonal(0, 0, 1).copy_(vectors[k].select(0, 0).t());
  return blocks.view_symint({num * heads, heads * channels});
}

std::tuple<Tensor, Tensor> node_logits(const Tensor& x, at::TensorList vectors) {
  const char* op = "edgeless::node_logits";
  check_dim(op, "x", x, 3, "[N, H, C]");
  TORCH_CHECK_VALUE(!vectors.empty(), op, ": vectors must hold at least one tensor, got none");
  for (const Tensor& t : vectors) {
    check_shape(op, "vectors", t, {1, x.size(1), x.size(2)});
    check_dtype(op, "vectors", t, x.scalar_type());
    check_device(op, "vectors", t, x.device());
  }
  const Tensor blocks = block_diagonal(vectors);
  return {at::mm(x.flatten(1), blocks.t()), blocks};
}

struct NodeLogits : torch::autograd::Function<NodeLogits> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, at::TensorList vectors,
                        const std::function<std::tuple<Tensor, Tensor>()>& compute, Tensor* blocks) {
    Tensor logits;
    std::tie(logits, *blocks) = compute();
    variable_list saved = vectors.vec();
    saved.push_back(x);
    saved.push_back(*blocks);
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    return logits;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const int64_t num = saved.size() - 2;
    variable_list results(num + 3);
    if (!grads[0].defined()) return results;
    const Tensor& x = saved[num];
    if (ctx->needs_input_grad(0)) {
      // A second derivative needs to know where the blocks come from.
      const bool again = at::GradMode::is_enabled();
      const Tensor blocks = again ? block_diagonal(at::TensorList(saved).slice(0, num)) : saved[num + 1];
      results[0] = at::mm(grads[0], blocks).view_symint(x.sym_sizes());
    }
    bool any = false;
    for (int64_t k = 0; k < num; ++k) any |= ctx->needs_input_grad(1 + k);
    if (!any) return results;
    const c10::SymInt heads = x.sym_size(1), channels = x.sym_size(2);
    const Tensor products = at::mm(grads[0].t(), x.flatten(1)).view_symint({num, heads, heads, channels});
    const Tensor found = products.diagonal(0, 1, 2).transpose(1, 2).contiguous();  // [K, H, C]
    for (int64_t k = 0; k < num; ++k) {
      if (ctx->needs_input_grad(1 + k)) results[1 + k] = found.narrow(0, k, 1);
    }
    return results;
  }
};

std::tuple<Tensor, Tensor> differentiable_node_logits(const Tensor& x, at::TensorList vectors) {
  static const Kernels kernels("edgeless::node_logits", differentiable_node_logits);
  const std::function<std::tuple<Tensor, Tensor>()> compute = [&] { return kernels(x, vectors); };
  if (!at::GradMode::is_enabled()) return compute();
  Tensor blocks;  // beside autograd: they have no gradient
  Tensor logits = NodeLogits::apply(x, vectors, compute, &blocks);
  return {std::move(logits), std::move(blocks)};
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CPU, m) { m.impl("node_logits", node_logits); }
TORCH_LIBRARY_IMPL(edgeless, CUDA, m) { m.impl("node_logits", node_logits); }
TORCH_LIBRARY_IMPL(edgeless, Autograd, m) { m.impl("node_logits", differentiable_node_logits); }

}  // namespace edgeless
