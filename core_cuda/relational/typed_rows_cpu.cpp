// Ops on rows by type beside products, on the CPU: sums, and a blend of two rows. A thread processes whole runs of
// entries of one type. The sums of runs are added in order, whatever the number of threads.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <vector>

#include "../common/cpu/room.h"
#include "../common/cpu/tensors.h"
#include "../projection/inputs.h"
#include "inputs.h"
#include "offsets_cpu.h"

namespace edgeless::cpu {
namespace {

using at::Tensor;

constexpr int64_t kRun = 1024;  // entries per run

// The row of every entry; entry i is row i if there are no ids.
class Ids {
 public:
  explicit Ids(const OptTensor& rows) {
    if (rows) ids_ = rows->to(at::kLong).contiguous();
    if (ids_.defined()) data_ = ids_.const_data_ptr<int64_t>();
  }
  int64_t operator[](int64_t entry) const { return data_ ? data_[entry] : entry; }

 private:
  Tensor ids_;
  const int64_t* data_ = nullptr;
};

template <class F>
void for_each_run(const std::vector<TypedRun>& runs, F&& f) {
  at::parallel_for(0, static_cast<int64_t>(runs.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(runs[i], i);
  });
}

// Sums by type, [types, width], of what add(run, sums) adds for each run; in double, since types have many rows.
template <class F>
Tensor sums_by_type(const std::vector<int64_t>& offsets, int64_t width, F&& add) {
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const std::vector<TypedRun> runs = runs_of(offsets, kRun);
  const auto types = static_cast<int64_t>(offsets.size()) - 1, count = static_cast<int64_t>(runs.size());
  const Tensor partial = at::zeros({count, width}, options), sums = at::zeros({types, width}, options);
  double *from = partial.mutable_data_ptr<double>(), *to = sums.mutable_data_ptr<double>();
  for_each_run(runs, [&](const TypedRun& run, int64_t i) { add(run, from + i * width); });
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t c = 0; c < width; ++c) to[runs[i].type * width + c] += from[i * width + c];
  }
  return sums;
}

Tensor typed_sums(const Tensor& given, const Tensor& offsets) {
  const char* op = "edgeless::typed_sums";
  const BelowAutograd below;
  check_typed_sums(op, given, offsets);
  const Tensor x = given.contiguous();
  const int64_t width = x.size(1);
  const std::vector<int64_t> begins = checked_offsets(op, offsets, x.size(0));
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, x.scalar_type(), "typed_sums", [&] {
    using S = scalar_t;
    const S* rows = x.const_data_ptr<S>();
    const Tensor sums = sums_by_type(begins, width, [&](const TypedRun& run, double* to) {
      for (int64_t i = run.begin; i < run.end; ++i) {
        for (int64_t c = 0; c < width; ++c) to[c] += static_cast<double>(rows[i * width + c]);
      }
    });
    return sums.to(x.scalar_type());
  });
}

Tensor typed_blend(const Tensor& given_y, const Tensor& given_x, const Tensor& given_alpha, const Tensor& offsets,
                   const OptTensor& rows) {
  const char* op = "edgeless::typed_blend";
  const BelowAutograd below;
  check_typed_blend(op, given_y, given_x, given_alpha, offsets, rows);
  const Tensor y = given_y.contiguous(), x = given_x.contiguous(), alpha = given_alpha.contiguous();
  const int64_t width = y.size(1);
  const std::vector<TypedRun> runs = runs_of(checked_offsets(op, offsets, y.size(0)), kRun);
  const Ids ids(rows);
  Tensor out = empty_rows({y.size(0), width}, y.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, y.scalar_type(), "typed_blend", [&] {
    using S = scalar_t;
    using A = at::opmath_type<S>;
    const S *from_y = y.const_data_ptr<S>(), *from_x = x.const_data_ptr<S>(), *alphas = alpha.const_data_ptr<S>();
    S* to = out.mutable_data_ptr<S>();
    for_each_run(runs, [&](const TypedRun& run, int64_t) {
      const A a = static_cast<A>(alphas[run.type]), b = A(1) - a;
      for (int64_t i = run.begin; i < run.end; ++i) {
        const int64_t at = ids[i] * width;
        for (int64_t c = at; c < at + width; ++c) {
          to[c] = static_cast<S>(a * static_cast<A>(from_y[c]) + b * static_cast<A>(from_x[c]));
        }
      }
    });
  });
  return out;
}

std::vector<Tensor> typed_blend_backward(const Tensor& given_grad, const Tensor& given_y, const Tensor& given_x,
                                         const Tensor& given_alpha, const Tensor& offsets, const OptTensor& rows,
                                         c10::List<bool> needs) {
  const char* op = "edgeless::typed_blend_backward";
  const BelowAutograd below;
  check_typed_blend(op, given_y, given_x, given_alpha, offsets, rows);
  check_blend_grad(op, given_grad, given_y, needs);
  const Tensor grad = given_grad.contiguous(), y = given_y.contiguous(), x = given_x.contiguous();
  const Tensor alpha = given_alpha.contiguous();
  const int64_t width = y.size(1);
  const std::vector<int64_t> begins = checked_offsets(op, offsets, y.size(0));
  const Ids ids(rows);
  std::vector<Tensor> results;
  for (int i = 0; i < 2; ++i)
    results.push_back(needs[i] ? empty_rows(y.sizes(), y.options()) : at::empty({0}, y.options()));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, y.scalar_type(), "typed_blend_backward", [&] {
    using S = scalar_t;
    using A = at::opmath_type<S>;
    const S *g = grad.const_data_ptr<S>(), *from_y = y.const_data_ptr<S>(), *from_x = x.const_data_ptr<S>();
    const S* alphas = alpha.const_data_ptr<S>();
    S* to_y = needs[0] ? results[0].mutable_data_ptr<S>() : nullptr;
    S* to_x = needs[1] ? results[1].mutable_data_ptr<S>() : nullptr;
    const bool sums = needs[2];
    const Tensor products = sums_by_type(begins, sums ? width : 0, [&](const TypedRun& run, double* to) {
      const A a = static_cast<A>(alphas[run.type]), b = A(1) - a;
      for (int64_t i = run.begin; i < run.end; ++i) {
        const int64_t at = ids[i] * width;
        if (to_y) {
          for (int64_t c = at; c < at + width; ++c) to_y[c] = static_cast<S>(a * static_cast<A>(g[c]));
        }
        if (to_x) {
          for (int64_t c = at; c < at + width; ++c) to_x[c] = static_cast<S>(b * static_cast<A>(g[c]));
        }
        for (int64_t c = 0; sums && c < width; ++c) {
          to[c] += static_cast<A>(g[at + c]) * (static_cast<A>(from_y[at + c]) - static_cast<A>(from_x[at + c]));
        }
      }
    });
    results.push_back(sums ? products.sum(1).to(y.scalar_type()) : at::empty({0}, y.options()));
  });
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CPU, m) {
  m.impl("typed_sums", WithRoom<typed_sums>::call);
  m.impl("typed_blend", WithRoom<typed_blend>::call);
  m.impl("typed_blend_backward", WithRoom<typed_blend_backward>::call);
}

}  // namespace edgeless::cpu
