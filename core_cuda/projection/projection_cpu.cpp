// The linear maps before an attention, several of one input at once, and the row added after it, on the CPU.
//
// Float32 rows with weights that fit in a core's caches use edgeless' kernels (cpu/passes.h), which read a row once for
// all maps of an input, and a gradient once for the gradients of input, weights and biases. Everything else uses
// torch.mm in blocks of rows, whose results stay in the cache until they are copied out: a product of all rows at once
// spends as long on page faults of its result as on the arithmetic.
// docs/decisions/0004-cpu-gemm-vs-libraries.md compares both with MKL and oneDNN.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <deque>
#include <vector>

#include "../common/cpu/room.h"
#include "../common/cpu/tensors.h"
#include "cpu/kernels.h"
#include "inputs.h"

namespace edgeless {
namespace {

using at::Tensor;

// Elements of a block: 4 MB of float32, at most twice an L2.
constexpr int64_t kBlock = int64_t(1) << 20;

struct RowBlocks {
  int64_t rows, step;

  RowBlocks(const Tensor& x, int64_t width) : rows(x.size(0)) {
    step = std::max<int64_t>(512, kBlock / std::max<int64_t>(1, width));
  }

  template <class F>
  void each(F&& work) const {
    for (int64_t begin = 0; begin < rows; begin += step) work(begin, std::min(step, rows - begin));
  }
};

// Most elements of a map's input or result for which a plain product takes less time than preparing the kernels below
// (docs/decisions/0066). shared/functional/projection.py has the same limit as _FEW.
constexpr int64_t kFew = int64_t{1} << 17;

// Returns whether a sum of maps has few rows. False for 16-bit dtypes, whose sum would be rounded after every map.
bool are_few(at::TensorList xs, at::TensorList weights) {
  const auto dtype = weights[0].scalar_type();
  if (dtype != at::kFloat && dtype != at::kDouble) return false;
  for (size_t k = 0; k < xs.size(); ++k) {
    const int64_t width = std::max(weights[k].size(0), weights[k].size(1));
    if (xs[k].size(0) * width >= kFew || xs[k].scalar_type() != dtype) return false;
  }
  return true;
}

Tensor empty_like_rows(const Tensor& x, int64_t rows, int64_t width) {
  return cpu::empty_rows({rows, width}, x.options());
}

int64_t total_width(at::TensorList weights) {
  int64_t width = 0;
  for (const Tensor& weight : weights) width += weight.size(0);
  return width;
}

// Runs the kernels of cpu/ and owns the tensors behind their arguments.
class OwnKernels {
 public:
  // Most elements of the weights: 2 MB of float32. For larger ones, torch.mm has better cache blocking.
  static constexpr int64_t kMost = int64_t(1) << 19;
  // Most elements of the partial weight gradients of all parts of the rows: 64 MB.
  static constexpr int64_t kMostSums = int64_t(1) << 24;

  OwnKernels(const Tensor& x, int64_t columns) : x_(cpu::packed_rows(x)), features_(x.size(1)), columns_(columns) {
    usable_ = x.scalar_type() == at::kFloat && x.numel() > 0 && columns > 0 && features_ * columns <= kMost &&
              cpu::choose_projection_kernels(&kernels_);
    args_.x = usable_ ? x_.const_data_ptr<float>() : nullptr;
    args_.features = features_;
    args_.x_stride = x_.stride(0);
  }

  bool usable() const { return usable_; }

  void forward(at::TensorList weights, const c10::List<OptTensor>& biases, std::vector<Tensor>& outs) {
    for (size_t k = 0; k < weights.size(); ++k) {
      const cpu::OutRows out = cpu::out_rows(outs[k]);
      const OptTensor bias = biases.get(k);
      const Tensor* kept = bias ? keep(bias->contiguous()) : nullptr;
      cpu::ProjectionMap map{};
      map.width = weights[k].size(0);
      map.weight = packed(weights[k].t());
      map.bias = kept ? kept->const_data_ptr<float>() : nullptr;
      map.out = static_cast<float*>(out.data);
      map.bypass = out.bypass;
      maps_.push_back(map);
    }
    finish_args(features_);
    constexpr int64_t rows = 8 * cpu::kProjectionRows;
    const int64_t all = x_.size(0);
    cpu::for_each_part<float>((all + rows - 1) / rows, block_size(), [&](int64_t part, float* block) {
      kernels_.forward(args_, part * rows, std::min(all, (part + 1) * rows), block);
    });
  }

  // `grads` are the gradients of the maps that have one, `weights` the stacked weights of these maps. Writes grad_x if
  // it is not null, grad_weight [F, columns] if want_weight, and grad_bias [columns] if want_bias.
  void backward(const std::vector<Tensor>& grads, const Tensor& weights, const Tensor* grad_x, bool want_weight,
                bool want_bias, Tensor* grad_weight, Tensor* grad_bias) {
    for (const Tensor& grad : grads) {
      const Tensor* kept = keep(cpu::packed_rows(grad));
      cpu::ProjectionMap map{};
      map.width = grad.size(1);
      map.grad = kept->const_data_ptr<float>();
      map.grad_stride = kept->stride(0);
      maps_.push_back(map);
    }
    finish_args(columns_);
    args_.columns = columns_;
    if (grad_x) {
      const cpu::OutRows out = cpu::out_rows(*grad_x);
      args_.weights = packed(weights);
      args_.grad_x = static_cast<float*>(out.data);
      args_.bypass = out.bypass;
    }
    // The parts, and so the order of summation, depend on the shapes alone.
    constexpr int64_t step = cpu::kProjectionRows;
    const int64_t most_parts = std::min<int64_t>(32, kMostSums / (features_ * args_.block_stride));
    const int64_t all = x_.size(0), blocks = (all + step - 1) / step;
    const int64_t rows = std::max<int64_t>(8, (blocks + most_parts - 1) / most_parts) * step;
    const int64_t parts = (all + rows - 1) / rows;
    Tensor weight_sums, bias_sums;
    if (want_weight) weight_sums = at::zeros({parts, features_, args_.block_stride}, x_.options());
    if (want_bias) bias_sums = at::zeros({parts, args_.block_stride}, x_.options());
    cpu::for_each_part<float>(parts, block_size(), [&](int64_t part, float* block) {
      kernels_.backward(args_, part * rows, std::min(all, (part + 1) * rows),
                        want_weight ? weight_sums.mutable_data_ptr<float>() + part * weight_sums.stride(0) : nullptr,
                        want_bias ? bias_sums.mutable_data_ptr<float>() + part * args_.block_stride : nullptr, block);
    });
    if (want_weight) *grad_weight = weight_sums.sum(0).narrow(1, 0, columns_);
    if (want_bias) *grad_bias = bias_sums.sum(0).narrow(0, 0, columns_);
  }

 private:
  int64_t block_size() const { return cpu::kProjectionRows * args_.block_stride; }

  const Tensor* keep(Tensor t) {
    kept_.push_back(std::move(t));
    return &kept_.back();
  }

  const float* packed(const Tensor& matrix) {
    const int64_t k = matrix.size(0), n = matrix.size(1);
    const Tensor* room = keep(at::empty({kernels_.packed_size(k, n)}, matrix.options()));
    kernels_.pack(matrix.const_data_ptr<float>(), matrix.stride(0), matrix.stride(1), k, n,
                  room->mutable_data_ptr<float>());
    return room->const_data_ptr<float>();
  }

  void finish_args(int64_t block_width) {
    // An odd number of cache lines spreads rows over all sets of a cache.
    args_.block_stride = ((block_width + 15) / 16 | 1) * 16;
    args_.maps = maps_.data();
    args_.num_maps = static_cast<int64_t>(maps_.size());
  }

  const Tensor x_;
  const int64_t features_, columns_;
  bool usable_ = false;
  cpu::ProjectionKernels kernels_{};
  cpu::ProjectionArgs args_{};
  std::vector<cpu::ProjectionMap> maps_;
  std::deque<Tensor> kept_;  // owners of the memory that the pointers above refer to
};

std::vector<Tensor> cast_all(at::TensorList tensors, at::ScalarType dtype, bool side_by_side);

std::vector<Tensor> project(const Tensor& x, at::TensorList weights, const c10::List<OptTensor>& biases, int64_t joined,
                            Optional<at::ScalarType> dtype, at::IntArrayRef heads) {
  if (dtype) {
    const Maps cast(x, weights, biases, joined, dtype, [](auto& t, auto to) { return cast_all(t, to, false); });
    return project(cast.x, cast.weights, cast.biases, joined, {}, heads);
  }
  const char* op = "edgeless::project";
  const BelowAutograd below;
  check_maps(op, x, weights, biases, joined, heads);
  std::vector<Tensor> outs;
  for (const Tensor& weight : weights) outs.push_back(empty_like_rows(x, x.size(0), weight.size(0)));
  OwnKernels own(x, total_width(weights));
  if (own.usable()) {
    own.forward(weights, biases, outs);
    split_heads(outs, heads);
    return outs;
  }
  const OptTensor bias = joined_biases(x, weights, biases);
  const Tensor weight = weights.size() == 1 ? weights[0] : at::cat(weights);
  RowBlocks(x, total_width(weights)).each([&](int64_t begin, int64_t count) {
    const Tensor rows = x.narrow(0, begin, count);
    const Tensor block = bias ? at::addmm(*bias, rows, weight.t()) : at::mm(rows, weight.t());
    int64_t column = 0;
    for (Tensor& out : outs) {
      out.narrow(0, begin, count).copy_(block.narrow(1, column, out.size(1)));
      column += out.size(1);
    }
  });
  split_heads(outs, heads);
  return outs;
}

Tensor project_sum(at::TensorList xs, at::TensorList weights, const OptTensor& bias, Optional<at::ScalarType> dtype) {
  const BelowAutograd below;
  const Summands maps(xs, weights, bias, dtype, [](auto& t, auto to) { return cast_all(t, to, false); });
  check_summands("edgeless::project_sum", maps.xs, maps.weights, maps.bias);
  Tensor out;
  if (are_few(maps.xs, maps.weights)) {
    for (size_t k = 0; k < xs.size(); ++k) {
      const Tensor &x = maps.xs[k], weight = maps.weights[k].t();
      if (k == 0) {
        out = maps.bias ? at::addmm(*maps.bias, x, weight) : at::mm(x, weight);
      } else {
        out.addmm_(x, weight);
      }
    }
    return out;
  }
  for (size_t k = 0; k < xs.size(); ++k) {
    const c10::List<OptTensor> biases({k == 0 ? maps.bias : OptTensor()});
    const Tensor mapped = project(maps.xs[k], maps.weights[k], biases, 0, {}, {})[0];
    out = out.defined() ? out.add_(mapped) : mapped;
  }
  return out;
}

// Returns the gradients of x, of every weight and of every bias; an empty tensor if `needs` is false. A missing entry
// of `grads` means zero.
std::vector<Tensor> project_backward(const c10::List<OptTensor>& grads, const Tensor& x, at::TensorList weights,
                                     c10::List<bool> needs, Optional<at::ScalarType> x_dtype,
                                     Optional<at::ScalarType> map_dtype) {
  const char* op = "edgeless::project_backward";
  const BelowAutograd below;
  check_map_gradients(op, grads, x, weights, needs.size());
  const size_t maps = weights.size();
  std::vector<Tensor> given, used, results;
  for (size_t k = 0; k < 1 + 2 * maps; ++k) results.push_back(at::empty({0}, x.options()));
  bool any_weight = false, any_bias = false;
  std::vector<size_t> which;
  for (size_t k = 0; k < maps; ++k) {
    any_weight |= needs[1 + k], any_bias |= needs[1 + maps + k];
    const OptTensor grad = grads.get(k);
    if (!grad) continue;
    given.push_back(*grad), used.push_back(weights[k]), which.push_back(k);
  }
  const int64_t width = total_width(used);
  const Tensor weight = used.empty() ? at::empty({0, x.size(1)}, x.options()) : at::cat(used);
  if (needs[0]) results[0] = empty_like_rows(x, x.size(0), x.size(1));
  if (needs[0] && width == 0) results[0].zero_();
  Tensor grad_weight, grad_bias;
  OwnKernels own(x, width);
  if (own.usable()) {
    own.backward(given, weight, needs[0] ? &results[0] : nullptr, any_weight, any_bias, &grad_weight, &grad_bias);
  } else {
    if (any_weight) grad_weight = at::zeros({x.size(1), width}, x.options());
    if (any_bias) grad_bias = at::zeros({width}, x.options());
  }
  if (width > 0 && !own.usable()) {
    RowBlocks(x, width).each([&](int64_t begin, int64_t count) {
      std::vector<Tensor> parts;
      for (const Tensor& grad : given) parts.push_back(grad.narrow(0, begin, count));
      const Tensor block = parts.size() == 1 ? parts[0] : at::cat(parts, 1);
      if (needs[0]) results[0].narrow(0, begin, count).copy_(at::mm(block, weight));
      if (any_weight) grad_weight.addmm_(x.narrow(0, begin, count).t(), block);
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
  for (size_t i = 0; i < results.size(); ++i) {
    if (const auto dtype = i ? map_dtype : x_dtype) results[i] = results[i].to(*dtype);
  }
  return results;
}

std::vector<Tensor> project_sum_backward(const Tensor& grad, at::TensorList xs, at::TensorList weights,
                                         c10::List<bool> needs, Optional<at::ScalarType> x_dtype,
                                         Optional<at::ScalarType> map_dtype) {
  check_summand_gradients("edgeless::project_sum_backward", grad, xs, weights, needs.size());
  const size_t maps = xs.size();
  const auto dtype = grad.scalar_type();
  if (dtype == xs[0].scalar_type() && x_dtype.value_or(dtype) == dtype && map_dtype.value_or(dtype) == dtype &&
      are_few(xs, weights)) {
    const BelowAutograd below;
    const auto if_needed = [&](size_t i, auto&& compute) {
      return needs[i] ? compute() : at::empty({0}, grad.options());
    };
    std::vector<Tensor> few;
    for (size_t k = 0; k < maps; ++k) few.push_back(if_needed(k, [&] { return at::mm(grad, weights[k]); }));
    for (size_t k = 0; k < maps; ++k) few.push_back(if_needed(maps + k, [&] { return at::mm(grad.t(), xs[k]); }));
    few.push_back(if_needed(2 * maps, [&] { return grad.sum(0); }));
    return few;
  }
  c10::List<OptTensor> grads;
  grads.push_back(grad);
  std::vector<Tensor> results(1 + 2 * maps);
  for (size_t k = 0; k < maps; ++k) {
    const c10::List<bool> of_map({needs[k], needs[maps + k], k == 0 && needs[2 * maps]});
    const auto found = project_backward(grads, xs[k], weights[k], of_map, x_dtype, map_dtype);
    results[k] = found[0], results[maps + k] = found[1];
    if (k == 0) results[2 * maps] = found[2];
  }
  return results;
}

// Works in blocks of rows that are still in the cache when the bias is added.
void project_onto(const Tensor& to, const Tensor& x, const Tensor& weight, const OptTensor& bias) {
  const BelowAutograd below;
  check_onto("edgeless::project_onto", to, x, weight, bias);
  const Tensor map = weight.t();
  const bool same = to.scalar_type() == x.scalar_type();
  RowBlocks(x, std::max(x.size(1), weight.size(0))).each([&](int64_t begin, int64_t count) {
    Tensor part = to.narrow(0, begin, count);
    const Tensor rows = x.narrow(0, begin, count);
    if (same) {
      part.addmm_(rows, map);
    } else {
      part.add_(at::mm(rows, map));
    }
    if (bias) part.add_(*bias);
  });
}

Tensor add_row(const Tensor& given, const Tensor& row) {
  const char* op = "edgeless::add_row";
  const BelowAutograd below;
  const Tensor x = check_row(op, given, row);
  Tensor out = empty_like_rows(x, x.size(0), x.size(1));
  return at::add_out(out, x, row);
}

Tensor column_sums(const Tensor& x) {
  const BelowAutograd below;
  check_dim("edgeless::column_sums", "x", x, 2, "[N, F]");
  return x.sum(0);
}

std::vector<Tensor> cast_all(at::TensorList tensors, at::ScalarType dtype, bool /*side_by_side*/) {
  const BelowAutograd below;
  std::vector<Tensor> cast;
  for (const Tensor& t : tensors) cast.push_back(t.to(dtype, /*non_blocking=*/false, /*copy=*/true).contiguous());
  return cast;
}

// The vectors as a block-diagonal matrix [K H, H C]. One product with it reads x once for all vectors, and so does the
// gradient of the vectors; the multiplications by zero cost less than strided products per head.
Tensor block_diagonal(const std::vector<Tensor>& vectors) {
  const auto num = static_cast<int64_t>(vectors.size()), heads = vectors[0].size(0), channels = vectors[0].size(1);
  const Tensor blocks = at::zeros({num, heads, heads, channels}, vectors[0].options());
  for (int64_t k = 0; k < num; ++k) blocks.select(0, k).diagonal(0, 0, 1).copy_(vectors[k].t());
  return blocks.view({num * heads, heads * channels});
}

std::vector<Tensor> in_dtype(at::TensorList tensors, at::ScalarType dtype) {
  std::vector<Tensor> cast;
  for (const Tensor& t : tensors) cast.push_back(t.to(dtype));
  return cast;
}

std::vector<Tensor> node_logits(const Tensor& x, at::TensorList given_vectors) {
  const BelowAutograd below;
  const std::vector<Tensor> vectors = vectors_of_heads(given_vectors);
  const auto dtype = check_node_logits("edgeless::node_logits", x, vectors);
  const Tensor all = at::mm(x.flatten(1).to(dtype), block_diagonal(in_dtype(vectors, dtype)).t());
  std::vector<Tensor> logits;
  for (const Tensor& part : all.split(x.size(1), 1)) logits.push_back(part.contiguous());
  return logits;
}

std::vector<Tensor> node_logits_backward(const c10::List<OptTensor>& grads, const Tensor& x,
                                         at::TensorList given_vectors, c10::List<bool> needs, const OptTensor& more) {
  const BelowAutograd below;
  const std::vector<Tensor> vectors = vectors_of_heads(given_vectors);
  check_node_logit_gradients("edgeless::node_logits_backward", grads, x, vectors, needs.size(), more);
  const auto dtype = at::promote_types(x.scalar_type(), vectors[0].scalar_type());
  const int64_t heads = x.size(1), channels = x.size(2);
  std::vector<Tensor> results, given, of;
  std::vector<size_t> which;
  for (size_t i = 0; i <= vectors.size(); ++i) {
    const Tensor& like = i ? given_vectors[i - 1] : x;
    results.push_back(needs[i] ? at::zeros(like.sizes(), like.options()) : at::empty({0}, like.options()));
  }
  if (needs[0] && more) results[0].copy_(*more);
  bool any = false;
  for (size_t k = 0; k < vectors.size(); ++k) {
    const OptTensor grad = grads.get(k);
    if (!grad) continue;
    given.push_back(*grad), of.push_back(vectors[k].to(dtype)), which.push_back(1 + k);
    any |= needs[1 + k];
  }
  if (given.empty()) return results;
  const Tensor grad = given.size() == 1 ? given[0] : at::cat(given, 1);
  if (needs[0]) results[0] += at::mm(grad, block_diagonal(of)).view(x.sizes());
  if (!any) return results;
  const Tensor products = at::mm(grad.t(), x.flatten(1).to(dtype));
  const Tensor found = products.view({static_cast<int64_t>(of.size()), heads, heads, channels}).diagonal(0, 1, 2);
  for (size_t k = 0; k < of.size(); ++k) {
    if (needs[which[k]]) results[which[k]].copy_(found.select(0, k).t());
  }
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CPU, m) {
  m.impl("project", cpu::WithRoom<project>::call);
  m.impl("project_backward", cpu::WithRoom<project_backward>::call);
  m.impl("project_sum", cpu::WithRoom<project_sum>::call);
  m.impl("project_sum_backward", cpu::WithRoom<project_sum_backward>::call);
  m.impl("project_onto", project_onto);  // no WithRoom: it writes to an input in place, so it must not be retried
  m.impl("add_row", cpu::WithRoom<add_row>::call);
  m.impl("column_sums", cpu::WithRoom<column_sums>::call);
  m.impl("cast_all", cpu::WithRoom<cast_all>::call);
  m.impl("node_logits", cpu::WithRoom<node_logits>::call);
  m.impl("node_logits_backward", cpu::WithRoom<node_logits_backward>::call);
}

}  // namespace edgeless
