// Launches the kernels of scan.cuh.
#include "scan.h"

#include "../jit/launch.h"
#include "kernel_types.h"

namespace edgeless::cuda {
namespace {

void scan_numbers(Scan of, bool inclusive, void* numbers, int64_t count, bool wide_index, void* scratch,
                  const jit::Queue& queue) {
  if (count == 0) return;
  const char* const header = "common/scan.cuh";
  const jit::Type index = index_type(wide_index);
  const int64_t tiles = scan_tiles(count);
  void* const totals = tiles > 1 ? scratch : nullptr;
  if (totals) {
    jit::launch(queue, {header, "scan_totals_kernel", {index, of}}, {tiles, kScanThreads}, numbers, count, totals);
    jit::launch(queue, {header, "scan_of_totals_kernel", {index, of}}, {1, kScanThreads}, totals, tiles);
  }
  jit::launch(queue, {header, "scan_tiles_kernel", {index, of, inclusive}}, {tiles, kScanThreads}, numbers, count,
              totals);
}

}  // namespace

void exclusive_sum(void* numbers, int64_t count, bool wide_index, void* scratch, const jit::Queue& queue) {
  scan_numbers(Scan::sum, false, numbers, count, wide_index, scratch, queue);
}

void inclusive_sum(void* numbers, int64_t count, bool wide_index, void* scratch, const jit::Queue& queue) {
  scan_numbers(Scan::sum, true, numbers, count, wide_index, scratch, queue);
}

void inclusive_maximum(void* numbers, int64_t count, bool wide_index, void* scratch, const jit::Queue& queue) {
  scan_numbers(Scan::maximum, true, numbers, count, wide_index, scratch, queue);
}

}  // namespace edgeless::cuda
