// Typed GEMM on CUDA: checks, allocation, and sums over relations composed of it and of SpMM. Nothing here waits for
// the device.
//
// A sum over relations takes three steps: SpMM sums the edges of every segment, a typed GEMM multiplies the sums, and
// SpMM sums the segments of every row. Gradients of nodes are such a sum too, on the transposed graph and weights;
// gradients of weights are outer products over segments. If an operand is a node's unmodified row, the GEMM gathers it
// itself.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <climits>
#include <vector>

#include "../common/launch.h"
#include "../common/storage_of.h"
#include "../projection/inputs.h"
#include "../spmm/calls.h"
#include "cuda/kernels.h"
#include "fused_cuda.h"
#include "inputs.h"
#include "products_cuda.h"

namespace edgeless::cuda::relational {
namespace {

using at::Tensor;

EntryRows entry_rows(const Gathered& x) {
  return {x.rows.const_data_ptr(), x.rows.stride(0), x.ids.defined() ? x.ids.const_data_ptr() : nullptr, x.gap};
}

Entries entries_of(const Tensor& offsets, int64_t count, bool given) {
  Entries entries;
  entries.offsets = offsets.const_data_ptr(), entries.wide = offsets.scalar_type() == at::kLong;
  entries.given = given;
  entries.count = count, entries.types = static_cast<int>(offsets.size(0) - 1);
  return entries;
}

Tensor unit_rows(const Tensor& t) { return t.stride(1) == 1 || t.size(1) == 1 ? t : t.contiguous(); }

// width, rounded up to whole 16-byte vectors.
int64_t whole(int64_t width, const Tensor& t) {
  const int64_t vector = 16 / t.element_size();
  return (width + vector - 1) / vector * vector;
}

bool is_aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0; }

// Pads every block of rows [blocks * width] with zeros: [blocks * whole(width)].
Gathered with_whole_rows(const Gathered& x, int64_t blocks, int64_t width) {
  if (has_vectors(x.rows, width)) return x;
  const Tensor longer = at::zeros({x.rows.size(0), blocks, whole(width, x.rows)}, x.rows.options());
  longer.narrow(2, 0, width).copy_(x.rows.unflatten(1, {blocks, width}));
  return {longer.flatten(1), x.ids};
}

// multiply() of operands that the kernels read without a copy. Matrices are row-major or column-major.
void multiply_as_given(const Gathered& x, const Tensor& weight, const Tensor& offsets, const Gathered& to, bool given,
                       const Tensor& bias, bool tensor_cores) {
  ProductArgs args;
  args.entries = entries_of(offsets, x.count(), given);
  args.x = entry_rows(x), args.out = entry_rows(to);
  args.blocks = static_cast<int>(weight.size(1));
  args.depth = static_cast<int>(weight.size(2)), args.columns = static_cast<int>(weight.size(3));
  args.transposed = weight.stride(3) != 1;
  if (bias.defined()) args.bias = bias.const_data_ptr();
  args.weight = weight.const_data_ptr(), args.weight_row = weight.stride(args.transposed ? 3 : 2);
  args.weight_type = weight.stride(0), args.weight_block = weight.stride(1);
  // Entries per block: enough to amortize loading the weight to shared memory, if there is work for all SMs.
  const int64_t blocks = 6 * int64_t{device_attribute(jit::Attribute::multiprocessors, x.rows.get_device())};
  args.share = static_cast<int>(std::clamp<int64_t>(x.count() / blocks / 64 * 64, 128, 1024));
  const auto run = tensor_cores ? run_product : run_any_product;
  run(storage_of(weight.scalar_type()), args, OnDevice(x.rows.device()).queue());
}

// Returns whether the rows of row-major matrices, or the columns of column-major ones, are whole 16-byte vectors.
bool has_whole_matrices(const Tensor& w) {
  const int64_t vector = 16 / w.element_size();
  return w.stride(w.stride(3) == 1 ? 2 : 3) % vector == 0 && w.stride(0) % vector == 0 && w.stride(1) % vector == 0 &&
         is_aligned(w);
}

}  // namespace

bool are_whole(const Gathered& x, int64_t width) {
  const int64_t vector = 16 / x.rows.element_size();
  return on_tensor_cores(x.rows) && x.rows.stride(1) == 1 && has_vectors(x.rows, width) && x.gap % vector == 0;
}

bool multiplies_in_place(const Tensor& rows, const Tensor& weight) {
  return on_tensor_cores(rows) && weight.size(2) == weight.size(3) && weight.size(3) <= kMostColumnsInPlace;
}

// Operands that the tensor-core kernels cannot read are copied and padded with zeros.
void multiply(const Gathered& of, const Tensor& weight, const Tensor& offsets, const Gathered& to, bool given,
              const Tensor& bias) {
  const Gathered x{unit_rows(of.rows), of.ids, of.gap};
  const Tensor w = weight.stride(3) == 1 || weight.stride(2) == 1 ? weight : weight.contiguous();
  if (!on_tensor_cores(x.rows)) return multiply_as_given(x, w, offsets, to, given, bias, false);
  const int64_t blocks = w.size(1), depth = w.size(2), columns = w.size(3), padded = whole(columns, w);
  const bool stores = has_vectors(to.rows, columns), adds = bias.defined() && (padded != columns || !is_aligned(bias));
  const Tensor added = adds ? at::constant_pad_nd(bias.unflatten(1, {blocks, columns}), {0, padded - columns}) : bias;
  const int64_t padded_depth = whole(depth, w);
  const bool keeps = padded == columns && padded_depth == depth && has_whole_matrices(w);
  if (keeps && stores && has_vectors(x.rows, depth)) return multiply_as_given(x, w, offsets, to, given, added, true);
  const Tensor wider = keeps ? w : at::constant_pad_nd(w, {0, padded - columns, 0, padded_depth - depth}).contiguous();
  const Gathered out{stores ? to.rows : at::empty({to.rows.size(0), blocks * padded}, to.rows.options()), to.ids};
  multiply_as_given(with_whole_rows(x, blocks, depth), wider, offsets, out, given, added, true);
  if (stores) return;
  to.rows.unflatten(1, {blocks, columns}).copy_(out.rows.unflatten(1, {blocks, padded}).narrow(2, 0, columns));
}

Tensor outer_sums(const Gathered& of, const Gathered& with, const Tensor& offsets, int64_t blocks, bool wide,
                  bool given) {
  const Gathered x{unit_rows(of.rows), of.ids, of.gap}, y{unit_rows(with.rows), with.ids, with.gap};
  const int64_t types = offsets.size(0) - 1, in = x.rows.size(1) / blocks, out = y.rows.size(1) / blocks;
  const auto statistics = opmath_dtype(x.rows.scalar_type());
  const bool tensor_cores = on_tensor_cores(x.rows), fits = has_vectors(x.rows, in) && has_vectors(y.rows, out);
  if (tensor_cores && !fits && x.count() > 0 && in > 0 && out > 0) {
    const Gathered longer = with_whole_rows(x, blocks, in), wider = with_whole_rows(y, blocks, out);
    const Tensor padded = outer_sums(longer, wider, offsets, blocks, wide, given);
    return padded.narrow(2, 0, in).narrow(3, 0, out).contiguous();
  }
  Tensor sums = at::empty({types, blocks, in, out}, x.rows.options().dtype(wide ? statistics : x.rows.scalar_type()));
  if (sums.numel() == 0) return sums;
  OuterArgs args;
  args.entries = entries_of(offsets, x.count(), given);
  args.x = entry_rows(x), args.y = entry_rows(y);
  args.blocks = static_cast<int>(blocks), args.rows = static_cast<int>(in), args.columns = static_cast<int>(out);
  args.wide = wide;
  // Enough chunks for all SMs, but their partial sums take at most an eighth of the rows' memory, or 1 MiB.
  const int64_t count = x.count(), size = blocks * in * out;
  const int64_t side = tensor_cores ? 64 : 32, of_processor = tensor_cores ? 6 : 2;
  const int64_t tiles = (in + side - 1) / side * ((out + side - 1) / side);
  const int64_t processors = device_attribute(jit::Attribute::multiprocessors, x.rows.get_device());
  const int64_t most = std::max<int64_t>(count * blocks * (in + out) / (8 * size), (1 << 18) / size);
  const int64_t chunks =
      std::clamp<int64_t>(of_processor * processors / (tiles * blocks), 1, std::max<int64_t>(most, 1));
  args.chunk =
      static_cast<int>(std::min<int64_t>(INT_MAX / 64 * 32, std::max<int64_t>(64, (count / chunks + 31) / 32 * 32)));
  const Tensor partial = at::empty({num_tiles(count, types, args.chunk), size}, x.rows.options().dtype(statistics));
  args.partial = partial.mutable_data_ptr(), args.sums = sums.mutable_data_ptr();
  const auto run = tensor_cores ? run_outer : run_any_outer;
  run(storage_of(x.rows.scalar_type()), args, OnDevice(x.rows.device()).queue());
  return sums;
}

namespace {

Tensor ids_of(const OptTensor& rows) { return rows ? rows->contiguous() : Tensor(); }

Tensor typed_mm(const Tensor& x, const Tensor& weight, const Tensor& offsets, const OptTensor& rows) {
  check_typed_mm("edgeless::typed_mm", x, weight, offsets, rows);
  const OnDevice on_device(x.device());
  Tensor out = at::empty({x.size(0), weight.size(2)}, x.options());
  if (out.numel() == 0) return out;
  if (x.size(1) == 0 || weight.size(0) == 0) return out.zero_();
  const Tensor ids = ids_of(rows);
  multiply({x, ids}, weight.unsqueeze(1), offsets.contiguous(), {out, ids}, true);
  return out;
}

Tensor typed_linear(const Tensor& x, const Tensor& weight, const OptTensor& bias, const Tensor& offsets) {
  check_typed_linear("edgeless::typed_linear", x, weight, bias, offsets);
  const OnDevice on_device(x.device());
  Tensor out = at::empty({x.size(0), weight.size(1)}, x.options());
  if (out.numel() == 0) return out;
  if (weight.size(0) == 0) return out.zero_();
  // A product of depth 0 is 0. It runs with a depth of 1 and zeros, so that the bias is added.
  const Tensor rows = x.size(1) ? x : at::zeros({x.size(0), 1}, x.options());
  const Tensor w = x.size(1) ? weight : at::zeros({weight.size(0), weight.size(1), 1}, x.options());
  multiply({rows, Tensor()}, w.transpose(1, 2).unsqueeze(1), offsets.contiguous(), {out, Tensor()}, true,
           bias ? bias->contiguous() : Tensor());
  return out;
}

Tensor typed_outer(const Tensor& x, const Tensor& y, const Tensor& offsets, const OptTensor& rows) {
  check_typed_outer("edgeless::typed_outer", x, y, offsets, rows);
  const OnDevice on_device(x.device());
  const Tensor ids = ids_of(rows);
  return outer_sums({x, ids}, {y, ids}, offsets.contiguous(), 1, false, true).squeeze(1);
}

// Segments, with the steps of a sum over relations.
struct WalkedSegments : Segments {
  using Segments::Segments;

  // A CSR whose rows are the segments.
  std::vector<Tensor> edges(bool with_ids) const {
    std::vector<Tensor> csr{of_one_edge() ? at::arange(rows.size(0) + 1, rows.options()) : ptr, indices};
    if (with_ids) csr.push_back(edge_ids);
    return csr;
  }

  // The GEMM's operand: for every segment the sum of its edges' rows.
  Gathered sums(const Tensor& x, const OptTensor& edge_weight) const {
    if (of_one_edge() && !edge_weight && !weights) return {x, indices};
    if (weighs_segments()) return {call_spmm(x, {}, {}, weights->squeeze(1), {edges(false), {}}), Tensor()};
    OptTensor weight;
    if (edge_weight) weight = edge_weight->unsqueeze(1);
    if (weights) weight = weights->unsqueeze(1);
    return {call_spmm(x, weight, {}, {}, {edges(edge_weight.has_value() && !weights), {}}), Tensor()};
  }

  // The products of every segment with the matrix of its type.
  Tensor products(const Gathered& of, const Tensor& weight) const {
    Tensor out = at::empty({rows.size(0), weight.size(1) * weight.size(3)}, of.rows.options());
    multiply(of, weight, type_ptr, {out, Tensor()});
    return out;
  }

  // Sums the products of every row's segments.
  Tensor summed(const Tensor& products, int64_t num_rows, at::ScalarType dtype) const {
    if (by_row.numel() == 0) return products.to(dtype);
    const std::vector<Tensor> csr{by_row.narrow(0, 0, num_rows + 1), by_row.narrow(0, num_rows + 1, rows.size(0))};
    const auto kind = dtype == products.scalar_type() ? dtype : opmath_dtype(products.scalar_type());
    return call_spmm(products, {}, {}, {}, {csr, {}}, kind).to(dtype);
  }
};

Tensor relational_sum(const Tensor& x, const Tensor& weight, const OptTensor& edge_weight, at::TensorList by_dst,
                      at::TensorList /*by_src*/, int64_t num_dst, Optional<at::ScalarType> out_dtype) {
  const char* op = "edgeless::relational_sum";
  check_relational_sum(op, x, weight, edge_weight, by_dst);
  const WalkedSegments segments(by_dst);
  segments.check_rows(op, "by_dst", num_dst);
  const OnDevice on_device(x.device());
  const auto dtype = out_dtype.value_or(x.scalar_type());
  const WeightSizes sizes(op, weight);
  if (sizes.in == 0 || sizes.out == 0 || segments.rows.size(0) == 0) {
    return at::zeros({num_dst, sizes.out}, x.options().dtype(dtype));
  }
  if (fuses(x, weight, segments)) return fused_sum(x, weight, edge_weight, segments, num_dst, dtype, {});
  const Tensor products = segments.products(segments.sums(x, edge_weight), matrices(weight, x.scalar_type()));
  return segments.summed(products, num_dst, dtype);
}

// The gradients of x and weight loop over the segments by source, that of edge_weight over those by destination.
std::vector<Tensor> relational_sum_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                            const OptTensor& edge_weight, at::TensorList by_dst, at::TensorList by_src,
                                            c10::List<bool> needs) {
  const char* op = "edgeless::relational_sum_backward";
  check_relational_sum(op, x, weight, edge_weight, by_dst);
  const WeightSizes sizes(op, weight);
  check_shape(op, "grad", grad, {grad.size(0), sizes.out});
  Segments(by_dst).check_rows(op, "by_dst", grad.size(0));
  TORCH_CHECK_VALUE(needs.size() == 3, op, ": needs must have 3 entries, got ", needs.size());
  if (needs[0] || needs[1]) {
    check_segments(op, "by_src", by_src, sizes.types, x.device());
    Segments(by_src).check_rows(op, "by_src", x.size(0));
  }
  const OnDevice on_device(x.device());
  std::vector<Tensor> results;
  for (const Tensor& t : {x, weight, edge_weight.value_or(x)}) results.push_back(at::empty({0}, t.options()));
  if (sizes.in == 0 || sizes.out == 0 || by_dst[1].size(0) == 0) {
    if (needs[0]) results[0] = at::zeros_like(x);
    if (needs[1]) results[1] = at::zeros_like(weight);
    if (needs[2]) results[2] = at::zeros_like(*edge_weight);
    return results;
  }
  const Tensor transposed = matrices(weight, x.scalar_type()).transpose(2, 3);
  Tensor rows = grad.to(x.scalar_type());
  const bool fused = (needs[0] || needs[1]) && fuses(x, weight, Segments(by_src));
  if (fused) {
    rows = rows.contiguous();
    const FusedGradients found = fused_gradients(rows, x, weight, edge_weight, Segments(by_src), {needs[0], needs[1]});
    if (needs[0]) results[0] = found.rows;
    if (needs[1]) results[1] = found.weight;
  } else if (needs[0] || needs[1]) {
    const WalkedSegments segments(by_src);
    const Gathered sums = segments.sums(rows, edge_weight);
    if (needs[0]) results[0] = segments.summed(segments.products(sums, transposed), x.size(0), x.scalar_type());
    if (needs[1]) {
      const bool wide = weight.scalar_type() != x.scalar_type();
      results[1] = outer_sums({x, segments.rows}, sums, segments.type_ptr, sizes.blocks, wide).view(weight.sizes());
    }
  }
  if (needs[2]) {
    const WalkedSegments segments(by_dst);
    const std::vector<Tensor> csr = segments.edges(true);
    results[2] = call_sddmm(segments.products({rows, segments.rows}, transposed), x, {csr, {}}).squeeze(1);
  }
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CUDA, m) {
  m.impl("typed_mm", typed_mm);
  m.impl("typed_outer", typed_outer);
  m.impl("typed_linear", typed_linear);
  m.impl("relational_sum", relational_sum);
  m.impl("relational_sum_backward", relational_sum_backward);
}

}  // namespace edgeless::cuda::relational
