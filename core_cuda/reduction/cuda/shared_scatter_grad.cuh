// The gradient of a minimum or maximum, scattered as in scatter_grad.cuh but with the sums in shared memory, where
// atomics run at several times the rate of L2.
//
// A group of columns belongs to one block, or to a cluster of two that divide the rows and add to each other's shared
// memory: block r owns the sums of nodes n with n % owners == r. A sum is a 64-bit integer, added as two 32-bit words,
// because a 64-bit atomic in shared memory is a loop. The arithmetic carry of the lower word follows from the old value
// that its atomic returns, and is added with the upper word. So the sums equal those of scatter_grad.cuh bit for bit.
// Shared memory: lower words [nodes, columns], upper words [nodes, columns]. Storage: float, half, bfloat16.
#pragma once

#include "scatter_grad.cuh"

namespace edgeless::cuda::reduction {

constexpr int kSharedScatterBatch = 4;  // elements per thread in flight

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define EDGELESS_CLUSTERS 1
#else
#define EDGELESS_CLUSTERS 0
#endif

// Adds to a word in the shared memory of block `rank` of the cluster and returns the old value. `address` is the word's
// address in this block's shared memory.
__device__ __forceinline__ uint32_t add_to_cluster(uint32_t address, uint32_t rank, uint32_t x) {
  uint32_t old = 0;
#if EDGELESS_CLUSTERS
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  asm volatile("atom.relaxed.cluster.shared::cluster.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "r"(there), "r"(x)
               : "memory");
#endif
  return old;
}

template <bool kCluster>
__device__ __forceinline__ void wait_for_owners() {
  if constexpr (kCluster) {
#if EDGELESS_CLUSTERS
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
  } else {
    __syncthreads();
  }
}

template <class S, class I, bool kCluster>
struct Owner {
  const SharedScatterArgs& own;
  const ScatterArgs& args;
  uint32_t* sums;
  int rank, column, feature;  // block in the cluster; the thread's only column, since columns divide the threads
  Scale<float> scale;

  __device__ __forceinline__ Owner(const SharedScatterArgs& own, uint32_t* sums, int rank, int column, int feature)
      : own(own),
        args(own.scatter),
        sums(sums),
        rank(rank),
        column(column),
        feature(feature),
        scale(scale_of<S>(own.scatter, feature)) {}

  template <bool kRest>
  __device__ __forceinline__ void send_to(int node, float x) const {
    const bool finite = Scale<float>::bits(x) < Scale<float>::kInfinity;
    if constexpr (kRest) {
      S* to = static_cast<S*>(args.grad_x) + static_cast<int64_t>(node) * args.width + feature;
      if (!finite) atomicAdd(to, to_storage<S>(x));
    } else {
      if (!finite || x == 0.0f) return;
      const long long whole = __double2ll_rn(static_cast<double>(x) * scale.up);
      const uint32_t lower = static_cast<uint32_t>(whole);
      uint32_t upper = static_cast<uint32_t>(whole >> 32);
      const int at = ((node >> own.owners_log2) << args.columns_log2) + column;
      const int words = own.nodes << args.columns_log2;
      if constexpr (kCluster) {
        const int owner = node & ((1 << own.owners_log2) - 1);
        const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(sums)) + at * 4;
        upper += lower > ~add_to_cluster(address, owner, lower);
        if (upper != 0) add_to_cluster(address + words * 4, owner, upper);
      } else {
        upper += lower > ~atomicAdd(sums + at, lower);
        if (upper != 0) atomicAdd(sums + words + at, upper);
      }
    }
  }

  // Scatters tied elements, one after the other: the whole warp reads the row again and compares it with the extremum.
  template <bool kRest>
  __device__ __forceinline__ void send_shared(unsigned lanes, int64_t row, uint32_t parts, float x) const {
    const I* indptr = static_cast<const I*>(args.graph.indptr);
    const I* indices = static_cast<const I*>(args.graph.indices);
    const int lane = threadIdx.x & 31;
    for (; lanes; lanes &= lanes - 1) {
      const int from = __ffs(lanes) - 1;
      const int64_t that_row = __shfl_sync(0xffffffffu, row, from);
      const float part = __shfl_sync(0xffffffffu, x, from) / static_cast<float>(__shfl_sync(0xffffffffu, parts, from));
      Owner that(*this);
      that.column = __shfl_sync(0xffffffffu, column, from);
      that.feature = __shfl_sync(0xffffffffu, feature, from);
      that.scale.up = __shfl_sync(0xffffffffu, scale.up, from);
      const float best =
          to_arithmetic(static_cast<const S*>(args.out)[that_row * static_cast<int64_t>(args.width) + that.feature]);
      const char* base = args.x.base + that.feature * static_cast<int64_t>(sizeof(S));
      const I end = indptr[that_row + 1];
      for (I edge = indptr[that_row] + lane; edge < end; edge += 32) {
        const I node = __ldg(indices + edge);
        const float mine = to_arithmetic(__ldg(reinterpret_cast<const S*>(row_address(base, node, args.x.row))));
        if (mine == best) that.template send_to<kRest>(static_cast<int>(node), part);
      }
    }
  }

  template <bool kRest>
  __device__ __forceinline__ void walk() const {
    const I* indptr = static_cast<const I*>(args.graph.indptr);
    const I* indices = static_cast<const I*>(args.graph.indices);
    const uint32_t shared = args.shares ? 1u << (8 * args.arg_size - 1) : 0;
    const int64_t end = args.graph.num_rows << args.columns_log2;
    const int64_t step =
        kCluster ? static_cast<int64_t>(kSharedScatterThreads) << own.owners_log2 : kSharedScatterThreads;
    const int64_t first = (kCluster ? rank * kSharedScatterThreads : 0) + (threadIdx.x & ~31);
    for (int64_t warp = first; warp < end; warp += step * kSharedScatterBatch) {
      int64_t row[kSharedScatterBatch];
      uint32_t code[kSharedScatterBatch];
      float x[kSharedScatterBatch];
      I begin[kSharedScatterBatch];
      bool here[kSharedScatterBatch];
#pragma unroll
      for (int u = 0; u < kSharedScatterBatch; ++u) {
        const int64_t t = warp + u * step + (threadIdx.x & 31);
        here[u] = t < end && feature < args.width;
        row[u] = here[u] ? t >> args.columns_log2 : 0;
        const int64_t at = here[u] ? feature : 0;
        begin[u] = __ldg(indptr + row[u]);
        here[u] &= __ldg(indptr + row[u] + 1) > begin[u];
        code[u] = keep_arg(row[u] * args.width + at);
        x[u] = to_arithmetic(__ldg(static_cast<const S*>(args.grad) + row[u] * args.grad_row + at * args.grad_column));
      }
      int node[kSharedScatterBatch];
#pragma unroll
      for (int u = 0; u < kSharedScatterBatch; ++u) {
        const bool alone = here[u] && !(code[u] & shared);
        node[u] = alone ? static_cast<int>(__ldg(indices + begin[u] + static_cast<I>(code[u]))) : -1;
      }
#pragma unroll
      for (int u = 0; u < kSharedScatterBatch; ++u) {
        if (node[u] >= 0) send_to<kRest>(node[u], x[u]);
      }
      if (!args.shares) continue;
#pragma unroll
      for (int u = 0; u < kSharedScatterBatch; ++u) {
        const unsigned lanes = __ballot_sync(0xffffffffu, here[u] && (code[u] & shared));
        if (lanes) send_shared<kRest>(lanes, row[u], (code[u] & ~shared) + 1, x[u]);
      }
    }
  }

  // Unlike load_arg, caches the line: other groups of columns read the rest of it soon.
  __device__ __forceinline__ uint32_t keep_arg(int64_t at) const {
    if (args.arg_size == 1) return __ldg(static_cast<const uint8_t*>(args.arg) + at);
    if (args.arg_size == 2) return __ldg(static_cast<const uint16_t*>(args.arg) + at);
    return __ldg(static_cast<const uint32_t*>(args.arg) + at);
  }

  __device__ __forceinline__ void finish() const {
    const int words = own.nodes << args.columns_log2;
    if (feature >= args.width) return;
    for (int at = threadIdx.x; at < words;
         at += kSharedScatterThreads) {  // strides by a multiple of the columns, so the column is the thread's
      const int64_t node = (static_cast<int64_t>(at >> args.columns_log2) << own.owners_log2) + rank;
      if (node >= args.num_columns) break;
      const long long sum = static_cast<long long>(static_cast<uint64_t>(sums[words + at]) << 32 | sums[at]);
      static_cast<S*>(args.grad_x)[node * args.width + feature] = to_storage<S>(scale.total(&sum));
    }
  }
};

template <class S, class I, bool kCluster>
__global__ void __launch_bounds__(kSharedScatterThreads, 1)
    shared_scatter_grad_kernel(const __grid_constant__ SharedScatterArgs own) {
  extern __shared__ uint32_t sums[];
  const ScatterArgs& args = own.scatter;
  const int rank = blockIdx.x & ((1 << own.owners_log2) - 1);
  const int column = threadIdx.x & ((1 << args.columns_log2) - 1);
  const int feature = static_cast<int>(blockIdx.x >> own.owners_log2 << args.columns_log2) + column;
  const Owner<S, I, kCluster> owner(own, sums, rank, column, feature);
  for (int at = threadIdx.x; at < own.nodes << (args.columns_log2 + 1); at += kSharedScatterThreads) sums[at] = 0;
  wait_for_owners<kCluster>();
  owner.template walk<false>();
  wait_for_owners<kCluster>();
  owner.finish();
  if (nothing_left<S>(args)) return;
  wait_for_owners<kCluster>();
  owner.template walk<true>();
}

}  // namespace edgeless::cuda::reduction
