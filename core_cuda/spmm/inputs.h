// Argument checks of the SpMM ops, shared by both devices.
#pragma once

#include "../common/checks.h"
#include "../common/graph_arrays.h"
#include "../common/optional.h"

namespace edgeless {

inline void check_scale(const char* op, const char* name, const OptTensor& scale, int64_t size, const at::Tensor& x) {
  if (!scale) return;
  check_shape(op, name, *scale, {size});
  check_dtype(op, name, *scale, opmath_dtype(x.scalar_type()));
  check_device(op, name, *scale, x.device());
}

inline void check_rows_dtype(const char* op, const char* name, const at::Tensor& x) {
  const auto t = x.scalar_type();
  TORCH_CHECK_VALUE(t == at::kFloat || t == at::kDouble || t == at::kBFloat16 || t == at::kHalf, op, ": ", name,
                    " must be float32, float64, bfloat16 or float16, got ", t);
}

// x [columns, H, F], weight [E, H], dst_scale [rows], src_scale [columns].
inline void check_spmm(const char* op, const at::Tensor& x, const OptTensor& weight, const OptTensor& src_scale,
                       const OptTensor& dst_scale, at::TensorList csr) {
  check_rows_dtype(op, "x", x);
  check_dim(op, "x", x, 3, "[Ns, F] or [Ns, H, F]");
  TORCH_CHECK_VALUE(csr.size() > 1, op, ": csr must hold [indptr, indices] or [indptr, indices, edge_ids], got ",
                    csr.size(), " tensors");
  const int64_t rows = csr[0].size(0) - 1;
  check_compressed(op, "csr", csr, rows, csr[1].size(0), x.device());
  if (weight) {
    check_shape(op, "weight", *weight, {csr[1].size(0), x.size(1)});
    check_dtype(op, "weight", *weight, opmath_dtype(x.scalar_type()));
    check_device(op, "weight", *weight, x.device());
  }
  check_scale(op, "src_scale", src_scale, x.size(0), x);
  check_scale(op, "dst_scale", dst_scale, rows, x);
}

// Sums of rows of x have the dtype of x or its opmath dtype.
inline void check_sum_dtype(const char* op, const char* name, at::ScalarType kind, const at::Tensor& x) {
  const auto statistics = opmath_dtype(x.scalar_type());
  TORCH_CHECK_VALUE(kind == x.scalar_type() || kind == statistics, op, ": ", name, " must be ", x.scalar_type(), " or ",
                    statistics, ", got ", kind);
}

// out is [rows, F] or [rows, H, F], with as many dimensions as x.
inline void check_spmm_out(const char* op, const at::Tensor& out, const at::Tensor& x, at::TensorList csr) {
  at::DimVector sizes(x.sizes());
  sizes[0] = csr[0].size(0) - 1;
  check_shape(op, "out", out, sizes);
  check_sum_dtype(op, "out", out.scalar_type(), x);
  check_device(op, "out", out, x.device());
  TORCH_CHECK_VALUE(out.is_contiguous(), op, ": out must be contiguous, got strides ", out.strides());
}

}  // namespace edgeless
