// The linear maps in front of the attention, several of one input at once, and the row that is added behind it.
//
// Matrix products are the libraries' business; what is ours is where results lie. On the CPU a product of large
// matrices by torch spends as long on the first touch of its result's pages as on the product. Here blocks of rows go
// through a buffer that stays in the cache, all maps of the input in one product, into results on large pages. On
// CUDA all rows are one block; layers do not call it there.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "common/checks.h"
#include "common/cpu/tensors.h"
#include "common/optional.h"

namespace edgeless {
namespace {

using at::Tensor;
using OptTensor = Optional<Tensor>;

// Numbers of a block: 4 MB of float32, at most twice an L2.
constexpr int64_t kBlock = int64_t(1) << 20;

struct Blocks {
  int64_t rows, step;

  Blocks(const Tensor& x, int64_t width) : rows(x.size(0)) {
    step = x.is_cpu() ? std::max<int64_t>(512, kBlock / std::max<int64_t>(1, width)) : std::max<int64_t>(1, rows);
  }

  template <class F>
  void each(F&& work) const {
    for (int64_t begin = 0; begin < rows; begin += step) work(begin, std::min(step, rows - begin));
  }
};

// x weight^T + bias by oneDNN where torch has it: on AMD's processors its float32 products take half of MKL's time.
class Product {
 public:
  explicit Product(const Tensor& x) {
    if (!x.is_cpu() || x.scalar_type() != at::kFloat || !at::globalContext().userEnabledMkldnn()) return;
    const auto found = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
    if (found && found->schema().arguments().size() == 6) onednn_ = found;
  }

  Tensor operator()(const Tensor& x, const Tensor& weight, const Optional<Tensor>& bias = {}) const {
    if (!onednn_) return bias ? at::addmm(*bias, x, weight.t()) : at::mm(x, weight.t());
    const c10::List<Optional<at::Scalar>> scalars;
    torch::jit::Stack stack{x, weight, bias, "none", scalars, c10::IValue()};
    onednn_->callBoxed(&stack);
    return std::move(stack.back()).toTensor();
  }

  // sum += a^T b, [F, W]. MKL is the faster one where both are narrow.
  void add_transposed(Tensor& sum, const Tensor& a, const Tensor& b) const {
    if (onednn_ && b.size(1) >= 256) {
      sum.add_((*this)(a.t(), b.t()));
    } else {
      sum.addmm_(a.t(), b);
    }
  }

 private:
  Optional<c10::OperatorHandle> onednn_;
};

Tensor empty_like_rows(const Tensor& x, int64_t rows, int64_t width) {
  return x.is_cpu() ? cpu::empty_rows({rows, width}, x.options()) : at::empty({rows, width}, x.options());
}

void check_maps(const char* op, const Tensor& x, at::TensorList weights) {
  check_dim(op, "x", x, 2, "[N, F]");
  TORCH_CHECK_VALUE(!weights.empty(), op, ": weights must hold at least one tensor, got none");
  for (const Tensor& weight : weights) {
    check_dim(op, "weights", weight, 2, "[F_out, F] each");
    check_shape(op, "weights", weight, {weight.size(0), x.size(1)});
    check_dtype(op, "weights", weight, x.scalar_type());
    check_device(op, "weights", weight, x.device());
  }
}

int64_t total_width(at::TensorList weights) {
  int64_t width = 0;
  for (const Tensor& weight : weights) width += weight.size(0);
  return width;
}

std::vector<Tensor> project(const Tensor& x, at::TensorList weights, const c10::List<OptTensor>& biases) {
  const char* op = "edgeless::project";
  at::AutoDispatchBelowADInplaceOrView guard;
  check_maps(op, x, weights);
  TORCH_CHECK_VALUE(biases.size() == weights.size(), op, ": biases must have one entry for each of the ",
                    weights.size(), " weights, got ", biases.size());
  std::vector<Tensor> outs, rows_of_bias;
  bool has_bias = false;
  for (size_t k = 0; k < weights.size(); ++k) {
    const OptTensor bias = biases.get(k);
    const int64_t width = weights[k].size(0);
    if (bias) {
      check_shape(op, "biases", *bias, {width});
      check_dtype(op, "biases", *bias, x.scalar_type());
      check_device(op, "biases", *bias, x.device());
    }
    has_bias |= bias.has_value();
    rows_of_bias.push_back(bias ? *bias : at::zeros({width}, x.options()));
    outs.push_back(empty_like_rows(x, x.size(0), width));
  }
  Optional<Tensor> bias;
  if (has_bias) bias = at::cat(rows_of_bias);
  const Tensor weight = weights.size() == 1 ? weights[0] : at::cat(weights);
  const Product product(x);
  Blocks(x, total_width(weights)).each([&](int64_t begin, int64_t count) {
    const Tensor block = product(x.narrow(0, begin, count), weight, bias);
    int64_t column = 0;
    for (Tensor& out : outs) {
      out.narrow(0, begin, count).copy_(block.narrow(1, column, out.size(1)));
      column += out.size(1);
    }
  });
  return outs;
}

// Gradients of x, of every weight, of every bias; an empty tensor for what `needs` does not ask for. A gradient that
// is missing is zero.
std::vector<Tensor> project_backward(const c10::List<OptTensor>& grads, const Tensor& x, at::TensorList weights,
                                     c10::List<bool> needs) {
  const char* op = "edgeless::project_backward";
  at::AutoDispatchBelowADInplaceOrView guard;
  check_maps(op, x, weights);
  const size_t maps = weights.size();
  TORCH_CHECK_VALUE(grads.size() == maps && needs.size() == 1 + 2 * maps, op, ": there must be ", maps, " grads and ",
                    1 + 2 * maps, " needs, got ", grads.size(), " and ", needs.size());
  std::vector<Tensor> given, used, results;
  for (size_t k = 0; k < 1 + 2 * maps; ++k) results.push_back(at::empty({0}, x.options()));
  bool any_weight = false, any_bias = false;
  std::vector<size_t> which;
  for (size_t k = 0; k < maps; ++k) {
    any_weight |= needs[1 + k], any_bias |= needs[1 + maps + k];
    const OptTensor grad = grads.get(k);
    if (!grad) continue;
    check_shape(op, "grads", *grad, {x.size(0), weights[k].size(0)});
    check_dtype(op, "grads", *grad, x.scalar_type());
    given.push_back(*grad), used.push_back(weights[k]), which.push_back(k);
  }
  const int64_t width = total_width(used);
  const Tensor weight = used.empty() ? at::empty({0, x.size(1)}, x.options()) : at::cat(used);
  if (needs[0]) results[0] = empty_like_rows(x, x.size(0), x.size(1));
  if (needs[0] && width == 0) results[0].zero_();
  Tensor grad_weight, grad_bias;
  if (any_weight) grad_weight = at::zeros({x.size(1), width}, x.options());
  if (any_bias) grad_bias = at::zeros({width}, x.options());
  if (width > 0) {
    const Product product(x);
    const Tensor columns = weight.t().contiguous();
    Blocks(x, width).each([&](int64_t begin, int64_t count) {
      std::vector<Tensor> parts;
      for (const Tensor& grad : given) parts.push_back(grad.narrow(0, begin, count));
      const Tensor block = parts.size() == 1 ? parts[0] : at::cat(parts, 1);
      if (needs[0]) results[0].narrow(0, begin, count).copy_(product(block, columns));
      if (any_weight) product.add_transposed(grad_weight, x.narrow(0, begin, count), block);
      if (any_bias) grad_bias.add_(block.sum(0));
    });
  }
  int64_t row = 0;
  for (size_t k = 0, u = 0; k < maps; ++k) {
    const bool has_grad = u < which.size() && which[u] == k;
    const int64_t rows = weights[k].size(0);
    if (needs[1 + k]) {
      results[1 + k] = has_grad ? grad_weight.narrow(1, row, rows).t().contiguous() : at::zeros_like(weights[k]);
    }
    if (needs[1 + maps + k]) {
      results[1 + maps + k] = has_grad ? grad_bias.narrow(0, row, rows).clone() : at::zeros({rows}, x.options());
    }
    if (has_grad) row += rows, ++u;
  }
  return results;
}

Tensor add_row(const Tensor& x, const Tensor& row) {
  const char* op = "edgeless::add_row";
  at::AutoDispatchBelowADInplaceOrView guard;
  check_dim(op, "x", x, 2, "[N, F]");
  check_shape(op, "row", row, {x.size(1)});
  check_dtype(op, "row", row, x.scalar_type());
  check_device(op, "row", row, x.device());
  Tensor out = empty_like_rows(x, x.size(0), x.size(1));
  return at::add_out(out, x, row);
}

}  // namespace

#define EDGELESS_REGISTER_PROJECTION(Device)      \
  TORCH_LIBRARY_IMPL(edgeless, Device, m) {       \
    m.impl("project", project);                   \
    m.impl("project_backward", project_backward); \
    m.impl("add_row", add_row);                   \
  }
EDGELESS_REGISTER_PROJECTION(CPU)
EDGELESS_REGISTER_PROJECTION(CUDA)

}  // namespace edgeless
