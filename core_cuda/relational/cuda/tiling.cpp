// Launches the kernels of tiling.cuh, and the two scans between them.
#include "tiling.h"

#include <algorithm>

#include "../../common/kernel_types.h"
#include "../../common/scan.h"
#include "../../common/threads.h"
#include "../../jit/launch.h"

namespace edgeless::cuda::relational {
namespace {

template <class I>
jit::Expression tiling_expression(const char* kernel) {
  return {"relational/cuda/tiling.cuh", kernel, {type_of<I>()}};
}

}  // namespace

template <class I>
void tile_segments(const Tiling<I>& args, int64_t* totals, const jit::Queue& queue) {
  jit::launch(queue, tiling_expression<I>("relational::type_tiles_kernel"), {1, kTypeThreads}, args, totals);
  const int64_t threads = std::max(args.num_tiles(), totals ? args.num_rows : 0);
  jit::launch(queue, tiling_expression<I>("relational::tiles_kernel"), {blocks_for(threads), kThreads}, args, totals);
}

template <class I>
size_t hubs_scratch(int64_t num_rows) {
  return scan_scratch(num_rows + 1, sizeof(I) == 8);
}

template <class I>
void split_hubs(const Tiling<I>& args, void* scratch, const jit::Queue& queue) {
  constexpr bool kWide = sizeof(I) == 8;
  const int64_t ends = args.num_rows + 1;
  jit::launch(queue, tiling_expression<I>("relational::added_kernel"), {blocks_for(ends), kThreads}, args);
  exclusive_sum(args.hub_parts, ends, kWide, scratch, queue);
  exclusive_sum(args.of_rows, ends, kWide, scratch, queue);
  jit::launch(queue, tiling_expression<I>("relational::place_kernel"), {blocks_for(args.segments), kThreads}, args);
}

template <class I>
void tile_rows(const I* ptr, int64_t num_rows, int64_t count, I* row_tiles, const jit::Queue& queue) {
  jit::launch(queue, tiling_expression<I>("relational::row_tiles_kernel"), {blocks_for(count), kThreads}, ptr, num_rows,
              count, row_tiles);
}

#define INSTANTIATE(I)                                                           \
  template void tile_segments<I>(const Tiling<I>&, int64_t*, const jit::Queue&); \
  template size_t hubs_scratch<I>(int64_t);                                      \
  template void split_hubs<I>(const Tiling<I>&, void*, const jit::Queue&);       \
  template void tile_rows<I>(const I*, int64_t, int64_t, I*, const jit::Queue&);
INSTANTIATE(int32_t)
INSTANTIATE(int64_t)
#undef INSTANTIATE

}  // namespace edgeless::cuda::relational
