// coo_to_csr and csr_transpose on the CPU: checks, allocation and dispatch. The algorithm is in edge_sort.h.
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>
#include <tuple>

#include "common/checks.h"
#include "common/cpu/room.h"
#include "common/optional.h"
#include "graph/aten_parallel.h"
#include "graph/edge_sort.h"

namespace edgeless {
namespace {

using at::Tensor;
using CompressedArrays = std::tuple<Tensor, Tensor, Tensor>;  // indptr, indices, edge_ids

// `like` is the op's first index tensor.
void check_index(const char* op, const char* name, const Tensor& tensor, const Tensor& like) {
  check_dim(op, name, tensor, 1, "one-dimensional");
  TORCH_CHECK_VALUE(tensor.scalar_type() == at::kInt || tensor.scalar_type() == at::kLong, op, ": ", name,
                    " must be int32 or int64, got ", tensor.scalar_type());
  check_dtype(op, name, tensor, like.scalar_type());
  check_device(op, name, tensor, like.device());
}

void check_count(const char* op, const char* name, int64_t count) {
  TORCH_CHECK_VALUE(count >= 0, op, ": ", name, " must not be negative, got ", count);
}

// Raises for the first id outside [0, limit), if there is one.
template <typename Index>
void raise_out_of_range(const char* op, const char* name, const Index* ids, int64_t size, const char* limit_name,
                        int64_t limit) {
  for (int64_t p = 0; p < size; ++p) {
    TORCH_CHECK_INDEX(ids[p] >= 0 && ids[p] < limit, op, ": ", name, " has id ", ids[p], " at position ", p,
                      ", expected 0 <= id < ", limit_name, " = ", limit);
  }
}

// The rule of edgeless.Graph (index_dtype in shared/ops/graph.py).
at::ScalarType index_type(int64_t num_rows, int64_t num_cols, int64_t num_edges) {
  const int64_t limit = std::numeric_limits<int32_t>::max();
  return num_rows < limit && num_cols < limit && num_edges < limit ? at::kInt : at::kLong;
}

Tensor empty_index(int64_t size, at::ScalarType dtype) {
  Tensor tensor = at::empty({size}, at::dtype(dtype));
  prefer_huge_pages(tensor.data_ptr(), tensor.nbytes());
  return tensor;
}

CompressedArrays empty_compressed(int64_t num_rows, int64_t num_edges, at::ScalarType dtype) {
  return {empty_index(num_rows + 1, dtype), empty_index(num_edges, dtype), empty_index(num_edges, dtype)};
}

template <typename Index, typename Source>
bool sort_into(const CompressedArrays& to, const Source& source, int64_t num_keys, int64_t num_others) {
  const auto& [indptr, indices, edge_ids] = to;
  const SortedEdges<Index> arrays{indptr.data_ptr<Index>(), indices.data_ptr<Index>(), edge_ids.data_ptr<Index>()};
  return sort_edges(source, indices.numel(), num_keys, num_others, arrays, AtenParallel{});
}

// row, col [E] int32 or int64 -> indptr [num_rows + 1], indices [E], edge_ids [E]. Ids are always checked: on the CPU
// it costs nothing beside the sort.
CompressedArrays coo_to_csr_cpu(const Tensor& row, const Tensor& col, int64_t num_rows, int64_t num_cols,
                                bool /*validate*/) {
  constexpr const char* op = "coo_to_csr";
  check_index(op, "row", row, row);
  check_index(op, "col", col, row);
  TORCH_CHECK_VALUE(row.numel() == col.numel(), op, ": row and col must have the same length, got ", row.numel(),
                    " and ", col.numel());
  check_count(op, "num_rows", num_rows);
  check_count(op, "num_cols", num_cols);
  const Tensor rows = row.contiguous(), cols = col.contiguous();
  const int64_t num_edges = rows.numel();
  const auto result = empty_compressed(num_rows, num_edges, index_type(num_rows, num_cols, num_edges));
  AT_DISPATCH_INDEX_TYPES(rows.scalar_type(), op, [&] {
    using In = index_t;
    const In *r = rows.data_ptr<In>(), *c = cols.data_ptr<In>();
    AT_DISPATCH_INDEX_TYPES(std::get<0>(result).scalar_type(), op, [&] {
      if (!sort_into<index_t>(result, CooEdges<In, index_t>{r, c}, num_rows, num_cols)) {
        raise_out_of_range(op, "row", r, num_edges, "num_rows", num_rows);
        raise_out_of_range(op, "col", c, num_edges, "num_cols", num_cols);
      }
    });
  });
  return result;
}

// Malformed row pointers would send the sort outside its arrays.
template <typename Index>
void check_indptr(const char* op, const Index* indptr, int64_t num_rows, int64_t num_edges) {
  TORCH_CHECK_VALUE(indptr[0] == 0 && indptr[num_rows] == num_edges, op, ": indptr must run from 0 to the ", num_edges,
                    " edges, got ", indptr[0], " to ", indptr[num_rows]);
  for (int64_t row = 0; row < num_rows; ++row) {
    TORCH_CHECK_VALUE(indptr[row] <= indptr[row + 1], op, ": indptr must not fall, got ", indptr[row], " then ",
                      indptr[row + 1], " at row ", row);
  }
}

// indptr [R + 1], indices [E], edge_ids [E] or none -> the same of the transpose, whose rows are the columns.
CompressedArrays csr_transpose_cpu(const Tensor& indptr, const Tensor& indices, const Optional<Tensor>& edge_ids,
                                   int64_t num_cols) {
  constexpr const char* op = "csr_transpose";
  check_index(op, "indptr", indptr, indptr);
  check_index(op, "indices", indices, indptr);
  TORCH_CHECK_VALUE(indptr.numel() > 0, op, ": indptr must have shape [rows + 1], got ", indptr.sizes());
  if (edge_ids.has_value()) {
    check_index(op, "edge_ids", *edge_ids, indptr);
    TORCH_CHECK_VALUE(edge_ids->numel() == indices.numel(), op,
                      ": edge_ids and indices must have the same length, got ", edge_ids->numel(), " and ",
                      indices.numel());
  }
  check_count(op, "num_cols", num_cols);
  const Tensor pointers = indptr.contiguous(), columns = indices.contiguous();
  const Tensor ids = edge_ids.has_value() ? edge_ids->contiguous() : Tensor();
  const int64_t num_rows = pointers.numel() - 1, num_edges = columns.numel();
  const auto result = empty_compressed(num_cols, num_edges, pointers.scalar_type());
  AT_DISPATCH_INDEX_TYPES(pointers.scalar_type(), op, [&] {
    const index_t* ptr = pointers.data_ptr<index_t>();
    check_indptr(op, ptr, num_rows, num_edges);
    const CsrEdges<index_t> edges{ptr, columns.data_ptr<index_t>(), ids.defined() ? ids.data_ptr<index_t>() : nullptr,
                                  num_rows};
    if (!sort_into<index_t>(result, edges, num_cols, num_rows)) {
      raise_out_of_range(op, "indices", columns.data_ptr<index_t>(), num_edges, "num_cols", num_cols);
    }
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CPU, m) {
  m.impl("coo_to_csr", cpu::WithRoom<coo_to_csr_cpu>::call);
  m.impl("csr_transpose", cpu::WithRoom<csr_transpose_cpu>::call);
}

}  // namespace edgeless
