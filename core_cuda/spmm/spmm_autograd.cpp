// Autograd of SpMM and SDDMM. Each backward consists of the two ops themselves, so derivatives of any order exist.
#include "calls.h"

namespace edgeless {
namespace {

Tensor sddmm(const Tensor& dst, const Tensor& src, const OptTensor& src_scale, const OptTensor& dst_scale,
             at::TensorList csr, at::TensorList csc);

// The arguments that get no gradient.
struct SpmmOptions {
  const OptTensor &src_scale, &dst_scale;
  GraphArrays graph;
};

using Compute = std::function<Tensor()>;

struct SpMM : Function<SpMM> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptTensor& weight, const SpmmOptions& options,
                        const Compute& compute) {
    const bool needs_x = weight && weight->requires_grad();
    save(ctx, {needs_x ? OptTensor(x) : OptTensor(), weight, options.src_scale, options.dst_scale}, options.graph);
    ctx->saved_data["dtype"] = static_cast<int64_t>(x.scalar_type());
    return compute();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Saved saved(ctx, 4);
    const OptTensor weight = saved.optional(1), src_scale = saved.optional(2), dst_scale = saved.optional(3);
    Needs need(ctx);
    Tensor grad_x, grad_weight;
    if (need()) {
      const auto dtype = static_cast<at::ScalarType>(ctx->saved_data.at("dtype").toInt());
      grad_x = spmm_op(grads[0], weight, dst_scale, src_scale, saved.graph.reversed()).to(dtype);
    }
    if (need(weight.has_value())) {
      static const Kernels kernels("edgeless::sddmm", sddmm);
      grad_weight = kernels.op(grads[0], saved[0], src_scale, dst_scale, saved.graph.csr, saved.graph.csc);
    }
    return {grad_x, grad_weight, Tensor(), Tensor()};
  }
};

struct SDDMM : Function<SDDMM> {
  static Tensor forward(AutogradContext* ctx, const Tensor& dst, const Tensor& src, const SpmmOptions& options,
                        const Compute& compute) {
    save(ctx, {dst, src, options.src_scale, options.dst_scale}, options.graph);
    return compute();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Saved saved(ctx, 4);
    const Tensor &dst = saved[0], &src = saved[1];
    const OptTensor src_scale = saved.optional(2), dst_scale = saved.optional(3);
    Needs need(ctx);
    Tensor grad_dst, grad_src;
    if (need()) {
      grad_dst = spmm_op(src, grads[0], src_scale, dst_scale, saved.graph).to(dst.scalar_type());
    }
    if (need()) {
      grad_src = spmm_op(dst, grads[0], dst_scale, src_scale, saved.graph.reversed()).to(src.scalar_type());
    }
    return {grad_dst, grad_src, Tensor(), Tensor()};
  }
};

Tensor spmm(const Tensor& x, const OptTensor& weight, const OptTensor& src_scale, const OptTensor& dst_scale,
            at::TensorList csr, at::TensorList csc, Optional<at::ScalarType> out_dtype, at::IntArrayRef max_degrees) {
  const GraphArrays graph{csr, csc, max_degrees};
  const Compute compute = [&] { return call_spmm(x, weight, src_scale, dst_scale, graph, out_dtype); };
  if (!at::GradMode::is_enabled()) return compute();
  return SpMM::apply(x, weight, SpmmOptions{src_scale, dst_scale, graph}, compute);
}

Tensor sddmm(const Tensor& dst, const Tensor& src, const OptTensor& src_scale, const OptTensor& dst_scale,
             at::TensorList csr, at::TensorList csc) {
  static const Kernels kernels("edgeless::sddmm", sddmm);
  const Compute compute = [&] { return kernels(dst, src, src_scale, dst_scale, csr, csc); };
  if (!at::GradMode::is_enabled()) return compute();
  return SDDMM::apply(dst, src, SpmmOptions{src_scale, dst_scale, {csr, csc}}, compute);
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, Autograd, m) {
  m.impl("spmm", spmm);
  m.impl("sddmm", sddmm);
}

}  // namespace edgeless
