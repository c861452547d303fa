// Launches the kernels of scan.cuh.
#include "scan.h"

#include "../jit/launch.h"
#include "kernel_types.h"

namespace edgeless::cuda {

void exclusive_sum(void* numbers, int64_t count, bool wide_index, void* scratch, const jit::Queue& queue) {
  const int64_t blocks = scan_blocks(count);
  const jit::Type index = index_type(wide_index);
  const jit::Shape shape{blocks, kScanThreads};
  if (blocks > 1) {
    jit::launch(queue, {"common/scan.cuh", "share_sums_kernel", {index}}, shape, numbers, count, scratch);
  }
  jit::launch(queue, {"common/scan.cuh", "exclusive_sum_kernel", {index}}, shape, numbers, count, scratch);
}

}  // namespace edgeless::cuda
