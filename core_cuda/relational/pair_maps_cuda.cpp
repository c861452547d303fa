// Keys and values per unique (source, type) ("pair") on CUDA. If k and v are columns of one tensor, and the gradients
// of keys and values are too, one GEMM computes keys and values as the halves of its rows, and one computes their
// gradients, in place of the pairs' gradients if it may. The matrices are joined first, in the dtype of the rows.
// Otherwise the ops are composed of others.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "../attention/calls.h"
#include "../common/launch.h"
#include "../common/packed.h"
#include "../common/storage_of.h"
#include "../spmm/calls.h"
#include "cuda/pair_weights.h"
#include "fused_cuda.h"
#include "pair_maps.h"
#include "products_cuda.h"

namespace edgeless::cuda::relational {
namespace {

// Two tensors of equal width as halves of the rows of one tensor, with blocks of `width` values, if the kernels can
// read them so.
Optional<Gathered> halves(const Tensor& first, const Tensor& second, int64_t width) {
  if (first.size(1) != second.size(1) || first.numel() == 0) return {};
  const auto packed = Packed::of({first, second});
  if (!packed || packed->begin[1] < packed->width[0]) return {};
  const Gathered rows{packed->columns(0, 2 * packed->width[0]), {}, packed->begin[1] - packed->width[0]};
  return are_whole(rows, width) ? Optional<Gathered>(rows) : Optional<Gathered>();
}

// Matrices that are dense inside and begin on vectors of four values; others are copied.
Tensor matrices_of_fours(const Tensor& t) {
  const bool dense = t.stride(3) == 1 && t.stride(2) == t.size(3) && t.stride(0) % 4 == 0 && t.stride(1) % 4 == 0 &&
                     t.size(2) * t.size(3) % 4 == 0;
  return dense && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % (4 * t.element_size()) == 0 ? t : t.contiguous();
}

// The matrices of a call, kept alive while kernels use them.
struct PairWeights {
  Tensor keys, values, scale;
  PairWeightsArgs args;

  explicit PairWeights(const PairMapsCall& in)
      : keys(matrices_of_fours(in.k_weight)), values(matrices_of_fours(in.v_weight)), scale(in.k_scale) {
    args.types = static_cast<int>(keys.size(0)), args.heads = static_cast<int>(keys.size(1));
    args.size = keys.size(2) * keys.size(3);
    args.wide = keys.scalar_type() != in.k.scalar_type();
    args.keys = read(keys), args.values = read(values), args.scale = read(scale);
  }

  static TypedMatrices<const void> read(const Tensor& t) { return {t.const_data_ptr(), t.stride(0), t.stride(1)}; }
  static TypedMatrices<void> written(const Tensor& t) { return {t.mutable_data_ptr(), t.stride(0), t.stride(1)}; }

  // The joined matrices [types, 2 * heads, K, M], in the dtype of the rows.
  Tensor together(const Tensor& rows, const jit::Queue& queue) {
    Tensor out = at::empty({keys.size(0), 2 * keys.size(1), keys.size(2), keys.size(3)}, rows.options());
    args.out = out.mutable_data_ptr();
    run_pair_weights(storage_of(rows.scalar_type()), args, queue);
    return out;
  }
};

// Returns whether one GEMM can compute both keys and values, provided that their rows are halves().
bool are_alike(const PairMapsCall& in) {
  return in.k_weight.sizes() == in.v_weight.sizes() && in.k_weight.numel() > 0 && in.k.scalar_type() != at::kDouble &&
         in.pairs() > 0 && in.k_weight.size(3) * in.k.element_size() % 16 == 0 && Segments(in.by_dst).of_one_edge() &&
         in.by_dst[5].numel() == 0;
}

std::tuple<Tensor, Tensor> pair_maps(const PairMapsCall& in, bool joined) {
  check_pair_maps("edgeless::pair_maps", in);
  if (!joined || !are_alike(in)) return pair_maps_of_parts(in);
  auto rows = halves(in.k, in.v, in.k_weight.size(2));
  if (!rows) return pair_maps_of_parts(in);
  const OnDevice on_device(in.k.device());
  const Segments pairs(in.by_dst);
  const int64_t width = in.k_weight.size(1) * in.k_weight.size(3);
  const Tensor out = at::empty({in.pairs(), 2 * width}, in.k.options());
  rows->ids = pairs.indices;
  multiply(*rows, PairWeights(in).together(in.k, on_device.queue()), pairs.type_ptr, {out});
  return {out.narrow(1, 0, width), out.narrow(1, width, width)};
}

// Computes the keys and from them the logits, then the values, which overwrite the keys. Both use the joined matrices.
Tensor pair_dot_attention(const PairDotCall& in) {
  check_pair_dot_attention("edgeless::pair_dot_attention", in);
  const PairMapsCall& maps = in.maps;
  if (!are_alike(maps) || !halves(maps.k, maps.v, maps.k_weight.size(2))) return pair_dot_attention_of_parts(in);
  const OnDevice on_device(maps.k.device());
  const Segments pairs(maps.by_dst);
  const int64_t heads = in.heads(), width = maps.k_weight.size(3);
  PairWeights matrices(maps);
  matrices.args.factor = static_cast<float>(in.coefficient);
  const Tensor weights = matrices.together(maps.k, on_device.queue());
  const Tensor rows = at::empty({in.maps.pairs(), heads, width}, maps.k.options());
  const auto make = [&](const Tensor& of, int64_t first) {
    multiply({of, pairs.indices}, weights.narrow(1, first, heads), pairs.type_ptr, {rows.flatten(1)});
  };
  make(maps.k, 0);
  const Tensor logits = call_sddmm(in.q.unflatten(1, {heads, width}), rows, {in.csr, {}});
  make(maps.v, heads);
  return call_softmax_sum(logits, rows, {in.csr, {}, in.max_degrees}).flatten(1);
}

// Returns whether the segments by source are the pairs in order. Then by_src shares the array of pair ids with by_dst.
bool are_in_order(const PairMapsCall& in) { return in.by_src[3].const_data_ptr() == in.by_dst[1].const_data_ptr(); }

// kOver: grad_keys and grad_values may be overwritten.
template <bool kOver>
std::vector<Tensor> pair_maps_backward(const Tensor& grad_keys, const Tensor& grad_values, const PairMapsCall& in,
                                       const PairMapChoice& needs) {
  const char* op = "edgeless::pair_maps_backward";
  check_pair_maps(op, in);
  check_pair_map_grads(op, in, grad_keys, grad_values);
  check_segments(op, "by_src", in.by_src, in.k_weight.size(0), in.k.device());
  const auto of_parts = [&] { return pair_maps_backward_of_parts(grad_keys, grad_values, in, needs); };
  const Segments pairs(in.by_src);
  pairs.check_rows(op, "by_src", in.k.size(0));
  if (!are_alike(in) || !pairs.of_one_edge() || pairs.by_row.numel() == 0) return of_parts();
  const auto rows = halves(in.k, in.v, in.k_weight.size(2));
  auto grads = halves(grad_keys, grad_values, in.k_weight.size(3));
  if (!rows || !grads) return of_parts();
  const OnDevice on_device(in.k.device());
  std::vector<Tensor> results(kPairMapInputs);
  PairWeights weights(in);
  const int64_t heads = in.k_weight.size(1), width = in.k.size(1), nodes = in.k.size(0);
  if (!are_in_order(in)) grads->ids = pairs.indices;
  if (needs[kKeyWeight] || needs[kValueWeight] || needs[kKeyScale]) {
    const Tensor sums = outer_sums({rows->rows, pairs.rows, rows->gap}, *grads, pairs.type_ptr, 2 * heads, true);
    PairWeightsArgs& args = weights.args;
    args.grad = sums.const_data_ptr<float>();
    const auto make = [&](PairMapInput input, const Tensor& like, TypedMatrices<void>& to) {
      if (!needs[input]) return;
      results[input] = at::empty(like.sizes(), like.options());
      to = PairWeights::written(results[input]);
    };
    make(kKeyWeight, weights.keys, args.of_keys), make(kValueWeight, weights.values, args.of_values);
    make(kKeyScale, weights.scale, args.of_scale);
    run_pair_weight_gradients(storage_of(in.k.scalar_type()), args, on_device.queue());
  }
  if (needs[kPairKeys] || needs[kPairValues]) {
    const bool in_place = kOver && !grads->ids.defined() && multiplies_in_place(in.k, in.k_weight);
    const Tensor apart = in_place ? Tensor() : at::empty({in.pairs(), 2 * width}, in.k.options());
    multiply(*grads, weights.together(in.k, on_device.queue()).transpose(2, 3), pairs.type_ptr,
             in_place ? *grads : Gathered{apart});
    const Tensor of_keys = in_place ? grad_keys : apart.narrow(1, 0, width);
    const Tensor of_values = in_place ? grad_values : apart.narrow(1, width, width);
    const std::vector<Tensor> csr{pairs.by_row.narrow(0, 0, nodes + 1), pairs.by_row.narrow(0, nodes + 1, in.pairs())};
    // Two calls: torch concatenates the gradients of column ranges faster if these are contiguous.
    if (needs[kPairKeys]) results[kPairKeys] = call_spmm(of_keys, {}, {}, {}, {csr, {}});
    if (needs[kPairValues]) results[kPairValues] = call_spmm(of_values, {}, {}, {}, {csr, {}});
  }
  for (size_t i = 0; i < kPairMapInputs; ++i) {
    if (!results[i].defined() || !needs[i]) results[i] = at::empty({0}, in.k.options());
  }
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CUDA, m) {
  m.impl("pair_maps", pair_maps_op<pair_maps>);
  m.impl("pair_dot_attention", pair_dot_attention_op<pair_dot_attention>);
  m.impl("pair_maps_backward", pair_maps_backward_op<pair_maps_backward<false>>);
  m.impl("pair_maps_backward_over", OneByOne<pair_maps_backward_op<pair_maps_backward<true>>>::call);
}

}  // namespace edgeless::cuda::relational
