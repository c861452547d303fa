// Launches the kernels of segments.cuh, and the two scans between them.
#include "segments.h"

#include "../../common/kernel_types.h"
#include "../../common/scan.h"
#include "../../common/threads.h"
#include "../../jit/launch.h"

namespace edgeless::cuda::relational {
namespace {

template <class I>
jit::Expression segments_expression(const char* kernel) {
  return {"relational/cuda/segments.cuh", kernel, {type_of<I>()}};
}

}  // namespace

template <class I>
void arrange_edges(const ArrangeArgs<I>& args, const jit::Queue& queue) {
  if (args.edges == 0) return;
  jit::launch(queue, segments_expression<I>("relational::arrange_kernel"), {blocks_for(args.edges), kThreads}, args);
}

template <class I>
size_t segments_scratch(int64_t edges) {
  return scan_scratch(edges, sizeof(I) == 8);
}

template <class I>
void cut_into_segments(const SegmentsArgs<I>& args, void* scratch, const jit::Queue& queue) {
  constexpr bool kWide = sizeof(I) == 8;
  const jit::Shape shape{blocks_for(args.edges + 1), kThreads};
  if (args.edges) {
    jit::launch(queue, segments_expression<I>("relational::run_begins_kernel"), shape, args);
    inclusive_maximum(args.numbers, args.edges, kWide, scratch, queue);
    jit::launch(queue, segments_expression<I>("relational::segment_begins_kernel"), shape, args);
    inclusive_sum(args.numbers, args.edges, kWide, scratch, queue);
  }
  jit::launch(queue, segments_expression<I>("relational::segments_kernel"), shape, args);
  jit::launch(queue, segments_expression<I>("relational::type_segments_kernel"),
              {blocks_for(args.num_types + 1), kThreads}, args);
}

template <class I, class A>
void run_means(const MeansArgs<I, A>& args, const jit::Queue& queue) {
  if (args.most_segments == 0) return;
  const char* const name = args.edge_ids ? "relational::means_kernel" : "relational::means_of_segments_kernel";
  const int64_t threads = args.most_segments * (args.edge_ids ? kWarp : 1);
  jit::launch(queue, {"relational/cuda/segments.cuh", name, {type_of<I>(), type_of<A>()}},
              {blocks_for(threads), kThreads}, args);
}

template <class I>
void run_pairs(const I* ptr, int64_t pairs, const I* edge_ids, int64_t edges, I* of_edges, const jit::Queue& queue) {
  if (edges == 0) return;
  jit::launch(queue, segments_expression<I>("relational::pairs_kernel"), {blocks_for(edges), kThreads}, ptr, pairs,
              edge_ids, edges, of_edges);
}

#define INSTANTIATE(I)                                                                     \
  template void arrange_edges<I>(const ArrangeArgs<I>&, const jit::Queue&);                \
  template size_t segments_scratch<I>(int64_t);                                            \
  template void run_pairs<I>(const I*, int64_t, const I*, int64_t, I*, const jit::Queue&); \
  template void cut_into_segments<I>(const SegmentsArgs<I>&, void*, const jit::Queue&);    \
  template void run_means<I, float>(const MeansArgs<I, float>&, const jit::Queue&);        \
  template void run_means<I, double>(const MeansArgs<I, double>&, const jit::Queue&);
INSTANTIATE(int32_t)
INSTANTIATE(int64_t)
#undef INSTANTIATE

}  // namespace edgeless::cuda::relational
