#include "row_hashes.h"

#include <ATen/Parallel.h>

#include <atomic>

#include "../common/checks.h"
#include "fingerprint.h"

namespace edgeless {

int64_t sum_of_row_hashes(const std::vector<at::Tensor>& columns, std::optional<int64_t> first) {
  TORCH_CHECK_VALUE(!columns.empty(), "sum_of_row_hashes: columns must not be empty");
  const int64_t rows = columns[0].numel();
  std::vector<const int64_t*> data;
  for (const at::Tensor& column : columns) {
    check_like("sum_of_row_hashes", "column", column, {rows}, columns[0]);
    TORCH_CHECK_VALUE(column.is_cpu() && column.scalar_type() == at::kLong && column.is_contiguous(),
                      "sum_of_row_hashes: column must be int64, contiguous and on the CPU");
    data.push_back(column.const_data_ptr<int64_t>());
  }
  std::atomic<uint64_t> total{0};
  at::parallel_for(0, rows, 1 << 15, [&](int64_t begin, int64_t end) {
    uint64_t sum = 0;
    for (int64_t i = begin; i < end; ++i) {
      uint64_t hash = first ? mix(0, static_cast<uint64_t>(*first + i)) : 0;
      for (const int64_t* column : data) hash = mix(hash, static_cast<uint64_t>(column[i]));
      sum += mix(mix(hash, 1), 2);
    }
    total += sum;
  });
  return static_cast<int64_t>(total.load());
}

}  // namespace edgeless
