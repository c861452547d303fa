// What the projection ops are given, checked alike on every device.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <vector>

#include "../common/checks.h"
#include "../common/optional.h"

namespace edgeless {

using OptTensor = Optional<at::Tensor>;

// For torch's ops within a kernel: of tensors whose dtypes are settled, and whose gradients are the op's own.
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

inline void check_weights(const char* op, const at::Tensor& x, at::TensorList weights) {
  check_dim(op, "x", x, 2, "[N, F]");
  TORCH_CHECK_VALUE(!weights.empty(), op, ": weights must hold at least one tensor, got none");
  for (const at::Tensor& weight : weights) {
    check_dim(op, "weights", weight, 2, "[F_out, F] each");
    check_shape(op, "weights", weight, {weight.size(0), x.size(1)});
    check_dtype(op, "weights", weight, x.scalar_type());
    check_device(op, "weights", weight, x.device());
  }
}

inline void check_maps(const char* op, const at::Tensor& x, at::TensorList weights, const c10::List<OptTensor>& biases,
                       int64_t joined) {
  check_weights(op, x, weights);
  TORCH_CHECK_VALUE(0 <= joined && joined <= static_cast<int64_t>(weights.size()), op, ": joined must be 0 to ",
                    weights.size(), ", got ", joined);
  TORCH_CHECK_VALUE(biases.size() == weights.size(), op, ": biases must have one entry for each of the ",
                    weights.size(), " weights, got ", biases.size());
  for (size_t k = 0; k < weights.size(); ++k) {
    const OptTensor bias = biases.get(k);
    if (!bias) continue;
    check_shape(op, "biases", *bias, {weights[k].size(0)});
    check_dtype(op, "biases", *bias, x.scalar_type());
    check_device(op, "biases", *bias, x.device());
  }
}

// What project() is given; where a dtype is asked for, what is of another one is copied by cast(tensors, dtype).
struct Maps {
  at::Tensor x;
  std::vector<at::Tensor> weights;
  c10::List<OptTensor> biases;

  template <class Cast>
  Maps(const at::Tensor& given, at::TensorList of, const c10::List<OptTensor>& with, Optional<at::ScalarType> dtype,
       Cast&& cast) {
    std::vector<at::Tensor> all{given};
    all.insert(all.end(), of.begin(), of.end());
    for (size_t k = 0; k < with.size(); ++k) {
      if (const OptTensor bias = with.get(k)) all.push_back(*bias);
    }
    std::vector<at::Tensor> others;
    std::vector<size_t> which;
    for (size_t i = 0; i < all.size(); ++i) {
      if (dtype && all[i].scalar_type() != *dtype) others.push_back(all[i]), which.push_back(i);
    }
    if (!others.empty()) others = cast(others, *dtype);
    for (size_t i = 0; i < which.size(); ++i) all[which[i]] = others[i];
    x = all[0];
    weights.assign(all.begin() + 1, all.begin() + 1 + of.size());
    size_t next = 1 + of.size();
    for (size_t k = 0; k < with.size(); ++k) {
      biases.push_back(with.get(k) ? OptTensor(all[next++]) : OptTensor());
    }
  }
};

// All biases side by side, zeros where a map has none; nothing where none has one.
inline OptTensor joined_biases(const at::Tensor& x, at::TensorList weights, const c10::List<OptTensor>& biases) {
  std::vector<at::Tensor> parts;
  bool any = false;
  for (size_t k = 0; k < weights.size(); ++k) {
    const OptTensor bias = biases.get(k);
    any |= bias.has_value();
    parts.push_back(bias ? *bias : at::zeros({weights[k].size(0)}, x.options()));
  }
  return any ? OptTensor(at::cat(parts)) : OptTensor();
}

inline void check_map_gradients(const char* op, const c10::List<OptTensor>& grads, const at::Tensor& x,
                                at::TensorList weights, size_t needs) {
  check_weights(op, x, weights);
  const size_t maps = weights.size();
  TORCH_CHECK_VALUE(grads.size() == maps && needs == 1 + 2 * maps, op, ": there must be ", maps, " grads and ",
                    1 + 2 * maps, " needs, got ", grads.size(), " and ", needs);
  for (size_t k = 0; k < maps; ++k) {
    const OptTensor grad = grads.get(k);
    if (!grad) continue;
    check_shape(op, "grads", *grad, {x.size(0), weights[k].size(0)});
    check_dtype(op, "grads", *grad, x.scalar_type());
    check_device(op, "grads", *grad, x.device());
  }
}

inline void check_row(const char* op, const at::Tensor& x, const at::Tensor& row) {
  check_dim(op, "x", x, 2, "[N, F]");
  check_shape(op, "row", row, {x.size(1)});
  check_dtype(op, "row", row, x.scalar_type());
  check_device(op, "row", row, x.device());
}

// Vectors and logits are of the rows' dtype or of the arithmetic's; the logits of the wider one.
inline at::ScalarType check_node_logits(const char* op, const at::Tensor& x, at::TensorList vectors) {
  check_dim(op, "x", x, 3, "[N, H, C]");
  TORCH_CHECK_VALUE(!vectors.empty(), op, ": vectors must hold at least one tensor, got none");
  const auto arithmetic = statistics_dtype(x.scalar_type());
  for (const at::Tensor& vector : vectors) {
    check_shape(op, "vectors", vector, {x.size(1), x.size(2)});
    TORCH_CHECK_VALUE(vector.scalar_type() == x.scalar_type() || vector.scalar_type() == arithmetic, op,
                      ": vectors must be ", x.scalar_type(), " or ", arithmetic, ", got ", vector.scalar_type());
    check_dtype(op, "vectors", vector, vectors[0].scalar_type());
    check_device(op, "vectors", vector, x.device());
  }
  return vectors[0].scalar_type() == arithmetic ? arithmetic : x.scalar_type();
}

inline void check_node_logit_gradients(const char* op, const c10::List<OptTensor>& grads, const at::Tensor& x,
                                       at::TensorList vectors, size_t needs) {
  const auto logits = check_node_logits(op, x, vectors);
  TORCH_CHECK_VALUE(grads.size() == vectors.size() && needs == 1 + vectors.size(), op, ": there must be ",
                    vectors.size(), " grads and ", 1 + vectors.size(), " needs, got ", grads.size(), " and ", needs);
  for (size_t k = 0; k < vectors.size(); ++k) {
    const OptTensor grad = grads.get(k);
    if (!grad) continue;
    check_shape(op, "grads", *grad, {x.size(0), x.size(1)});
    check_dtype(op, "grads", *grad, logits);
    check_device(op, "grads", *grad, x.device());
  }
}

}  // namespace edgeless
