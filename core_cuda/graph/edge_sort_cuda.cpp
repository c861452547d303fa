// Launches the kernels of edge_sort.cuh.
#include "edge_sort_cuda.h"

#include "../common/kernel_types.h"
#include "../common/threads.h"
#include "../jit/launch.h"
#include "radix_sort.h"

namespace edgeless::cuda {
namespace {

constexpr const char* kHeader = "graph/edge_sort.cuh";

template <class I>
constexpr bool kWide = sizeof(I) == sizeof(int64_t);

}  // namespace

template <class In>
void check_ids(const In* ids, int64_t count, int64_t limit, int32_t* bad, const jit::Queue& queue) {
  if (count == 0) return;
  const jit::Expression kernel(kHeader, "check_kernel", {type_of<In>()});
  jit::launch(queue, kernel, {blocks_for(count), kThreads}, ids, count, limit, bad);
}

template <class I>
void expand_rows(const I* indptr, int64_t num_rows, int64_t num_edges, I* rows, const jit::Queue& queue) {
  if (num_edges == 0) return;
  const jit::Expression kernel(kHeader, "expand_kernel", {type_of<I>()});
  jit::launch(queue, kernel, {blocks_for(num_edges), kThreads}, indptr, num_rows, num_edges, rows);
}

template <class I>
size_t sort_scratch(int64_t count, int64_t num_keys) {
  return radix_sort_scratch(count, num_keys, kWide<I>);
}

template <class I>
void sort_keys(const I* keys, int64_t count, int64_t num_keys, void* scratch, I* sorted, I* order,
               const jit::Queue& queue) {
  radix_sort(keys, count, num_keys, kWide<I>, scratch, sorted, order, queue);
}

template <class I>
void row_pointers(const I* sorted, int64_t count, int64_t num_rows, I* indptr, const jit::Queue& queue) {
  const jit::Expression kernel(kHeader, "pointers_kernel", {type_of<I>()});
  jit::launch(queue, kernel, {blocks_for(num_rows + 1), kThreads}, sorted, count, num_rows, indptr);
}

template <class In, class I>
void permute(const In* from, const I* order, int64_t count, I* to, const jit::Queue& queue) {
  if (count == 0) return;
  const jit::Expression kernel(kHeader, "permute_kernel", {type_of<In>(), type_of<I>()});
  jit::launch(queue, kernel, {blocks_for(count), kThreads}, from, order, count, to);
}

#define INSTANTIATE(I)                                                                         \
  template void check_ids<I>(const I*, int64_t, int64_t, int32_t*, const jit::Queue&);         \
  template void expand_rows<I>(const I*, int64_t, int64_t, I*, const jit::Queue&);             \
  template size_t sort_scratch<I>(int64_t, int64_t);                                           \
  template void sort_keys<I>(const I*, int64_t, int64_t, void*, I*, I*, const jit::Queue&);    \
  template void row_pointers<I>(const I*, int64_t, int64_t, I*, const jit::Queue&);            \
  template void permute<int32_t, I>(const int32_t*, const I*, int64_t, I*, const jit::Queue&); \
  template void permute<int64_t, I>(const int64_t*, const I*, int64_t, I*, const jit::Queue&);
INSTANTIATE(int32_t)
INSTANTIATE(int64_t)
#undef INSTANTIATE

}  // namespace edgeless::cuda
