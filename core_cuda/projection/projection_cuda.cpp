// The linear maps before an attention, several of one input at once, and the row added after it, on CUDA.
//
// Products use cuBLAS, or edgeless' kernels if these are faster (product_cuda.h). The products accumulate the input's
// gradient in place, one or two launches compute the bias gradients of all maps, and one launch does all casts of
// autocast.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "../common/launch.h"
#include "../common/packed.h"
#include "../common/storage_of.h"
#include "cuda/kernels.h"
#include "inputs.h"
#include "product_cuda.h"

namespace edgeless::cuda::projection {
namespace {

using at::Tensor;

Storage storage_of(const char* op, const char* name, at::ScalarType t) {
  TORCH_CHECK_VALUE(t == at::kFloat || t == at::kHalf || t == at::kBFloat16 || t == at::kDouble, op, ": ", name,
                    " must be a floating dtype, got ", t);
  return cuda::storage_of(t);
}

// Computes several maps by one product; the outputs are column ranges of one tensor.
std::vector<Tensor> project_joined(const Tensor& x, at::TensorList weights, const c10::List<OptTensor>& biases) {
  at::DimVector widths;
  for (const Tensor& map : weights) widths.push_back(map.size(0));
  const Packed all(map_rows(x, joined_rows(weights), joined_biases(x, weights, biases)), widths);
  std::vector<Tensor> outs;
  for (size_t k = 0; k < widths.size(); ++k) outs.push_back(all.part(k));
  return outs;
}

std::vector<Tensor> cast_all(at::TensorList tensors, at::ScalarType dtype, bool side_by_side);

std::vector<Tensor> project(const Tensor& x, at::TensorList weights, const c10::List<OptTensor>& biases, int64_t joined,
                            Optional<at::ScalarType> dtype, at::IntArrayRef heads) {
  if (dtype) {
    const Maps cast(x, weights, biases, joined, dtype, [](auto& t, auto to) { return cast_all(t, to, true); });
    return project(cast.x, cast.weights, cast.biases, joined, {}, heads);
  }
  const BelowAutograd below;
  check_maps("edgeless::project", x, weights, biases, joined, heads);
  std::vector<Tensor> outs;
  const size_t together = joined > 1 && x.size(0) < kLaunchBoundRows ? weights.size() : joined;
  const at::TensorList first = weights.slice(0, together);
  const bool whole =
      std::all_of(first.begin(), first.end(), [](const Tensor& w) { return w.size(0) * w.element_size() % 16 == 0; });
  if (together > 1 && whole) outs = project_joined(x, first, biases);
  for (size_t k = joined; k < outs.size(); ++k) outs[k] = outs[k].contiguous();
  for (size_t k = outs.size(); k < weights.size(); ++k) {
    outs.push_back(map_rows(x, weights[k], biases.get(k)));
  }
  split_heads(outs, heads);
  return outs;
}

Tensor project_sum(at::TensorList xs, at::TensorList weights, const OptTensor& bias, Optional<at::ScalarType> dtype) {
  const BelowAutograd below;
  const Summands maps(xs, weights, bias, dtype, [](auto& t, auto to) { return cast_all(t, to, true); });
  check_summands("edgeless::project_sum", maps.xs, maps.weights, maps.bias);
  return map_rows(maps.xs, maps.weights, maps.bias);
}

void project_onto(const Tensor& to, const Tensor& x, const Tensor& weight, const OptTensor& bias) {
  const BelowAutograd below;
  check_onto("edgeless::project_onto", to, x, weight, bias);
  add_mapped_rows(to, x, weight, bias);
}

// sums[t][c] = sum over the rows of matrices[t][:, c]. `dtype` is that of the matrices or their opmath dtype.
std::vector<Tensor> sums_of_columns(const char* op, const std::vector<Tensor>& matrices, at::ScalarType dtype) {
  std::vector<Tensor> sums, kept;
  if (matrices.empty()) return sums;
  const Tensor& some = matrices[0];
  const OnDevice on_device(some.device());
  const int64_t rows = some.size(0);
  for (const Tensor& matrix : matrices) {
    const auto options = matrix.options().dtype(dtype);
    sums.push_back(rows ? at::empty({matrix.size(1)}, options) : at::zeros({matrix.size(1)}, options));
  }
  if (rows == 0) return sums;
  const auto statistics = opmath_dtype(some.scalar_type());
  for (size_t begin = 0; begin < matrices.size(); begin += kMostTensors) {
    ColumnSumsArgs args;
    args.num_rows = rows, args.chunks = chunks_of(rows), args.wide = dtype != some.scalar_type();
    for (size_t t = begin; t < std::min(matrices.size(), begin + kMostTensors); ++t) {
      if (matrices[t].size(1) == 0) continue;
      const Tensor& packed = kept.emplace_back(
          matrices[t].stride(1) == 1 || matrices[t].size(1) == 1 ? matrices[t] : matrices[t].contiguous());
      Columns& columns = args.columns[args.tensors++];
      columns.rows = packed.const_data_ptr(), columns.row_stride = packed.stride(0);
      columns.width = static_cast<int>(packed.size(1));
      columns.first = args.total, columns.out = sums[t].data_ptr();
      args.total += columns.width;
    }
    if (args.tensors == 0) continue;
    Tensor partial;
    if (rows > kRowsOfABlock) {
      partial = at::empty({args.chunks, args.total}, some.options().dtype(statistics));
      args.partial = partial.data_ptr();
    }
    run_column_sums(storage_of(op, "x", some.scalar_type()), args, on_device.queue());
  }
  return sums;
}

// Consecutive gradients of maps as one matrix.
struct SideBySide {
  size_t first, count;  // index of the first gradient, number of gradients
  Tensor grad;          // [N, total columns]
};

// Groups gradients that are adjacent columns of one tensor, as attention returns them, without a copy. With `copy`, the
// other gradients are concatenated too.
std::vector<SideBySide> side_by_side(const std::vector<Tensor>& grads, bool copy) {
  std::vector<SideBySide> groups;
  for (const Tensor& next : grads) {
    if (!groups.empty()) {
      SideBySide& group = groups.back();
      const auto both = Packed::of({group.grad, next});
      if (both && both->in_order()) {
        group.grad = both->columns(0, group.grad.size(1) + next.size(1));
        ++group.count;
        continue;
      }
    }
    groups.push_back({static_cast<size_t>(&next - grads.data()), 1, next});
  }
  if (copy && groups.size() > 1) groups = {{0, grads.size(), at::cat(grads, 1)}};
  return groups;
}

// The dtype in which products write gradients: float32 if requested and supported for 16-bit rows, else that of x.
// Other requested dtypes need a cast afterwards.
at::ScalarType written_dtype(const Tensor& x, at::ScalarType wanted) {
  return wanted == at::kFloat && writes_floats(x) ? wanted : x.scalar_type();
}

// Casts gradients to the requested dtypes, and replaces undefined ones by empty tensors.
template <class Wanted>
void finish_gradients(std::vector<Tensor>& results, const Tensor& x, Wanted&& wanted) {
  cast_each(results, [](auto& t, auto to) { return cast_all(t, to, false); }, wanted);
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined()) results[i] = at::empty({0}, x.options().dtype(wanted(i)));
  }
}

std::vector<Tensor> project_backward(const c10::List<OptTensor>& grads, const Tensor& x, at::TensorList weights,
                                     c10::List<bool> needs, Optional<at::ScalarType> x_dtype,
                                     Optional<at::ScalarType> map_dtype) {
  const char* op = "edgeless::project_backward";
  const BelowAutograd below;
  check_map_gradients(op, grads, x, weights, needs.size());
  const size_t maps = weights.size();
  std::vector<Tensor> results(1 + 2 * maps), given, of, summed;
  std::vector<size_t> which, biases;
  const auto rows_dtype = x.scalar_type();
  const at::ScalarType wanted_x = x_dtype.value_or(rows_dtype), wanted_maps = map_dtype.value_or(rows_dtype);
  const at::ScalarType to_maps = written_dtype(x, wanted_maps);
  for (size_t k = 0; k < maps; ++k) {
    if (const OptTensor grad = grads.get(k)) {
      given.push_back(*grad), of.push_back(weights[k]), which.push_back(k);
    } else {
      if (needs[1 + k]) results[1 + k] = at::zeros(weights[k].sizes(), x.options().dtype(to_maps));
      if (needs[1 + maps + k]) results[1 + maps + k] = at::zeros({weights[k].size(0)}, x.options().dtype(to_maps));
    }
  }
  const std::vector<SideBySide> groups = side_by_side(given, x.size(0) < kLaunchBoundRows);
  // Accumulating several products in float32 moves more bytes than one cast at the end.
  const at::ScalarType to_x = groups.size() > 1 ? rows_dtype : written_dtype(x, wanted_x);
  // Weight gradients come first: their workspace is free again when grad_x is allocated.
  for (const SideBySide& group : groups) {
    const size_t end = group.first + group.count;
    bool any_weight = false, any_bias = false;
    for (size_t i = group.first; i < end; ++i) {
      any_weight |= needs[1 + which[i]], any_bias |= needs[1 + maps + which[i]];
    }
    Tensor products, sums;
    if (any_weight) products = weight_gradients(group.grad, x, 1, to_maps, any_bias ? &sums : nullptr)[0];
    int64_t row = 0;
    for (size_t i = group.first; i < end; ++i) {
      const auto part = [&](const Tensor& all) { return group.count > 1 ? all.narrow(0, row, of[i].size(0)) : all; };
      const size_t weight = 1 + which[i], bias = 1 + maps + which[i];
      if (needs[weight]) results[weight] = part(products);
      if (needs[bias] && sums.defined()) {
        results[bias] = part(sums);
      } else if (needs[bias]) {
        summed.push_back(given[i]), biases.push_back(bias);
      }
      row += of[i].size(0);
    }
  }
  if (needs[0]) {
    for (const SideBySide& group : groups) {
      const Tensor weight =
          group.count > 1 ? joined_rows(at::TensorList(of).slice(group.first, group.count)) : of[group.first];
      results[0] = map_rows_back(group.grad, weight, results[0], to_x);
    }
    if (!results[0].defined()) results[0] = at::zeros(x.sizes(), x.options().dtype(to_x));
  }
  const std::vector<Tensor> sums = sums_of_columns(op, summed, to_maps);
  for (size_t i = 0; i < sums.size(); ++i) results[biases[i]] = sums[i];
  finish_gradients(results, x, [&](size_t i) { return i ? wanted_maps : wanted_x; });
  return results;
}

std::vector<Tensor> project_sum_backward(const Tensor& grad, at::TensorList xs, at::TensorList weights,
                                         c10::List<bool> needs, Optional<at::ScalarType> x_dtype,
                                         Optional<at::ScalarType> map_dtype) {
  const char* op = "edgeless::project_sum_backward";
  const BelowAutograd below;
  check_summand_gradients(op, grad, xs, weights, needs.size());
  const size_t maps = xs.size();
  const Tensor& x = xs[0];
  const at::ScalarType wanted_x = x_dtype.value_or(x.scalar_type()), wanted_maps = map_dtype.value_or(x.scalar_type());
  const at::ScalarType to_maps = written_dtype(x, wanted_maps);
  std::vector<Tensor> results(1 + 2 * maps);
  const auto needed = [&](at::TensorList all, size_t first) {
    std::vector<Tensor> some;
    for (size_t k = 0; k < maps; ++k) {
      if (needs[first + k]) some.push_back(all[k]);
    }
    return some;
  };
  const auto take = [&](const std::vector<Tensor>& found, size_t first) {
    for (size_t k = 0, next = 0; k < maps; ++k) {
      if (needs[first + k]) results[first + k] = found[next++];
    }
  };
  take(all_rows_back(grad, needed(weights, 0), written_dtype(x, wanted_x)), 0);
  const std::vector<Tensor> mapped = needed(xs, maps);
  const bool alike = std::all_of(xs.begin(), xs.end(), [&](const Tensor& t) { return t.size(1) == x.size(1); });
  Tensor sums;
  if (!mapped.empty()) {
    take(weight_gradients(grad, mapped, alike ? maps : 1, to_maps, needs[2 * maps] ? &sums : nullptr), maps);
  }
  if (needs[2 * maps]) results[2 * maps] = sums.defined() ? sums : sums_of_columns(op, {grad}, to_maps)[0];
  finish_gradients(results, x, [&](size_t i) { return i < maps ? wanted_x : wanted_maps; });
  return results;
}

Tensor add_row(const Tensor& given, const Tensor& row) {
  const BelowAutograd below;
  const Tensor x = check_row("edgeless::add_row", given, row);
  return at::add(x, row).contiguous();
}

Tensor column_sums(const Tensor& x) {
  const char* op = "edgeless::column_sums";
  const BelowAutograd below;
  check_dim(op, "x", x, 2, "[N, F]");
  return sums_of_columns(op, {x}, x.scalar_type())[0];
}

std::vector<Tensor> cast_all(at::TensorList tensors, at::ScalarType dtype, bool side_by_side) {
  const char* op = "edgeless::cast_all";
  const BelowAutograd below;
  const Storage to = storage_of(op, "dtype", dtype);
  std::vector<Tensor> cast, kept;
  if (tensors.empty()) return cast;
  const OnDevice on_device(tensors[0].device());
  const int64_t vector = 16 / static_cast<int64_t>(c10::elementSize(dtype));
  const auto numbers = [&](const Tensor& t) { return (t.numel() + vector - 1) / vector * vector; };
  Tensor all;
  int64_t end = 0;  // end of the used part of `all`
  if (side_by_side) {
    for (const Tensor& t : tensors) end += numbers(t);
    all = at::empty({end}, tensors[0].options().dtype(dtype));
    end = 0;
  }
  const auto take = [&](const Tensor& t) {
    if (!side_by_side) return at::empty(t.sizes(), t.options().dtype(dtype));
    const int64_t begin = end;
    end += numbers(t);
    return all.as_strided(t.sizes(), t.strides(), begin);
  };
  for (size_t begin = 0; begin < tensors.size(); begin += kMostTensors) {
    CastArgs args;
    for (size_t t = begin; t < std::min(tensors.size(), begin + kMostTensors); ++t) {
      check_device(op, "tensors", tensors[t], tensors[0].device());
      const Tensor& packed = kept.emplace_back(tensors[t].contiguous());
      const Tensor& copy = cast.emplace_back(take(packed));
      if (packed.numel() == 0) continue;
      args.from[args.tensors] = packed.const_data_ptr(), args.to[args.tensors] = copy.data_ptr();
      args.dtype[args.tensors] = storage_of(op, "tensors", packed.scalar_type());
      args.numbers[args.tensors++] = packed.numel();
    }
    if (args.tensors > 0) run_cast(to, args, on_device.queue());
  }
  return cast;
}

// x is [N, H, C] with contiguous heads.
LogitsArgs logits_args(const Tensor& x, size_t vectors) {
  LogitsArgs args;
  args.rows = x.const_data_ptr();
  args.row_stride = x.stride(0), args.head_stride = x.stride(1);
  args.num_rows = x.size(0), args.heads = static_cast<int>(x.size(1)), args.channels = static_cast<int>(x.size(2));
  args.vectors = static_cast<int>(vectors);
  const auto in_fours = [](int64_t n) { return n % 4 == 0; };
  args.fours = in_fours(args.channels) && in_fours(args.row_stride) && in_fours(args.head_stride) &&
               reinterpret_cast<uintptr_t>(args.rows) % (4 * x.element_size()) == 0;
  const int lanes = args.fours ? args.channels / 4 : args.channels;
  while (args.sub_warp_log2 < 5 && (1 << args.sub_warp_log2) < lanes) ++args.sub_warp_log2;
  return args;
}

Tensor aligned(const Tensor& t, at::ScalarType dtype) {
  const Tensor packed = t.to(dtype).contiguous();
  return reinterpret_cast<uintptr_t>(packed.const_data_ptr()) % (4 * packed.element_size()) ? packed.clone() : packed;
}

Tensor packed_heads(const Tensor& x) { return x.stride(2) == 1 || x.size(2) == 1 ? x : x.contiguous(); }

std::vector<Tensor> node_logits(const Tensor& x, at::TensorList given_vectors) {
  const char* op = "edgeless::node_logits";
  const BelowAutograd below;
  const std::vector<Tensor> vectors = vectors_of_heads(given_vectors);
  const auto dtype = check_node_logits(op, x, vectors), arithmetic = opmath_dtype(x.scalar_type());
  const Storage rows_dtype = storage_of(op, "x", x.scalar_type());
  const OnDevice on_device(x.device());
  const Tensor rows = packed_heads(x);
  std::vector<Tensor> logits;
  for (size_t first = 0; first < vectors.size(); first += kMostVectors) {
    const size_t count = std::min<size_t>(kMostVectors, vectors.size() - first);
    LogitsArgs args = logits_args(rows, count);
    std::vector<Tensor> kept, outs;
    for (size_t k = 0; k < count; ++k) {
      args.vector[k] = kept.emplace_back(aligned(vectors[first + k], arithmetic)).const_data_ptr();
      args.logits[k] = outs.emplace_back(at::empty({x.size(0), x.size(1)}, x.options().dtype(arithmetic))).data_ptr();
    }
    if (outs[0].numel() > 0) run_logits(rows_dtype, args, on_device.queue());
    for (const Tensor& out : outs) logits.push_back(out.to(dtype));
  }
  return logits;
}

std::vector<Tensor> node_logits_backward(const c10::List<OptTensor>& grads, const Tensor& x,
                                         at::TensorList given_vectors, c10::List<bool> needs, const OptTensor& more) {
  const char* op = "edgeless::node_logits_backward";
  const BelowAutograd below;
  const std::vector<Tensor> vectors = vectors_of_heads(given_vectors);
  check_node_logit_gradients(op, grads, x, vectors, needs.size(), more);
  const auto arithmetic = opmath_dtype(x.scalar_type());
  const Storage rows_dtype = storage_of(op, "x", x.scalar_type());
  const OnDevice on_device(x.device());
  const Tensor rows = packed_heads(x), given = more ? aligned(*more, x.scalar_type()) : Tensor();
  std::vector<Tensor> results;
  for (size_t i = 0; i <= vectors.size(); ++i) {
    const Tensor& like = i ? given_vectors[i - 1] : x;
    results.push_back(needs[i] ? at::empty(like.sizes(), like.options()) : at::empty({0}, like.options()));
  }
  for (size_t first = 0; first < vectors.size(); first += kMostVectors) {
    const size_t count = std::min<size_t>(kMostVectors, vectors.size() - first);
    const auto sums = at::empty({chunks_of(x.size(0)), static_cast<int64_t>(count), x.size(1), x.size(2)},
                                x.options().dtype(arithmetic));
    LogitsArgs args = logits_args(rows, count);
    args.chunks = chunks_of(x.size(0));
    ColumnSumsArgs adding;
    std::vector<Tensor> kept;
    const int width = args.heads * args.channels;
    bool any = false;
    for (size_t k = 0; k < count; ++k) {
      const OptTensor grad = grads.get(first + k);
      args.vector[k] = kept.emplace_back(aligned(vectors[first + k], arithmetic)).const_data_ptr();
      if (grad) args.grad[k] = kept.emplace_back(grad->to(arithmetic).contiguous()).const_data_ptr();
      if (!needs[1 + first + k]) continue;
      any = true;
      Columns& columns = adding.columns[adding.tensors++];
      columns.width = width, columns.first = static_cast<int>(k) * width,
      columns.out = results[1 + first + k].data_ptr();
    }
    if (needs[0]) {  // later pairs of vectors add to the gradient of the first
      args.grad_rows = results[0].data_ptr();
      args.more = first > 0 ? args.grad_rows : given.defined() ? given.const_data_ptr() : nullptr;
    }
    if (any) args.partial = sums.data_ptr();
    if (x.numel() > 0) run_logit_gradients(rows_dtype, args, on_device.queue());
    if (any && width > 0) {
      adding.chunks = args.chunks, adding.total = static_cast<int>(count) * width, adding.partial = sums.data_ptr();
      add_chunks(storage_of(op, "vectors", vectors[0].scalar_type()), adding, on_device.queue());
    }
  }
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CUDA, m) {
  m.impl("project", project);
  m.impl("project_backward", project_backward);
  m.impl("project_sum", project_sum);
  m.impl("project_sum_backward", project_sum_backward);
  m.impl("project_onto", project_onto);
  m.impl("add_row", add_row);
  m.impl("column_sums", column_sums);
  m.impl("cast_all", cast_all);
  m.impl("node_logits", node_logits);
  m.impl("node_logits_backward", node_logits_backward);
}

}  // namespace edgeless::cuda::projection
