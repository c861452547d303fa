// coo_to_csr and csr_transpose on CUDA: checks and allocation; the algorithm is in edge_sort.cu.
//
// Nothing waits for the device unless ids are to be validated: then one flag is read back, before the sort's result is
// used by anyone, so that a wrong id is an error here and not a wild read later. Without validation wrong ids give a
// wrong graph, but touch no memory outside these arrays.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <torch/library.h>

#include <tuple>

#include "../common/launch.h"
#include "edge_sort_cuda.h"
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

void validate_ids(const char* op, const Tensor& rows, const Tensor& cols, int64_t num_rows, int64_t num_cols,
                  cudaStream_t stream) {
  const Tensor bad = at::zeros({2}, rows.options().dtype(at::kInt));
  AT_DISPATCH_INDEX_TYPES(rows.scalar_type(), "validate_ids", [&] {
    C10_CUDA_CHECK(cuda::check_ids(rows.data_ptr<index_t>(), rows.numel(), num_rows, bad.data_ptr<int32_t>(), stream));
    C10_CUDA_CHECK(
        cuda::check_ids(cols.data_ptr<index_t>(), cols.numel(), num_cols, bad.data_ptr<int32_t>() + 1, stream));
  });
  const Tensor found = bad.cpu();
  if (found.data_ptr<int32_t>()[0]) raise_out_of_range(op, "row", rows, "num_rows", num_rows);
  if (found.data_ptr<int32_t>()[1]) raise_out_of_range(op, "col", cols, "num_cols", num_cols);
}

// Sorts `keys` (of the result's type); returns indptr and the order of the positions.
template <class I>
std::pair<Tensor, Tensor> sort_by(const Tensor& keys, int64_t num_keys, cudaStream_t stream) {
  const int64_t count = keys.numel();
  const Tensor sorted = at::empty_like(keys), order = at::empty_like(keys);
  const Tensor indptr = at::empty({num_keys + 1}, keys.options());
  {
    const int64_t bytes = static_cast<int64_t>(cuda::sort_scratch<I>(count, num_keys));
    const Tensor scratch = at::empty({bytes}, keys.options().dtype(at::kByte));
    C10_CUDA_CHECK(cuda::sort_keys(keys.data_ptr<I>(), count, num_keys, scratch.data_ptr(), sorted.data_ptr<I>(),
                                   order.data_ptr<I>(), stream));
  }
  C10_CUDA_CHECK(cuda::row_pointers(sorted.data_ptr<I>(), count, num_keys, indptr.data_ptr<I>(), stream));
  return {indptr, order};
}

// row, col [E] int32 or int64 -> indptr [num_rows + 1], indices [E], edge_ids [E].
CompressedArrays coo_to_csr_cuda(const Tensor& row, const Tensor& col, int64_t num_rows, int64_t num_cols,
                                 bool validate) {
  constexpr const char* op = "coo_to_csr";
  check_coo(op, row, col, num_rows, num_cols);
  const OnDevice on_device(row.device());
  const cudaStream_t stream = on_device.stream();
  const Tensor rows = row.contiguous(), cols = col.contiguous();
  const int64_t count = rows.numel();
  if (validate) validate_ids(op, rows, cols, num_rows, num_cols, stream);
  const auto options = rows.options().dtype(index_type(num_rows, num_cols, count));
  const Tensor keys = rows.to(options.dtype());
  Tensor indptr, order, indices = at::empty({count}, options);
  AT_DISPATCH_INDEX_TYPES(keys.scalar_type(), op, [&] {
    using I = index_t;
    std::tie(indptr, order) = sort_by<I>(keys, num_rows, stream);
    AT_DISPATCH_INDEX_TYPES(cols.scalar_type(), op, [&] {
      C10_CUDA_CHECK(
          cuda::permute(cols.data_ptr<index_t>(), order.data_ptr<I>(), count, indices.data_ptr<I>(), stream));
    });
  });
  return {indptr, indices, order};
}

// indptr [R + 1], indices [E], edge_ids [E] or none -> the same of the transpose, whose rows are the columns. The
// arrays are taken for what a graph holds: ids were checked when it was built.
CompressedArrays csr_transpose_cuda(const Tensor& indptr, const Tensor& indices, const Optional<Tensor>& edge_ids,
                                    int64_t num_cols) {
  constexpr const char* op = "csr_transpose";
  check_csr(op, indptr, indices, edge_ids, num_cols);
  const OnDevice on_device(indptr.device());
  const cudaStream_t stream = on_device.stream();
  const Tensor pointers = indptr.contiguous(), columns = indices.contiguous();
  const int64_t count = columns.numel();
  Tensor out_pointers, order, out_indices = at::empty_like(columns), out_ids;
  AT_DISPATCH_INDEX_TYPES(pointers.scalar_type(), op, [&] {
    std::tie(out_pointers, order) = sort_by<index_t>(columns, num_cols, stream);
    const Tensor rows = at::empty_like(columns);
    C10_CUDA_CHECK(
        cuda::expand_rows(pointers.data_ptr<index_t>(), pointers.numel() - 1, count, rows.data_ptr<index_t>(), stream));
    const index_t* places = order.data_ptr<index_t>();
    C10_CUDA_CHECK(cuda::permute(rows.data_ptr<index_t>(), places, count, out_indices.data_ptr<index_t>(), stream));
    out_ids = order;
    if (edge_ids.has_value()) {
      const Tensor ids = edge_ids->contiguous();
      out_ids = at::empty_like(columns);
      C10_CUDA_CHECK(cuda::permute(ids.data_ptr<index_t>(), places, count, out_ids.data_ptr<index_t>(), stream));
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
