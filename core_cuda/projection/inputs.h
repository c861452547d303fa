// Argument checks of the projection ops, shared by all devices.
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

// A guard for torch ops inside a kernel, without autograd and autocast: dtypes are settled, and the op has its own
// gradient.
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

inline void check_weights(const char* op, const at::Tensor& x, at::TensorList weights) {
  check_dim(op, "x", x, 2, "[N, F]");
  TORCH_CHECK_VALUE(!weights.empty(), op, ": weights must hold at least one tensor, got none");
  for (const at::Tensor& weight : weights) {
    check_dim(op, "weights", weight, 2, "[F_out, F] each");
    check_like(op, "weights", weight, {weight.size(0), x.size(1)}, x);
  }
}

inline void check_maps(const char* op, const at::Tensor& x, at::TensorList weights, const c10::List<OptTensor>& biases,
                       int64_t joined, at::IntArrayRef heads) {
  check_weights(op, x, weights);
  TORCH_CHECK_VALUE(heads.empty() || heads.size() == weights.size(), op, ": heads must have one entry for each of the ",
                    weights.size(), " weights, got ", heads.size());
  for (size_t k = 0; k < heads.size(); ++k) {
    TORCH_CHECK_VALUE(heads[k] >= 0 && (heads[k] == 0 || weights[k].size(0) % heads[k] == 0), op,
                      ": heads must divide the ", weights[k].size(0), " results of a map, got ", heads[k]);
  }
  TORCH_CHECK_VALUE(0 <= joined && joined <= static_cast<int64_t>(weights.size()), op, ": joined must be 0 to ",
                    weights.size(), ", got ", joined);
  TORCH_CHECK_VALUE(biases.size() == weights.size(), op, ": biases must have one entry for each of the ",
                    weights.size(), " weights, got ", biases.size());
  for (size_t k = 0; k < weights.size(); ++k) {
    const OptTensor bias = biases.get(k);
    if (!bias) continue;
    check_like(op, "biases", *bias, {weights[k].size(0)}, x);
  }
}

// Views the output of map k as [N, heads[k], C] if heads[k] > 0.
inline void split_heads(std::vector<at::Tensor>& outs, at::IntArrayRef heads) {
  for (size_t k = 0; k < heads.size(); ++k) {
    if (heads[k] > 0) outs[k] = outs[k].unflatten(1, {heads[k], outs[k].size(1) / heads[k]});
  }
}

// Replaces the tensors i with chooses(i) by copies, made by one call of cast(tensors, dtype).
template <class Cast, class Chooses>
void cast_chosen(std::vector<at::Tensor>& tensors, at::ScalarType dtype, Cast&& cast, Chooses&& chooses) {
  std::vector<at::Tensor> chosen;
  std::vector<size_t> which;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (chooses(i)) chosen.push_back(tensors[i]), which.push_back(i);
  }
  if (!chosen.empty()) chosen = cast(chosen, dtype);
  for (size_t i = 0; i < which.size(); ++i) tensors[which[i]] = chosen[i];
}

// Casts every defined tensor i to the dtype wanted(i), with one call of cast() per dtype.
template <class Cast, class Wanted>
void cast_each(std::vector<at::Tensor>& tensors, Cast&& cast, Wanted&& wanted) {
  for (size_t first = 0; first < tensors.size(); ++first) {
    const at::ScalarType dtype = wanted(first);
    cast_chosen(tensors, dtype, cast, [&](size_t i) {
      return tensors[i].defined() && wanted(i) == dtype && tensors[i].scalar_type() != dtype;
    });
  }
}

// Limit, in bytes, of parameters that are copied to be joined. The copies live until the backward.
constexpr int64_t kMostCopied = 4 << 20;

// The arguments of project(), cast to `dtype` if one is given, by cast(tensors, dtype). On CUDA, if maps are joined and
// have up to kMostCopied bytes, all parameters are copied: the copies are adjacent in memory, so that one product reads
// them as one matrix.
struct Maps {
  at::Tensor x;
  std::vector<at::Tensor> weights;
  c10::List<OptTensor> biases;

  template <class Cast>
  Maps(const at::Tensor& given, at::TensorList of, const c10::List<OptTensor>& with, int64_t joined,
       Optional<at::ScalarType> dtype, Cast&& cast) {
    std::vector<at::Tensor> all{given};
    all.insert(all.end(), of.begin(), of.end());
    for (size_t k = 0; k < with.size(); ++k) {
      if (const OptTensor bias = with.get(k)) all.push_back(*bias);
    }
    bool copies = joined > 1 && given.is_cuda();
    if (copies) {
      int64_t bytes = 0;
      for (size_t i = 1; i < all.size(); ++i) bytes += all[i].nbytes();
      copies = bytes <= kMostCopied;
    }
    if (dtype || copies) {
      const at::ScalarType to = dtype.value_or(given.scalar_type());
      cast_chosen(all, to, cast, [&](size_t i) { return all[i].scalar_type() != to || (copies && i > 0); });
    }
    x = all[0];
    weights.assign(all.begin() + 1, all.begin() + 1 + of.size());
    size_t next = 1 + of.size();
    for (size_t k = 0; k < with.size(); ++k) {
      biases.push_back(with.get(k) ? OptTensor(all[next++]) : OptTensor());
    }
  }
};

// The arguments of project_sum(), cast to `dtype` if one is given.
struct Summands {
  std::vector<at::Tensor> xs, weights;
  OptTensor bias;

  template <class Cast>
  Summands(at::TensorList of, at::TensorList maps, const OptTensor& with, Optional<at::ScalarType> dtype, Cast&& cast) {
    std::vector<at::Tensor> all(of.begin(), of.end());
    all.insert(all.end(), maps.begin(), maps.end());
    if (with) all.push_back(*with);
    if (dtype) cast_each(all, cast, [&](size_t) { return *dtype; });
    xs.assign(all.begin(), all.begin() + of.size());
    weights.assign(all.begin() + of.size(), all.begin() + of.size() + maps.size());
    if (with) bias = all.back();
  }
};

inline void check_summands(const char* op, at::TensorList xs, at::TensorList weights, const OptTensor& bias) {
  TORCH_CHECK_VALUE(!xs.empty() && xs.size() == weights.size(), op,
                    ": there must be one weight for each of one or more xs, got ", weights.size(), " and ", xs.size());
  for (size_t k = 0; k < xs.size(); ++k) {
    check_weights(op, xs[k], weights[k]);
    check_shape(op, "xs", xs[k], {xs[0].size(0), xs[k].size(1)});
    check_shape(op, "weights", weights[k], {weights[0].size(0), xs[k].size(1)});
    check_dtype(op, "xs", xs[k], xs[0].scalar_type());
    check_device(op, "xs", xs[k], xs[0].device());
  }
  if (!bias) return;
  check_like(op, "bias", *bias, {weights[0].size(0)}, xs[0]);
}

// Tensors concatenated along dimension 0: a view if they are adjacent in memory, else a copy.
inline at::Tensor joined_rows(at::TensorList parts) {
  int64_t rows = 0, end = parts[0].storage_offset();
  bool follow = true;
  for (const at::Tensor& part : parts) {
    follow = follow && part.is_contiguous() && part.storage_offset() == end && part.is_alias_of(parts[0]);
    rows += part.size(0), end += part.numel();
  }
  if (!follow) return at::cat(parts);
  at::DimVector sizes(parts[0].sizes());
  sizes[0] = rows;
  return parts[0].as_strided(sizes, parts[0].strides());
}

// All biases concatenated, with zeros for maps without a bias; nothing if no map has one.
inline OptTensor joined_biases(const at::Tensor& x, at::TensorList weights, const c10::List<OptTensor>& biases) {
  std::vector<at::Tensor> parts;
  bool any = false;
  for (size_t k = 0; k < weights.size(); ++k) any |= OptTensor(biases.get(k)).has_value();
  if (!any) return {};
  for (size_t k = 0; k < weights.size(); ++k) {
    const OptTensor bias = biases.get(k);
    parts.push_back(bias ? *bias : at::zeros({weights[k].size(0)}, x.options()));
  }
  return joined_rows(parts);
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
    check_like(op, "grads", *grad, {x.size(0), weights[k].size(0)}, x);
  }
}

inline void check_summand_gradients(const char* op, const at::Tensor& grad, at::TensorList xs, at::TensorList weights,
                                    size_t needs) {
  check_summands(op, xs, weights, {});
  TORCH_CHECK_VALUE(needs == 1 + 2 * xs.size(), op, ": there must be ", 1 + 2 * xs.size(), " needs, got ", needs);
  check_like(op, "grad", grad, {xs[0].size(0), weights[0].size(0)}, xs[0]);
}

inline void check_onto(const char* op, const at::Tensor& to, const at::Tensor& x, const at::Tensor& weight,
                       const OptTensor& bias) {
  check_weights(op, x, weight);
  check_shape(op, "to", to, {x.size(0), weight.size(0)});
  const auto statistics = opmath_dtype(x.scalar_type());
  TORCH_CHECK_VALUE(to.scalar_type() == x.scalar_type() || to.scalar_type() == statistics, op, ": to must be ",
                    x.scalar_type(), " or ", statistics, ", got ", to.scalar_type());
  check_device(op, "to", to, x.device());
  if (!bias) return;
  check_like(op, "bias", *bias, {weight.size(0)}, x);
}

// x as [N, F].
inline at::Tensor check_row(const char* op, const at::Tensor& given, const at::Tensor& row) {
  TORCH_CHECK_VALUE(given.dim() == 2 || given.dim() == 3, op, ": x must be [N, F] or [N, H, C], got shape ",
                    given.sizes());
  const at::Tensor x = given.dim() == 3 ? given.flatten(1) : given;
  check_like(op, "row", row, {x.size(1)}, x);
  return x;
}

// One vector per head, [H, C], from parameters that layers store as [1, H, C].
inline std::vector<at::Tensor> vectors_of_heads(at::TensorList given) {
  std::vector<at::Tensor> vectors;
  for (const at::Tensor& vector : given) {
    vectors.push_back(vector.dim() == 3 && vector.size(0) == 1 ? vector.squeeze(0) : vector);
  }
  return vectors;
}

// Checks the arguments. Vectors have the dtype of the rows or the opmath dtype; returns the dtype of the logits, which
// is that of the vectors.
inline at::ScalarType check_node_logits(const char* op, const at::Tensor& x, at::TensorList vectors) {
  check_dim(op, "x", x, 3, "[N, H, C]");
  TORCH_CHECK_VALUE(!vectors.empty(), op, ": vectors must hold at least one tensor, got none");
  const auto arithmetic = opmath_dtype(x.scalar_type());
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
                                       at::TensorList vectors, size_t needs, const OptTensor& more) {
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
  if (!more) return;
  check_like(op, "more", *more, x.sizes(), x);
}

}  // namespace edgeless
