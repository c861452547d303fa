// coo_to_csr and csr_transpose on the CPU: checks, allocation and dispatch. The algorithm is in edge_sort.h.
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <tuple>

#include "../common/cpu/room.h"
#include "aten_parallel.h"
#include "edge_sort.h"
#include "inputs.h"

namespace edgeless {
namespace {

using at::Tensor;

// Raises for the first id outside [0, limit), if there is one.
template <typename Index>
void raise_out_of_range(const char* op, const char* name, const Index* ids, int64_t size, const char* limit_name,
                        int64_t limit) {
  for (int64_t p = 0; p < size; ++p) {
    TORCH_CHECK_INDEX(ids[p] >= 0 && ids[p] < limit, op, ": ", name, " has id ", ids[p], " at position ", p,
                      ", expected 0 <= id < ", limit_name, " = ", limit);
  }
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
// the check costs little beside the sort.
CompressedArrays coo_to_csr_cpu(const Tensor& row, const Tensor& col, int64_t num_rows, int64_t num_cols,
                                bool /*validate*/) {
  constexpr const char* op = "coo_to_csr";
  check_coo(op, row, col, num_rows, num_cols);
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

// Malformed row pointers would make the sort read out of bounds.
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
  check_csr(op, indptr, indices, edge_ids, num_cols);
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
