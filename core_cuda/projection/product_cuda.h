// The three products of a linear map: by edgeless' kernels (cuda/product.cuh, cuda/half_gemm.cuh) if takes() returns
// true, else by cuBLAS.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <climits>
#include <vector>

#include "../common/launch.h"
#include "../common/optional.h"
#include "../common/storage_of.h"
#include "../common/thresholds.h"
#include "cuda/expression.h"
#include "cuda/kernels.h"

namespace edgeless::cuda::projection {

inline bool is_half(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

// Returns whether rows are contiguous, 16-byte aligned and whole vectors of 16 bytes.
inline bool fits(const at::Tensor& t) {
  const auto dtype = t.scalar_type();
  const int64_t vector = 16 / t.element_size();
  return (dtype == at::kFloat || is_half(dtype)) && t.size(1) % vector == 0 && t.stride(1) == 1 &&
         t.stride(0) % vector == 0 && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

// The operand b of a product a b^T with contiguous rows, as the kernels read it. A weight that is stored transposed, as
// for torch.matmul(x, w) and in DGL's GraphConv, is read transposed instead of copied.
struct RightSide {
  at::Tensor matrix;
  bool transposed;  // rows are indexed by the depth

  RightSide(const at::Tensor& b, bool depth_is_rows) : matrix(b), transposed(depth_is_rows) {
    if (b.stride(1) != 1 && b.stride(0) == 1) matrix = b.t(), transposed = !transposed;
  }
};

inline int capability_of(const at::Tensor& t) {
  return 10 * device_attribute(jit::Attribute::capability_major, t.get_device());
}

// Returns whether edgeless' kernels support a product [rows, columns] and can fill their tiles.
inline bool suits(const at::Tensor& a, const at::Tensor& b, int64_t rows, int64_t columns, int64_t depth) {
  return fits(a) && fits(b) && suits({storage_of(a.scalar_type()), rows, columns, depth}, capability_of(a));
}

// Returns whether edgeless' kernels compute a product [rows, columns] (cuda/expression.h). divided: split-K, so that
// few tiles occupy all SMs.
inline bool takes(const at::Tensor& a, const at::Tensor& b, int64_t rows, int64_t columns, int64_t depth,
                  bool divided = false) {
  if (!fits(a) || !fits(b)) return false;
  const bool allows_tf32 = a.scalar_type() == at::kFloat && at::globalContext().allowTF32CuBLAS();
  return takes({storage_of(a.scalar_type()), rows, columns, depth, divided}, a.size(0), capability_of(a), allows_tf32);
}

inline void add_product(ProductArgs& args, const at::Tensor& b, const at::Tensor& c) {
  args.of[args.products++] = {b.const_data_ptr(), c.data_ptr(), b.stride(0), c.stride(0)};
}

inline ProductArgs product_args(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, int64_t depth) {
  ProductArgs args;
  args.a = a.const_data_ptr(), args.a_row = a.stride(0);
  add_product(args, b, c);
  args.rows = c.size(0), args.columns = static_cast<int>(c.size(1)), args.depth = args.share = depth;
  args.wide = c.scalar_type() == at::kFloat;
  return args;
}

inline void run(at::ScalarType dtype, bool transposed_a, bool transposed_b, const ProductArgs& args,
                const OnDevice& on_device) {
  if (is_half(dtype)) {
    run_half_gemm(storage_of(dtype), transposed_a, transposed_b, args, on_device.queue());
  } else {
    run_product(transposed_a, transposed_b, args, on_device.queue());
  }
}

// The sum of all xs[k] weights[k]^T, plus the bias.
inline at::Tensor map_rows(at::TensorList xs, at::TensorList weights, const Optional<at::Tensor>& bias) {
  const at::Tensor& x = xs[0];
  const at::Tensor& weight = weights[0];
  const int64_t columns = weight.size(0);
  const auto taken = [&](size_t k, const RightSide& b) {
    return takes(xs[k], b.matrix, x.size(0), columns, xs[k].size(1));
  };
  const OnDevice on_device(x.device());
  at::Tensor out;
  size_t done = 1;
  const RightSide first(weight, false);
  if (taken(0, first)) {
    out = at::empty({x.size(0), columns}, x.options());
    ProductArgs args = product_args(x, first.matrix, out, x.size(1));
    const at::Tensor row = bias ? bias->contiguous() : at::Tensor();
    if (bias) args.bias = row.const_data_ptr();
    if (xs.size() > 1 && !first.transposed) {
      const RightSide second(weights[1], false);
      if (!second.transposed && taken(1, second)) {
        args.more = {xs[1].const_data_ptr(), weights[1].const_data_ptr(), xs[1].stride(0), weights[1].stride(0),
                     xs[1].size(1)};
        done = 2;
      }
    }
    run(x.scalar_type(), false, first.transposed, args, on_device);
  } else {
    out = bias ? at::addmm(*bias, x, weight.t()) : at::mm(x, weight.t());
  }
  for (size_t k = done; k < xs.size(); ++k) {
    const RightSide b(weights[k], false);
    if (fits(out) && taken(k, b)) {
      ProductArgs args = product_args(xs[k], b.matrix, out, xs[k].size(1));
      args.add = true;
      run(x.scalar_type(), false, b.transposed, args, on_device);
    } else {
      out.addmm_(xs[k], weights[k].t());
    }
  }
  return out;
}

// torch's product of 16-bit matrices with a float32 result; nothing in torch versions without it.
using FloatProduct = c10::TypedOperatorHandle<at::Tensor(const at::Tensor&, const at::Tensor&, at::ScalarType)>;
inline const Optional<FloatProduct>& float_product() {
  static const Optional<FloatProduct> op = []() -> Optional<FloatProduct> {
    const auto found = c10::Dispatcher::singleton().findSchema({"aten::mm", "dtype"});
    if (!found) return {};
    return found->typed<at::Tensor(const at::Tensor&, const at::Tensor&, at::ScalarType)>();
  }();
  return op;
}

// Returns whether products of rows such as x can have float32 results.
inline bool writes_floats(const at::Tensor& x) { return is_half(x.scalar_type()) && float_product(); }

// a b, in `dtype`.
inline at::Tensor library_product(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype) {
  return dtype == a.scalar_type() ? at::mm(a, b) : float_product()->call(a, b, dtype);
}

// to += x weight^T + bias. `to` may be float32 if x is 16-bit. 16-bit products use edgeless' kernel for any number of
// rows: it reads and writes `to` once, while a cuBLAS product would be written, read back and added.
inline void add_mapped_rows(const at::Tensor& to, const at::Tensor& x, const at::Tensor& weight,
                            const Optional<at::Tensor>& bias) {
  const RightSide b(weight, false);
  const int64_t rows = x.size(0), columns = weight.size(0), depth = x.size(1);
  const bool own =
      fits(to) && (is_half(x.scalar_type()) ? suits(x, b.matrix, rows, columns, depth) && depth <= kMostDepth
                                            : takes(x, b.matrix, rows, columns, depth));
  if (own) {
    const OnDevice on_device(x.device());
    ProductArgs args = product_args(x, b.matrix, to, depth);
    const at::Tensor row = bias ? bias->contiguous() : at::Tensor();
    if (bias) args.bias = row.const_data_ptr();
    args.add = true;
    run(x.scalar_type(), false, b.transposed, args, on_device);
    return;
  }
  if (to.scalar_type() == x.scalar_type()) {
    to.addmm_(x, weight.t());
  } else {
    to.add_(library_product(x, weight.t(), writes_floats(x) ? to.scalar_type() : x.scalar_type()));
  }
  if (bias) to.add_(bias->to(to.scalar_type()));
}

// grad weight, in `dtype`; added to `to`, which has the dtype of grad, if `to` is defined.
inline at::Tensor map_rows_back(const at::Tensor& grad, const at::Tensor& weight, at::Tensor to, at::ScalarType dtype) {
  const RightSide b(weight, true);
  if (!takes(grad, b.matrix, grad.size(0), weight.size(1), weight.size(0))) {
    return to.defined() ? to.addmm_(grad, weight) : library_product(grad, weight, dtype);
  }
  const OnDevice on_device(grad.device());
  const bool add = to.defined();
  if (!add) to = at::empty({grad.size(0), weight.size(1)}, grad.options().dtype(dtype));
  ProductArgs args = product_args(grad, b.matrix, to, weight.size(0));
  args.add = add;
  run(grad.scalar_type(), false, b.transposed, args, on_device);
  return to;
}

// grad weight for each of the weights, in `dtype`.
inline std::vector<at::Tensor> all_rows_back(const at::Tensor& grad, at::TensorList weights, at::ScalarType dtype) {
  std::vector<at::Tensor> outs;
  const auto joins = [&](const at::Tensor& w) {
    return w.sizes() == weights[0].sizes() && takes(grad, w, grad.size(0), w.size(1), w.size(0));
  };
  if (weights.size() != kMostProducts || !std::all_of(weights.begin(), weights.end(), joins)) {
    for (const at::Tensor& weight : weights) outs.push_back(map_rows_back(grad, weight, {}, dtype));
    return outs;
  }
  const OnDevice on_device(grad.device());
  for (const at::Tensor& w : weights) {
    outs.push_back(at::empty({grad.size(0), w.size(1)}, grad.options().dtype(dtype)));
  }
  ProductArgs args = product_args(grad, weights[0], outs[0], weights[0].size(0));
  add_product(args, weights[1], outs[1]);
  run(grad.scalar_type(), false, true, args, on_device);
  return outs;
}

// grad^T x for each of the xs, in `dtype`, by split-K over the rows; the parts are added in order. sums: if not null
// and edgeless' kernel is used, receives the column sums of grad, the gradient of a bias. of: the number of xs to
// choose the split for, which may exceed xs.size().
inline std::vector<at::Tensor> weight_gradients(const at::Tensor& grad, at::TensorList xs, size_t of,
                                                at::ScalarType dtype, at::Tensor* sums) {
  const int64_t rows = grad.size(1), columns = xs[0].size(1), depth = grad.size(0);
  const auto taken = [&](const at::Tensor& x) { return takes(grad, x, rows, x.size(1), depth, true); };
  const auto joins = [&](const at::Tensor& x) { return x.size(1) == columns && taken(x); };
  std::vector<at::Tensor> outs;
  if (xs.size() > 1 && (xs.size() > kMostProducts || !std::all_of(xs.begin(), xs.end(), joins))) {
    for (const at::Tensor& x : xs) {
      outs.push_back(weight_gradients(grad, x, of, dtype, outs.empty() ? sums : nullptr)[0]);
    }
    return outs;
  }
  if (!taken(xs[0])) return {library_product(grad.t(), xs[0], dtype)};
  const OnDevice on_device(grad.device());
  for (const at::Tensor& x : xs) outs.push_back(at::empty({rows, x.size(1)}, grad.options().dtype(dtype)));
  ProductArgs args = product_args(grad, xs[0], outs[0], depth);
  for (size_t k = 1; k < xs.size(); ++k) add_product(args, xs[k], outs[k]);
  // The partial products have at most a sixteenth of the elements of grad and all xs, or 2^18.
  const int64_t size = rows * columns, count = static_cast<int64_t>(of), width = count * columns;
  const int64_t most_shares =
      std::max<int64_t>({depth * (rows + width) / (16 * count * size), (1 << 18) / (count * size), 1});
  args.share = product_share(is_half(grad.scalar_type()), rows, columns, count, depth,
                             device_attribute(jit::Attribute::multiprocessors, grad.get_device()), most_shares);
  const int64_t shares = (depth + args.share - 1) / args.share;
  const int64_t products = static_cast<int64_t>(xs.size()) * size, all = products + (sums ? rows : 0);
  if (sums) *sums = at::empty({rows}, outs[0].options());
  at::Tensor parts;
  if (shares > 1 || (sums && dtype != at::kFloat)) {
    parts = at::empty({shares, all}, grad.options().dtype(at::kFloat));
    float* const first = parts.data_ptr<float>();
    for (size_t k = 0; k < xs.size(); ++k) args.of[k].c = first + k * size;
    args.c_share = all, args.wide = true;
    if (sums) args.sums = first + products;
  } else if (sums) {
    args.sums = sums->data_ptr<float>();
  }
  run(grad.scalar_type(), true, true, args, on_device);
  if (!parts.defined()) return outs;
  ColumnSumsArgs adding;
  adding.chunks = static_cast<int>(shares), adding.partial = parts.data_ptr();
  const auto add = [&](const at::Tensor& out) {
    Columns& columns = adding.columns[adding.tensors++];
    columns.width = static_cast<int>(out.numel()), columns.first = adding.total, columns.out = out.data_ptr();
    adding.total += columns.width;
  };
  for (const at::Tensor& out : outs) add(out);
  if (sums) add(*sums);
  add_chunks(storage_of(dtype), adding, on_device.queue());
  return outs;
}

}  // namespace edgeless::cuda::projection
