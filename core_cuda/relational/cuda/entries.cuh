// Finds the entries that a thread block processes, and their rows.
#pragma once

#undef NDEBUG
#include <cassert>

#include "../../common/partition.cuh"
#include "kernels.h"

namespace edgeless::cuda::relational {

__device__ __forceinline__ int64_t id_at(const void* ids, bool wide, int64_t i) {
  return wide ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
}

// The row of entry i.
__device__ __forceinline__ int64_t row_of(const EntryRows& x, const Entries& entries, int64_t i) {
  return x.rows ? id_at(x.rows, entries.wide, i) : i;
}

// Index in a row at which block number `block` of `blocks` begins; blocks have `width` elements.
__device__ __forceinline__ int64_t begin_of_block(const EntryRows& x, int block, int blocks, int width) {
  return static_cast<int64_t>(block) * width + (2 * block >= blocks ? x.gap : 0);
}

// An id whose load is in flight. get() is the first use of the loaded words: sign extension would wait for the load
// right away, and so would loading int32 and int64 ids into the same register.
struct IdInFlight {
  uint32_t low = 0, high = 0;

  __device__ __forceinline__ IdInFlight() = default;
  __device__ __forceinline__ explicit IdInFlight(int64_t id)
      : low(static_cast<uint32_t>(id)), high(static_cast<uint32_t>(id >> 32)) {}
  __device__ __forceinline__ IdInFlight(const void* ids, bool wide, int64_t i) {
    const uint32_t* words = static_cast<const uint32_t*>(ids) + (i << (wide ? 1 : 0));
    low = words[0];
    if (wide) high = words[1];
  }
  __device__ __forceinline__ int64_t get() const { return static_cast<int64_t>(high) << 32 | low; }
};

// Prefetches the row of entry i.
__device__ __forceinline__ IdInFlight id_in_flight(const EntryRows& x, const Entries& entries, int64_t i) {
  return x.rows ? IdInFlight(x.rows, entries.wide, i) : IdInFlight(i);
}

// Asserts on the device that a caller's offsets match the entries, since the host would have to synchronize to read
// them. Only the first block checks.
__device__ __forceinline__ void check_offsets(const Entries& entries) {
  if (!entries.given || blockIdx.x + blockIdx.y + blockIdx.z > 0) return;
  const auto offset = [&](int t) { return id_at(entries.offsets, entries.wide, t); };
  const int threads = blockDim.x * blockDim.y;
  for (int type = threadIdx.y * blockDim.x + threadIdx.x; type < entries.types; type += threads) {
    const bool lengths_are_not_negative = offset(type) <= offset(type + 1);
    assert(lengths_are_not_negative);
  }
  const bool lengths_add_up_to_the_rows = offset(0) == 0 && offset(entries.types) == entries.count;
  assert(lengths_add_up_to_the_rows);
}

// Entries [begin, end) of one type.
struct Range {
  int type;
  int64_t begin, end;
};

// The entries of tile `tile`, where the entries of every type are divided into tiles of `size`. Type t gets
// offsets[t + 1] / size - offsets[t] / size + 1 tiles, which always suffice, and its first tile is
// offsets[t] / size + t, so the type of a tile follows from the offsets alone. The range is inside the entries whatever
// the offsets hold. To be called by whole warps: a block cannot begin before it has its range, and a search with 32
// probes per step takes a third of the steps.
__device__ __forceinline__ Range range_of_tile(const Entries& entries, int64_t tile, int size) {
  const auto offset = [ids = entries.offsets, wide = entries.wide](int64_t t) { return id_at(ids, wide, t); };
  const int lane = (threadIdx.y * blockDim.x + threadIdx.x) % 32;
  // The last type whose first tile is at most `tile`.
  const int type =
      static_cast<int>(find_last(entries.types - 1, lane, [=](int64_t t) { return offset(t) / size + t <= tile; }));
  const int64_t first = offset(type), begin = first + (tile - first / size - type) * size;
  const int64_t end = min(offset(type + 1), entries.count);
  return {type, max(begin, int64_t(0)), min(begin + size, end)};
}

// The entries of tile blockIdx.x. One warp searches for the block: if all did, float kernels that are short of
// registers would spill. To be called by the whole block.
__device__ __forceinline__ Range range_of_block(const Entries& entries, int size) {
  __shared__ Range found;
  if (threadIdx.x < 32) {
    const Range range = range_of_tile(entries, blockIdx.x, size);
    if (threadIdx.x == 0) found = range;
  }
  __syncthreads();
  return found;
}

}  // namespace edgeless::cuda::relational
