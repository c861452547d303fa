// Checks of the typed ops' arguments, the same on every device.
#pragma once

#include <utility>

#include "../spmm/inputs.h"
#include "tiling.h"

namespace edgeless {

inline OptTensor contiguous(const OptTensor& t) { return t ? OptTensor(t->contiguous()) : t; }

// offsets and rows must have one dtype.
inline void check_entries(const char* op, const at::Tensor& x, const at::Tensor& offsets, const OptTensor& rows,
                          int64_t types) {
  TORCH_CHECK_VALUE(offsets.scalar_type() == at::kInt || offsets.scalar_type() == at::kLong, op,
                    ": offsets must be int32 or int64, got ", offsets.scalar_type());
  if (types >= 0) {
    check_shape(op, "offsets", offsets, {types + 1});
  } else {
    check_dim(op, "offsets", offsets, 1, "[types + 1]");
    TORCH_CHECK_VALUE(offsets.size(0) > 0, op, ": offsets must be [types + 1], got shape ", offsets.sizes());
  }
  check_device(op, "offsets", offsets, x.device());
  if (!rows) return;
  check_shape(op, "rows", *rows, {x.size(0)});
  check_dtype(op, "rows", *rows, offsets.scalar_type());
  check_device(op, "rows", *rows, x.device());
}

inline void check_typed_mm(const char* op, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& offsets,
                           const OptTensor& rows) {
  check_rows_dtype(op, "x", x);
  check_dim(op, "x", x, 2, "[N, K]");
  check_dim(op, "weight", weight, 3, "[types, K, M]");
  check_like(op, "weight", weight, {weight.size(0), x.size(1), weight.size(2)}, x);
  check_entries(op, x, offsets, rows, weight.size(0));
}

// weight [types, M, K], bias [types, M]
inline void check_typed_linear(const char* op, const at::Tensor& x, const at::Tensor& weight, const OptTensor& bias,
                               const at::Tensor& offsets) {
  check_rows_dtype(op, "x", x);
  check_dim(op, "x", x, 2, "[N, K]");
  check_dim(op, "weight", weight, 3, "[types, M, K]");
  check_like(op, "weight", weight, {weight.size(0), weight.size(1), x.size(1)}, x);
  check_entries(op, x, offsets, {}, weight.size(0));
  if (!bias) return;
  check_like(op, "bias", *bias, {weight.size(0), weight.size(1)}, x);
}

inline void check_typed_sums(const char* op, const at::Tensor& x, const at::Tensor& offsets) {
  check_rows_dtype(op, "x", x);
  check_dim(op, "x", x, 2, "[N, M]");
  check_entries(op, x, offsets, {}, -1);
}

inline void check_typed_blend(const char* op, const at::Tensor& y, const at::Tensor& x, const at::Tensor& alpha,
                              const at::Tensor& offsets, const OptTensor& rows) {
  check_rows_dtype(op, "y", y);
  check_dim(op, "y", y, 2, "[N, M]");
  check_dim(op, "alpha", alpha, 1, "[types]");
  check_shape(op, "x", x, {y.size(0), y.size(1)});
  for (const auto& [name, t] : {std::pair<const char*, const at::Tensor&>{"x", x}, {"alpha", alpha}}) {
    check_dtype(op, name, t, y.scalar_type());
    check_device(op, name, t, y.device());
  }
  check_entries(op, y, offsets, rows, alpha.size(0));
}

inline void check_blend_grad(const char* op, const at::Tensor& grad, const at::Tensor& y,
                             const c10::List<bool>& needs) {
  check_shape(op, "grad", grad, {y.size(0), y.size(1)});
  check_dtype(op, "grad", grad, y.scalar_type());
  TORCH_CHECK_VALUE(needs.size() == 3, op, ": needs must have 3 entries, got ", needs.size());
}

inline void check_typed_outer(const char* op, const at::Tensor& x, const at::Tensor& y, const at::Tensor& offsets,
                              const OptTensor& rows) {
  check_rows_dtype(op, "x", x);
  check_dim(op, "x", x, 2, "[N, K]");
  check_dim(op, "y", y, 2, "[N, M]");
  check_like(op, "y", y, {x.size(0), y.size(1)}, x);
  check_entries(op, x, offsets, rows, -1);
}

inline void check_typed_edges(const char* op, const at::Tensor& indptr, const at::Tensor& indices,
                              const OptTensor& edge_ids, const at::Tensor& types, int64_t num_types, int64_t cut) {
  check_dim(op, "indptr", indptr, 1, "[rows + 1]");
  TORCH_CHECK_VALUE(indptr.numel() > 0, op, ": indptr must have shape [rows + 1], got ", indptr.sizes());
  check_dim(op, "indices", indices, 1, "[E]");
  check_dtype(op, "indices", indices, indptr.scalar_type());
  if (edge_ids) {
    check_shape(op, "edge_ids", *edge_ids, {indices.size(0)});
    check_dtype(op, "edge_ids", *edge_ids, indptr.scalar_type());
  }
  check_shape(op, "edge_type", types, {indices.size(0)});
  TORCH_CHECK_VALUE(types.scalar_type() == at::kInt || types.scalar_type() == at::kLong, op,
                    ": edge_type must be int32 or int64, got ", types.scalar_type());
  check_device(op, "edge_type", types, indptr.device());
  TORCH_CHECK_VALUE(num_types >= 0, op, ": num_types must not be negative, got ", num_types);
  TORCH_CHECK_VALUE(cut > 0, op, ": cut must be positive, got ", cut);
}

inline void check_typed_means(const char* op, const at::Tensor& type_ptr, const at::Tensor& rows, const at::Tensor& ptr,
                              const OptTensor& edge_ids, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kDouble, op, ": dtype must be float32 or float64, got ", dtype);
  for (const at::Tensor& t : {rows, ptr, edge_ids.value_or(ptr)})
    check_dtype(op, "rows, ptr and edge_ids", t, type_ptr.scalar_type());
}

inline void check_pairs_of_edges(const char* op, const at::Tensor& ptr, const at::Tensor& edge_ids) {
  check_dim(op, "ptr", ptr, 1, "[pairs + 1]");
  check_dim(op, "edge_ids", edge_ids, 1, "[E]");
  TORCH_CHECK_VALUE(ptr.numel() > (edge_ids.numel() > 0), op, ": ptr must have shape [pairs + 1], got ", ptr.sizes());
  check_dtype(op, "ptr", ptr, edge_ids.scalar_type());
  check_device(op, "ptr", ptr, edge_ids.device());
}

inline void check_segment_tiles(const char* op, const at::Tensor& type_ptr, const at::Tensor& rows,
                                const at::Tensor& ptr, const at::Tensor& by_row, int64_t num_edges) {
  check_dim(op, "type_ptr", type_ptr, 1, "[types + 1]");
  check_dim(op, "ptr", ptr, 1, "[segments + 1]");
  check_dim(op, "by_row", by_row, 1, "[num_rows + 1 + segments]");
  check_shape(op, "rows", rows, {ptr.size(0) - 1});
  TORCH_CHECK_VALUE(type_ptr.numel() > 0, op, ": type_ptr must have shape [types + 1], got ", type_ptr.sizes());
  TORCH_CHECK_VALUE(by_row.numel() > rows.numel(), op, ": by_row must have more than the ", rows.numel(),
                    " elements of rows, got ", by_row.numel());
  TORCH_CHECK_VALUE(num_edges >= 0, op, ": num_edges must not be negative, got ", num_edges);
  TORCH_CHECK_VALUE(type_ptr.scalar_type() == at::kInt || type_ptr.scalar_type() == at::kLong, op,
                    ": type_ptr must be int32 or int64, got ", type_ptr.scalar_type());
  for (const auto& [name, t] :
       {std::pair<const char*, const at::Tensor&>{"rows", rows}, {"ptr", ptr}, {"by_row", by_row}}) {
    check_dtype(op, name, t, type_ptr.scalar_type());
    check_device(op, name, t, type_ptr.device());
  }
}

// The tensors must be contiguous.
template <class I>
Tiling<I> tiling_of(const at::Tensor& type_ptr, const at::Tensor& rows, const at::Tensor& ptr, const at::Tensor& by_row,
                    int64_t num_edges) {
  Tiling<I> args;
  args.type_ptr = type_ptr.const_data_ptr<I>(), args.rows = rows.const_data_ptr<I>();
  args.ptr = ptr.const_data_ptr<I>(), args.by_row = by_row.const_data_ptr<I>();
  args.types = type_ptr.numel() - 1, args.segments = rows.numel(), args.edges = num_edges;
  args.num_rows = by_row.numel() - 1 - args.segments;
  return args;
}

// Lengths of the list of tensors that describes one direction of a graph: the 6 tensors of typed_edges. On CUDA the 5
// of segment_tiles may follow: the first tile of every type [types + 1], the first segment of every tile [tiles + 1],
// the first row of every tile of rows [tiles + 1], what each row sums, and parts of hubs [2, parts] (segments.h). After
// these may follow the weights of the edges in the list's order, or of the segments [segments, 1].
constexpr size_t kPlainSegments = 6, kTiledSegments = 11, kWeighedSegments = 12;

inline bool holds_segments(at::TensorList segments) {
  const bool tiled = segments.size() == kTiledSegments || segments.size() == kWeighedSegments;
  return segments.size() == kPlainSegments || (tiled && segments[0].is_cuda());
}

inline void check_segments(const char* op, const char* name, at::TensorList segments, int64_t types,
                           const at::Device& on) {
  TORCH_CHECK_VALUE(holds_segments(segments), op, ": ", name, " must hold the 6 tensors of typed_edges, got ",
                    segments.size());
  for (const at::Tensor& t : segments) check_device(op, name, t, on);
  check_shape(op, name, segments[0], {types + 1});
  for (size_t i = 1; i < 5; ++i) check_dtype(op, name, segments[i], segments[0].scalar_type());
  if (segments.size() == kPlainSegments) return;
  check_shape(op, name, segments[6], {types + 1});
  for (size_t i = 6; i < kTiledSegments; ++i) check_dtype(op, name, segments[i], segments[0].scalar_type());
  check_shape(op, name, segments[10], {2, segments[10].size(-1)});
  if (segments.size() == kTiledSegments) return;
  if (segments[11].dim() == 2) {
    check_shape(op, name, segments[11], {segments[1].size(0), 1});
  } else {
    check_shape(op, name, segments[11], {segments[3].size(0)});
  }
}

// Feature counts of weights [types, K, M] or [types, blocks, K / blocks, M / blocks].
struct WeightSizes {
  int64_t types, blocks, in, out;

  WeightSizes(const char* op, const at::Tensor& weight) {
    TORCH_CHECK_VALUE(weight.dim() == 3 || weight.dim() == 4, op,
                      ": weight must be [types, K, M] or [types, blocks, K / blocks, M / blocks], got shape ",
                      weight.sizes());
    types = weight.size(0), blocks = weight.dim() == 4 ? weight.size(1) : 1;
    in = blocks * weight.size(-2), out = blocks * weight.size(-1);
  }
};

inline void check_relational_sum(const char* op, const at::Tensor& x, const at::Tensor& weight,
                                 const OptTensor& edge_weight, at::TensorList by_dst) {
  const WeightSizes sizes(op, weight);
  check_rows_dtype(op, "x", x);
  check_dim(op, "x", x, 2, "[Ns, K]");
  check_shape(op, "x", x, {x.size(0), sizes.in});
  const auto statistics = opmath_dtype(x.scalar_type());
  TORCH_CHECK_VALUE(weight.scalar_type() == x.scalar_type() || weight.scalar_type() == statistics, op,
                    ": weight must be ", x.scalar_type(), " or ", statistics, ", got ", weight.scalar_type());
  check_device(op, "weight", weight, x.device());
  check_segments(op, "by_dst", by_dst, sizes.types, x.device());
  if (!edge_weight) return;
  check_shape(op, "edge_weight", *edge_weight, {by_dst[3].size(0)});
  check_dtype(op, "edge_weight", *edge_weight, statistics);
  check_device(op, "edge_weight", *edge_weight, x.device());
}

}  // namespace edgeless
