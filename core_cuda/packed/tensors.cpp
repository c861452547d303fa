#include "tensors.h"

#include <ATen/ATen.h>

#include "../common/checks.h"

namespace edgeless {
namespace {

using at::Tensor;

constexpr const char* kOp = "gather_packed";

// Checks a table [rows, columns] of int64.
void check_table(const char* name, const Tensor& table, int64_t columns, const at::Device& device) {
  check_dim(kOp, name, table, 2, "a matrix");
  check_dtype(kOp, name, table, at::kLong);
  check_device(kOp, name, table, device);
  TORCH_CHECK_VALUE(table.is_contiguous() && table.size(1) == columns, kOp, ": ", name, " must be contiguous with ",
                    columns, " columns, got shape ", table.sizes());
}

// The largest unit in bytes that divides a row and to which both addresses are aligned.
int32_t unit_of(const PackedColumn& column) {
  for (const int32_t unit : {16, 8, 4, 2}) {
    const auto addresses = reinterpret_cast<uintptr_t>(column.from) | reinterpret_cast<uintptr_t>(column.to);
    if (column.row_bytes % unit == 0 && addresses % unit == 0) return unit;
  }
  return 1;
}

}  // namespace

std::pair<std::vector<Tensor>, std::vector<PackedColumn>> packed_columns(const PackedInputs& in) {
  const at::Device device = in.starts.device();
  const int64_t graphs = in.begins.dim() == 2 ? in.begins.size(1) : 0;
  check_table("starts", in.starts, graphs + 1, device);
  check_table("begins", in.begins, graphs, device);
  const size_t count = in.columns.size();
  TORCH_CHECK_VALUE(
      in.dims.size() == count && in.levels.size() == count && in.increments.size() == count && in.last.size() == count,
      kOp, ": dims, levels, increments and last must have one entry a column");
  const auto levels = static_cast<int64_t>(in.sizes.size());
  TORCH_CHECK_VALUE(in.starts.size(0) == levels && in.begins.size(0) == levels, kOp,
                    ": starts and begins must have one row a level, got ", in.starts.sizes(), " and ",
                    in.begins.sizes());
  std::pair<std::vector<Tensor>, std::vector<PackedColumn>> found;
  for (size_t i = 0; i < count; ++i) {
    const Tensor& data = in.columns[i];
    const int64_t dim = in.dims[i], level = in.levels[i], increment = in.increments[i];
    check_device(kOp, "columns", data, device);
    TORCH_CHECK_VALUE(data.is_contiguous() && 0 <= dim && dim < data.dim() && data.size(dim) > 0, kOp,
                      ": columns must be contiguous, with entries along dims, got shape ", data.sizes());
    TORCH_CHECK_VALUE(0 <= level && level < levels && -1 <= increment && increment < levels, kOp,
                      ": levels and increments must be rows of the tables, got ", level, " and ", increment);
    auto shape = data.sizes().vec();
    shape[dim] = in.sizes[level];
    PackedColumn column;
    column.outer = 1, column.row_bytes = data.element_size();
    for (int64_t d = 0; d < dim; ++d) column.outer *= shape[d];
    for (int64_t d = dim + 1; d < data.dim(); ++d) column.row_bytes *= shape[d];
    column.from_rows = data.size(dim), column.to_rows = shape[dim], column.graphs = graphs;
    const Tensor to = at::empty(shape, data.options());
    column.from = static_cast<const char*>(data.const_data_ptr()), column.to = static_cast<char*>(to.data_ptr());
    column.starts = in.starts.const_data_ptr<int64_t>() + level * (graphs + 1);
    column.begins = in.begins.const_data_ptr<int64_t>() + level * graphs;
    column.unit = unit_of(column);
    if (const Optional<Tensor> last = in.last.get(i); last.has_value() || increment >= 0) {
      TORCH_CHECK_VALUE(at::isIntegralType(data.scalar_type(), false), kOp,
                        ": columns with increments or last entries must be integers, got ", data.scalar_type());
      column.unit = static_cast<int32_t>(data.element_size());
      if (increment >= 0) column.offsets = in.starts.const_data_ptr<int64_t>() + increment * (graphs + 1);
      if (last.has_value()) {
        check_dtype(kOp, "last", *last, at::kLong);
        check_device(kOp, "last", *last, device);
        TORCH_CHECK_VALUE(last->is_contiguous() && column.row_bytes == column.unit, kOp,
                          ": last must be contiguous, for columns of one number an entry");
        column.last = last->const_data_ptr<int64_t>();
      }
    }
    found.first.push_back(to), found.second.push_back(column);
  }
  return found;
}

}  // namespace edgeless
