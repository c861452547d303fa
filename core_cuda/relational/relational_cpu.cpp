// Typed GEMM on the CPU: checks, allocation, packing of weights, and distribution of the work to threads.
//
// A sum over relations is computed by one of two loops. Its results are per node: a part owns some rows of the result
// and adds to them the products of their segments, type by type, so it needs neither one row per segment nor a second
// pass over such rows. Gradients of weights are per type: a run of segments of one type accumulates in the caches. Both
// loops compute the sums over the edges of their segments, which is cheaper than saving them. No sum depends on the
// number of threads.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <deque>
#include <vector>

#include "../common/cpu/room.h"
#include "../common/cpu/tensors.h"
#include "../projection/inputs.h"
#include "cpu/kernels.h"
#include "inputs.h"
#include "offsets_cpu.h"

namespace edgeless::cpu {
namespace {

using at::Tensor;

// Largest weight, in values, that these kernels multiply: torch's GEMM blocks larger ones better.
constexpr int64_t kMostOwn = int64_t(1) << 19;
// Entries per run: enough to amortize reading the type's weight, few enough for many threads.
constexpr int64_t kProductRun = 16 * kTypedRows, kOuterRun = 32 * kTypedRows;

// The kernels' arguments and the tensors that they point into.
template <class A>
class TypedCall {
 public:
  TypedArgs<A> args{};
  const TypedKernels<A> kernels = choose_typed_kernels<A>();

  void set_rows(const Tensor& rows) {
    const Tensor& kept = keep(rows.contiguous());
    args.rows = kept.const_data_ptr();
    args.wide = kept.scalar_type() == at::kLong;
  }

  Rows rows(const Tensor& t) { return rows_of(keep(packed_rows(t))); }

  // weight [types, (blocks,) K, M], or its transpose if `transposed`. A weight that the kernels cannot read in place is
  // packed, for the types that have entries.
  void set_weight(const Tensor& weight, bool transposed, const std::vector<int64_t>& offsets) {
    Tensor w = weight.dim() == 3 ? weight.unsqueeze(1) : weight;
    if (transposed) w = w.transpose(2, 3);
    args.types = w.size(0), args.blocks = w.size(1);
    const int64_t k = w.size(2), n = w.size(3);
    args.in = args.blocks * k, args.out = args.blocks * n;
    constexpr auto dtype = std::is_same_v<A, double> ? at::kDouble : at::kFloat;
    if (w.scalar_type() != dtype) w = w.to(dtype);
    if (w.stride(3) == 1 && n % kernels.vector == 0) {
      const Tensor& kept = keep(w);
      args.weight = kept.const_data_ptr<A>();
      args.weight_type = w.stride(0), args.weight_block = w.stride(1), args.weight_step = w.stride(2);
      return;
    }
    const int64_t size = kernels.packed_size(k, n);
    A* to = keep(at::empty({args.types, args.blocks, size}, w.options())).template mutable_data_ptr<A>();
    const A* from = w.const_data_ptr<A>();
    at::parallel_for(0, args.types, std::max<int64_t>(1, 65536 / (args.blocks * size + 1)),
                     [&](int64_t t, int64_t end) {
                       for (; t < end; ++t) {
                         if (offsets[t] == offsets[t + 1]) continue;
                         for (int64_t b = 0; b < args.blocks; ++b) {
                           kernels.pack(from + t * w.stride(0) + b * w.stride(1), w.stride(2), w.stride(3), k, n,
                                        to + (t * args.blocks + b) * size);
                         }
                       }
                     });
    args.weight = to, args.weight_type = args.blocks * size, args.weight_block = size, args.weight_step = 0;
  }

  // [types, out]
  void set_bias(const OptTensor& bias) {
    constexpr auto dtype = std::is_same_v<A, double> ? at::kDouble : at::kFloat;
    if (bias) args.bias = keep(bias->to(dtype).contiguous()).template const_data_ptr<A>();
  }

  // The segments of one direction, whose edges gather rows of x.
  void set_segments(at::TensorList segments, const OptTensor& edge_weight, const Tensor& x) {
    set_rows(segments[1]);
    SpmmArgs<A>& sum = args.sum;
    sum.graph.indptr = keep(segments[2]).const_data_ptr();
    sum.graph.indices = keep(segments[3]).const_data_ptr();
    sum.graph.edge_ids = keep(segments[4]).const_data_ptr();
    sum.graph.wide = segments[2].scalar_type() == at::kLong;
    sum.graph.num_rows = segments[1].size(0);
    sum.graph.num_edges = segments[3].size(0);
    sum.heads = 1, sum.width = x.size(1), sum.x = rows(x);
    if (edge_weight) {
      const Tensor& kept = keep(*edge_weight);
      sum.weight = kept.template const_data_ptr<A>();
      sum.weight_edge_stride = kept.stride(0);
    }
    args.parts = keep(segments[5]).template const_data_ptr<int64_t>();
  }

  // Calls f(run, index of the run, scratch) for all runs.
  template <class F>
  void each(const std::vector<TypedRun>& runs, F&& f) {
    for_each_part<A>(static_cast<int64_t>(runs.size()), kernels.scratch_size(args),
                     [&](int64_t i, A* scratch) { f(runs[i], i, scratch); });
  }

  // Sums of outer products per type, [types, blocks, in / blocks, out / blocks]. The runs of a type are added in order.
  Tensor outer(const std::vector<int64_t>& offsets, const at::TensorOptions& options) {
    const auto types = static_cast<int64_t>(offsets.size()) - 1;
    const int64_t longest = std::max<int64_t>(kOuterRun, (offsets.back() + 127) / 128);
    const std::vector<TypedRun> runs = runs_of(offsets, longest);
    Tensor sums = at::empty({types, args.blocks, args.in / args.blocks, args.out / args.blocks}, options);
    const int64_t size = args.in * args.out / args.blocks;
    int64_t more = 0;  // runs that are not their type's first
    std::vector<int64_t> place;
    for (const TypedRun& run : runs) place.push_back(run.begin == offsets[run.type] ? -1 : more++);
    const Tensor others = at::empty({more, size}, options);
    A *to = sums.template mutable_data_ptr<A>(), *beside = others.template mutable_data_ptr<A>();
    each(runs, [&](const TypedRun& run, int64_t i, A* scratch) {
      kernels.outer(args, run, place[i] < 0 ? to + run.type * size : beside + place[i] * size, scratch);
    });
    for (size_t i = 0; i < runs.size(); ++i) {
      if (place[i] >= 0) sums[runs[i].type].view({size}).add_(others[place[i]]);
    }
    for (int64_t t = 0; t < types; ++t) {
      if (offsets[t] == offsets[t + 1]) sums[t].zero_();
    }
    return sums;
  }

  const Tensor& keep(Tensor t) {
    kept_.push_back(std::move(t));
    return kept_.back();
  }

 private:
  std::deque<Tensor> kept_;
};

// Calls f(type, begin, count, rows) for every type that has entries, for products by torch's GEMM.
template <class F>
void each_type(const std::vector<int64_t>& offsets, const OptTensor& rows, F&& f) {
  for (size_t t = 0; t + 1 < offsets.size(); ++t) {
    const int64_t begin = offsets[t], n = offsets[t + 1] - begin;
    if (n > 0) f(static_cast<int64_t>(t), begin, n, rows ? rows->narrow(0, begin, n) : Tensor());
  }
}

// weight [types, K, M], bias [types, M]
Tensor product(const char* op, const Tensor& x, const Tensor& weight, const OptTensor& bias, const Tensor& offsets,
               const OptTensor& rows) {
  const std::vector<int64_t> begins = checked_offsets(op, offsets, x.size(0));
  Tensor out = empty_rows({x.size(0), weight.size(2)}, x.options());
  if (out.numel() == 0) return out;
  if (x.size(1) * weight.size(2) > kMostOwn || x.size(1) == 0) {
    each_type(begins, rows, [&](int64_t t, int64_t begin, int64_t n, const Tensor& of) {
      if (of.defined()) {
        out.index_copy_(0, of.to(at::kLong), at::mm(x.index_select(0, of), weight[t]));
        return;
      }
      const Tensor part = x.narrow(0, begin, n);
      out.narrow(0, begin, n).copy_(bias ? at::addmm((*bias)[t], part, weight[t]) : at::mm(part, weight[t]));
    });
    return out;
  }
  with_arithmetic(x.scalar_type(), [&](auto zero) {
    TypedCall<decltype(zero)> call;
    call.set_weight(weight, false, begins);
    call.set_bias(bias);
    if (rows) call.set_rows(*rows);
    call.args.x = call.rows(x);
    call.args.result = out_rows(out);
    call.each(runs_of(begins, kProductRun),
              [&](const TypedRun& run, int64_t, auto* scratch) { call.kernels.product(call.args, run, scratch); });
    return 0;
  });
  return out;
}

Tensor typed_mm(const Tensor& x, const Tensor& weight, const Tensor& offsets, const OptTensor& rows) {
  const BelowAutograd below;
  check_typed_mm("edgeless::typed_mm", x, weight, offsets, rows);
  return product("edgeless::typed_mm", x, weight, {}, offsets, rows);
}

Tensor typed_linear(const Tensor& x, const Tensor& weight, const OptTensor& bias, const Tensor& offsets) {
  const BelowAutograd below;
  check_typed_linear("edgeless::typed_linear", x, weight, bias, offsets);
  return product("edgeless::typed_linear", x, weight.transpose(1, 2), bias, offsets, {});
}

Tensor typed_outer(const Tensor& x, const Tensor& y, const Tensor& offsets, const OptTensor& rows) {
  const char* op = "edgeless::typed_outer";
  const BelowAutograd below;
  check_typed_outer(op, x, y, offsets, rows);
  const std::vector<int64_t> begins = checked_offsets(op, offsets, x.size(0));
  const int64_t types = offsets.size(0) - 1, in = x.size(1), out = y.size(1);
  if (types * in * out == 0) return at::empty({types, in, out}, x.options());
  if (in * out > kMostOwn) {
    Tensor sums = at::zeros({types, in, out}, x.options());
    each_type(begins, rows, [&](int64_t t, int64_t begin, int64_t n, const Tensor& of) {
      const auto part = [&](const Tensor& all) {
        return of.defined() ? all.index_select(0, of) : all.narrow(0, begin, n);
      };
      sums[t].copy_(at::mm(part(x).t(), part(y)));
    });
    return sums;
  }
  return with_arithmetic(x.scalar_type(), [&](auto zero) {
    TypedCall<decltype(zero)> call;
    if (rows) call.set_rows(*rows);
    call.args.x = call.rows(x), call.args.other = call.rows(y);
    call.args.blocks = 1, call.args.in = in, call.args.out = out;
    const Tensor sums = call.outer(begins, x.options().dtype(opmath_dtype(x.scalar_type())));
    return sums.squeeze(1).to(x.scalar_type());
  });
}

// Merges rows whose segments are in several parts: adds the parts' partial sums in order.
template <class A>
void merge_cut_rows(const TypedArgs<A>& args, int64_t parts) {
  const int64_t step = 2 + args.types, width = args.out;
  const auto row = [&](int64_t part) { return args.parts[part * step]; };
  const auto cut = [&](int64_t part) { return args.parts[part * step + 1] != 0; };
  for (int64_t part = 1; part < parts; ++part) {
    if (!cut(part)) continue;
    A* to = args.totals + row(part) * width;
    if (!cut(part - 1) || row(part - 1) != row(part)) {
      const A* first = args.carry + (part * 2 - 1) * width;
      std::copy_n(first, width, to);
    }
    const A* more = args.carry + part * 2 * width;
    for (int64_t i = 0; i < width; ++i) to[i] += more[i];
  }
}

// Sum over types of (sum over edges) weight, or its transpose if `transposed`. segments: the segments by rows of the
// result.
template <class A>
Tensor summed_products(const Tensor& x, const Tensor& weight, bool transposed, const OptTensor& edge_weight,
                       at::TensorList segments, int64_t num_rows) {
  TypedCall<A> call;
  call.set_weight(weight, transposed, host_offsets(segments[0]));
  const auto dtype = opmath_dtype(x.scalar_type());
  const int64_t parts = segments[5].size(0) - 1;
  Tensor totals = empty_rows({num_rows, call.args.out}, x.options().dtype(dtype));
  if (totals.numel() == 0) return totals;
  if (call.args.in == 0 || segments[3].size(0) == 0) return totals.zero_();
  const Tensor carry = at::zeros({parts, 2, call.args.out}, x.options().dtype(dtype));
  call.set_segments(segments, edge_weight, x);
  call.args.totals = totals.template mutable_data_ptr<A>();
  call.args.carry = carry.template mutable_data_ptr<A>();
  for_each_part<A>(parts, call.kernels.scratch_size(call.args),
                   [&](int64_t part, A* scratch) { call.kernels.sum_products(call.args, part, scratch); });
  merge_cut_rows(call.args, parts);
  return totals;
}

void check_parts(const char* op, const char* name, at::TensorList segments, int64_t rows) {
  const Tensor& parts = segments[5];
  const int64_t last = parts.size(0) - 1;
  TORCH_CHECK_VALUE(last > 0 && parts[last][0].item<int64_t>() == rows, op, ": ", name, " must be of ", rows,
                    " rows, got ", last > 0 ? parts[last][0].item<int64_t>() : 0);
}

Tensor relational_sum(const Tensor& x, const Tensor& weight, const OptTensor& edge_weight, at::TensorList by_dst,
                      at::TensorList /*by_src*/, int64_t num_dst, Optional<at::ScalarType> out_dtype) {
  const char* op = "edgeless::relational_sum";
  const BelowAutograd below;
  check_relational_sum(op, x, weight, edge_weight, by_dst);
  check_parts(op, "by_dst", by_dst, num_dst);
  return with_arithmetic(x.scalar_type(), [&](auto zero) {
    const Tensor totals = summed_products<decltype(zero)>(x, weight, false, edge_weight, by_dst, num_dst);
    return totals.to(out_dtype.value_or(x.scalar_type()));
  });
}

// The gradients of x and weight loop over the segments by source, that of edge_weight over those by destination.
std::vector<Tensor> relational_sum_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                            const OptTensor& edge_weight, at::TensorList by_dst, at::TensorList by_src,
                                            c10::List<bool> needs) {
  const char* op = "edgeless::relational_sum_backward";
  const BelowAutograd below;
  check_relational_sum(op, x, weight, edge_weight, by_dst);
  const WeightSizes sizes(op, weight);
  check_dim(op, "grad", grad, 2, "[Nd, M]");
  check_shape(op, "grad", grad, {grad.size(0), sizes.out});
  check_parts(op, "by_dst", by_dst, grad.size(0));
  TORCH_CHECK_VALUE(needs.size() == 3, op, ": needs must have 3 entries, got ", needs.size());
  if (needs[0] || needs[1]) {
    check_segments(op, "by_src", by_src, sizes.types, x.device());
    check_parts(op, "by_src", by_src, x.size(0));
  }
  const auto statistics = x.options().dtype(opmath_dtype(x.scalar_type()));
  std::vector<Tensor> results;
  for (const Tensor& t : {x, weight, edge_weight.value_or(x)}) results.push_back(at::empty({0}, t.options()));
  with_arithmetic(x.scalar_type(), [&](auto zero) {
    using A = decltype(zero);
    if (needs[0]) {
      results[0] = summed_products<A>(grad, weight, true, edge_weight, by_src, x.size(0)).to(x.scalar_type());
    }
    if (needs[1]) {
      TypedCall<A> call;
      call.args.blocks = sizes.blocks, call.args.in = sizes.in, call.args.out = sizes.out;
      call.args.sums = true, call.args.x = call.rows(x);
      call.set_segments(by_src, edge_weight, grad);
      results[1] = weight.numel() == 0 ? at::empty_like(weight)
                                       : call.outer(host_offsets(by_src[0]), statistics).to(weight.scalar_type());
      results[1] = results[1].view(weight.sizes());
    }
    if (needs[2]) {
      const std::vector<int64_t> offsets = host_offsets(by_dst[0]);
      results[2] = at::zeros({edge_weight->size(0)}, edge_weight->options());
      if (weight.numel() == 0) return 0;
      TypedCall<A> call;
      call.set_weight(weight, true, offsets);
      call.set_segments(by_dst, {}, x);
      call.args.x = call.rows(grad);
      call.args.products = results[2].template mutable_data_ptr<A>();
      call.each(runs_of(offsets, kProductRun),
                [&](const TypedRun& run, int64_t, A* scratch) { call.kernels.sampled(call.args, run, scratch); });
    }
    return 0;
  });
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CPU, m) {
  m.impl("typed_mm", WithRoom<typed_mm>::call);
  m.impl("typed_outer", WithRoom<typed_outer>::call);
  m.impl("typed_linear", WithRoom<typed_linear>::call);
  m.impl("relational_sum", WithRoom<relational_sum>::call);
  m.impl("relational_sum_backward", WithRoom<relational_sum_backward>::call);
}

}  // namespace edgeless::cpu
