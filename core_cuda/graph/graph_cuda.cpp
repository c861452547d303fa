// coo_to_csr and csr_transpose on CUDA: checks and allocation; the kernels are in edge_sort.cuh, for few edges in
// few_edges.cuh.
//
// Only validation synchronizes with the device: it reads two flags back before the result is returned, so that a wrong
// id raises here and causes no out-of-bounds read later. Without validation, wrong ids give a wrong graph, but the sort
// stays within its arrays.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "../common/launch.h"
#include "edge_sort_cuda.h"
#include "few_edges.h"
#include "inputs.h"

namespace edgeless {
namespace {

using at::Tensor;

[[noreturn]] void raise_out_of_range(const char* op, const char* name, const Tensor& ids, const char* limit_name,
                                     int64_t limit) {
  const Tensor first = at::nonzero(at::logical_or(ids < 0, ids >= limit)).select(0, 0);
  const int64_t position = first.item<int64_t>();
  TORCH_CHECK_INDEX(false, op, ": ", name, " has id ", ids[position].item<int64_t>(), " at position ", position,
                    ", expected 0 <= id < ", limit_name, " = ", limit);
}

// bad [2]: whether a row id, a column id is out of range. Synchronizes with the device.
void raise_if_bad(const char* op, const Tensor& bad, const Tensor& rows, const Tensor& cols, int64_t num_rows,
                  int64_t num_cols) {
  const Tensor found = bad.cpu();
  if (found.data_ptr<int32_t>()[0]) raise_out_of_range(op, "row", rows, "num_rows", num_rows);
  if (found.data_ptr<int32_t>()[1]) raise_out_of_range(op, "col", cols, "num_cols", num_cols);
}

void validate_ids(const char* op, const Tensor& rows, const Tensor& cols, int64_t num_rows, int64_t num_cols,
                  const jit::Queue& queue) {
  const Tensor bad = at::zeros({2}, rows.options().dtype(at::kInt));
  AT_DISPATCH_INDEX_TYPES(rows.scalar_type(), "validate_ids", [&] {
    cuda::check_ids(rows.data_ptr<index_t>(), rows.numel(), num_rows, bad.data_ptr<int32_t>(), queue);
    cuda::check_ids(cols.data_ptr<index_t>(), cols.numel(), num_cols, bad.data_ptr<int32_t>() + 1, queue);
  });
  raise_if_bad(op, bad, rows, cols, num_rows, num_cols);
}

// Sorts `keys`, which have the index dtype of the result. Returns indptr and the sorting permutation.
template <class I>
std::pair<Tensor, Tensor> sort_by(const Tensor& keys, int64_t num_keys, const jit::Queue& queue) {
  const int64_t count = keys.numel();
  const Tensor sorted = at::empty_like(keys), order = at::empty_like(keys);
  const Tensor indptr = at::empty({num_keys + 1}, keys.options());
  {
    const int64_t bytes = static_cast<int64_t>(cuda::sort_scratch<I>(count, num_keys));
    const Tensor scratch = at::empty({bytes}, keys.options().dtype(at::kByte));
    cuda::sort_keys(keys.data_ptr<I>(), count, num_keys, scratch.data_ptr(), sorted.data_ptr<I>(), order.data_ptr<I>(),
                    queue);
  }
  cuda::row_pointers(sorted.data_ptr<I>(), count, num_keys, indptr.data_ptr<I>(), queue);
  return {indptr, order};
}

int multiprocessors_of(const Tensor& t) { return device_attribute(jit::Attribute::multiprocessors, t.get_device()); }

Tensor few_scratch(const Tensor& ids, int multiprocessors) {
  return at::empty({cuda::grid_sort_scratch(ids.numel(), multiprocessors)}, ids.options().dtype(at::kInt));
}

CompressedArrays few_to_csr(const char* op, const Tensor& rows, const Tensor& cols, int64_t num_rows, int64_t num_cols,
                            bool validate, const jit::Queue& queue) {
  const int64_t count = rows.numel();
  const auto options = rows.options().dtype(at::kInt);
  const Tensor indptr = at::empty({num_rows + 1}, options), indices = at::empty({count}, options);
  const Tensor order = at::empty({count}, options), bad = validate ? at::empty({2}, options) : Tensor();
  const int multiprocessors = multiprocessors_of(rows);
  const Tensor scratch = few_scratch(rows, multiprocessors);
  AT_DISPATCH_INDEX_TYPES(rows.scalar_type(), "coo_to_csr", [&] {
    cuda::FewCooArgs<index_t> args;
    args.rows = rows.const_data_ptr<index_t>(), args.cols = cols.const_data_ptr<index_t>();
    args.edges = static_cast<int32_t>(count);
    args.num_rows = static_cast<int32_t>(num_rows), args.num_cols = static_cast<int32_t>(num_cols);
    args.bad = validate ? bad.data_ptr<int32_t>() : nullptr;
    args.indptr = indptr.data_ptr<int32_t>(), args.indices = indices.data_ptr<int32_t>();
    args.edge_ids = order.data_ptr<int32_t>();
    cuda::sort_few_edges(args, scratch.data_ptr<int32_t>(), multiprocessors, queue);
  });
  if (validate) raise_if_bad(op, bad, rows, cols, num_rows, num_cols);
  return {indptr, indices, order};
}

CompressedArrays few_transposed(const Tensor& indptr, const Tensor& indices, const Optional<Tensor>& edge_ids,
                                int64_t num_cols, const jit::Queue& queue) {
  const Tensor ids = edge_ids ? edge_ids->contiguous() : Tensor(),
               out_indptr = at::empty({num_cols + 1}, indptr.options());
  const Tensor out_indices = at::empty_like(indices), out_ids = at::empty_like(indices);
  cuda::FewTransposeArgs args;
  args.indptr = indptr.const_data_ptr<int32_t>(), args.indices = indices.const_data_ptr<int32_t>();
  args.edge_ids = ids.defined() ? ids.const_data_ptr<int32_t>() : nullptr;
  args.edges = static_cast<int32_t>(indices.numel()), args.num_rows = static_cast<int32_t>(indptr.numel() - 1);
  args.num_cols = static_cast<int32_t>(num_cols);
  args.to_indptr = out_indptr.data_ptr<int32_t>(), args.to_indices = out_indices.data_ptr<int32_t>();
  args.to_edge_ids = out_ids.data_ptr<int32_t>();
  const int multiprocessors = multiprocessors_of(indices);
  const Tensor scratch = few_scratch(indices, multiprocessors);
  cuda::transpose_few_edges(args, scratch.data_ptr<int32_t>(), multiprocessors, queue);
  return {out_indptr, out_indices, out_ids};
}

// row, col [E] int32 or int64 -> indptr [num_rows + 1], indices [E], edge_ids [E].
CompressedArrays coo_to_csr_cuda(const Tensor& row, const Tensor& col, int64_t num_rows, int64_t num_cols,
                                 bool validate) {
  constexpr const char* op = "coo_to_csr";
  check_coo(op, row, col, num_rows, num_cols);
  const OnDevice on_device(row.device());
  const jit::Queue& queue = on_device.queue();
  const Tensor rows = row.contiguous(), cols = col.contiguous();
  const int64_t count = rows.numel();
  const auto options = rows.options().dtype(index_type(num_rows, num_cols, count));
  if (options.dtype() == at::kInt && cuda::sorts_by_one_launch(count, std::max(num_rows, num_cols))) {
    return few_to_csr(op, rows, cols, num_rows, num_cols, validate, queue);
  }
  if (validate) validate_ids(op, rows, cols, num_rows, num_cols, queue);
  const Tensor keys = rows.to(options.dtype());
  Tensor indptr, order, indices = at::empty({count}, options);
  AT_DISPATCH_INDEX_TYPES(keys.scalar_type(), op, [&] {
    using I = index_t;
    std::tie(indptr, order) = sort_by<I>(keys, num_rows, queue);
    AT_DISPATCH_INDEX_TYPES(cols.scalar_type(), op, [&] {
      cuda::permute(cols.data_ptr<index_t>(), order.data_ptr<I>(), count, indices.data_ptr<I>(), queue);
    });
  });
  return {indptr, indices, order};
}

// indptr [R + 1], indices [E], edge_ids [E] or none -> the same of the transpose, whose rows are the columns. The
// arrays are not validated: their ids were checked when the graph was built.
CompressedArrays csr_transpose_cuda(const Tensor& indptr, const Tensor& indices, const Optional<Tensor>& edge_ids,
                                    int64_t num_cols) {
  constexpr const char* op = "csr_transpose";
  check_csr(op, indptr, indices, edge_ids, num_cols);
  const OnDevice on_device(indptr.device());
  const jit::Queue& queue = on_device.queue();
  const Tensor pointers = indptr.contiguous(), columns = indices.contiguous();
  const int64_t count = columns.numel();
  if (columns.scalar_type() == at::kInt && cuda::sorts_by_one_launch(count, std::max(pointers.numel(), num_cols))) {
    return few_transposed(pointers, columns, edge_ids, num_cols, queue);
  }
  Tensor out_pointers, order, out_indices = at::empty_like(columns), out_ids;
  AT_DISPATCH_INDEX_TYPES(pointers.scalar_type(), op, [&] {
    std::tie(out_pointers, order) = sort_by<index_t>(columns, num_cols, queue);
    const Tensor rows = at::empty_like(columns);
    cuda::expand_rows(pointers.data_ptr<index_t>(), pointers.numel() - 1, count, rows.data_ptr<index_t>(), queue);
    const index_t* places = order.data_ptr<index_t>();
    cuda::permute(rows.data_ptr<index_t>(), places, count, out_indices.data_ptr<index_t>(), queue);
    out_ids = order;
    if (edge_ids.has_value()) {
      const Tensor ids = edge_ids->contiguous();
      out_ids = at::empty_like(columns);
      cuda::permute(ids.data_ptr<index_t>(), places, count, out_ids.data_ptr<index_t>(), queue);
    }
  });
  return {out_pointers, out_indices, out_ids};
}

}  // namespace

TORCH_LIBRARY_IMPL(edgeless, CUDA, m) {
  m.impl("coo_to_csr", coo_to_csr_cuda);
  m.impl("csr_transpose", csr_transpose_cuda);
}

}  // namespace edgeless
