// The gathered rows of dot product attention over blocks (dot.cuh): a ring of steps in shared memory, and the packing
// of 16-bit pairs.
#pragma once

#include <cmath>
#include <type_traits>

#include "../../common/vec.cuh"
#include "../../projection/cuda/half_tiles.cuh"
#include "dot.h"

namespace edgeless::cuda::wsb {

constexpr float kBinary = kLog2e;  // converts natural logarithms to base 2

// Shared memory layout for heads of kDim elements (dot.h). Sizes are in 16-byte vectors.
template <DotPass kPass, int kDim>
struct DotShape {
  static constexpr int kVectors = kDim / 8, kGroups = kDotThreads / kVectors, kColumns = kBlockColumns / kGroups;
  static constexpr int kTile = dot_tile(kDim), kBlock = dot_block(kPass, kDim), kStages = dot_stages(kPass, kDim);

  // A swizzle: the eight rows that an ldmatrix reads together lie in different banks.
  static __device__ __forceinline__ int place(int row, int vector) {
    return row * kVectors + (vector ^ (kVectors >= 8 ? row / 4 * 2 + row % 2 : row / 4));
  }
};

// The column of a block at `index` of an mma. The permutation makes the four columns of a lane, and their bits,
// adjacent.
__device__ __forceinline__ int column_of(int index) { return index % 8 / 2 * 4 + index % 2 + index / 8 * 2; }

__device__ __forceinline__ void copy_number(void* to, const float* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(projection::shared_address(to)), "l"(from));
#endif
}

template <class S>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same_v<S, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

template <class S>
__device__ __forceinline__ float2 unpack_pair(uint32_t pair) {
  if constexpr (std::is_same_v<S, __nv_bfloat16>) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// The address of a row by one 32-bit multiplication.
__device__ __forceinline__ const char* row_of(const char* base, const HeadRows& rows, int row) {
  return base + uint64_t{static_cast<uint32_t>(row)} * rows.row;
}

// Shared memory -------------------------------------------------------------------------------------------------------

template <int kCount>
__device__ __forceinline__ void load_columns(const int32_t* from, int (&to)[kCount]) {
  if constexpr (kCount == 4) {
    const int4 all = __ldg(reinterpret_cast<const int4*>(from));
    to[0] = all.x, to[1] = all.y, to[2] = all.z, to[3] = all.w;
  } else if constexpr (kCount == 2) {
    const int2 all = __ldg(reinterpret_cast<const int2*>(from));
    to[0] = all.x, to[1] = all.y;
  } else {
    to[0] = __ldg(from);
  }
}

// A ring of shared memory stages, filled by cp.async. Each stage has kDotBlocks blocks of a window as [logit tile,
// value tile, bits, stats]. All threads of the block take part.
template <DotPass kPass, int kDim>
struct DotRing {
  using Of = DotShape<kPass, kDim>;
  const DotArgs& args;
  uint4* shared;
  const char *logit, *value;  // bases of the thread's vector of a column
  int next, end, head, group, vector;
  int columns[kDotBlocks][Of::kColumns];  // columns of the blocks to load next
  int stats_column;

  __device__ __forceinline__ DotRing(const DotArgs& args, uint4* shared, int begin, int end, int head)
      : args(args), shared(shared), next(begin), end(end), head(head) {
    group = threadIdx.x / Of::kVectors, vector = threadIdx.x % Of::kVectors;
    logit = args.column_logit.base + head * args.column_logit.head + vector * 16;
    value = args.column_value.base + head * args.column_value.head + vector * 16;
    find_columns();
  }

  __device__ __forceinline__ void find_columns() {
    if (next >= end) return;
    const auto of_block = [&](int b) {  // clamped to the last block
      return args.blocks.columns + int64_t{min(next + b, end - 1)} * kBlockColumns;
    };
#pragma unroll
    for (int b = 0; b < kDotBlocks; ++b) load_columns(of_block(b) + group * Of::kColumns, columns[b]);
    if constexpr (kPass == DotPass::by_src) {
      stats_column = __ldg(of_block(threadIdx.x / kBlockColumns % kDotBlocks) + threadIdx.x % kBlockColumns);
    }
  }

  __device__ __forceinline__ void load(int stage) {
    uint4* const to = shared + stage * kDotBlocks * Of::kBlock;
#pragma unroll
    for (int b = 0; b < kDotBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < Of::kColumns; ++i) {
        const int at = b * Of::kBlock + Of::place(group * Of::kColumns + i, vector);
        projection::copy_vector(to + at, row_of(logit, args.column_logit, columns[b][i]), true);
        projection::copy_vector(to + Of::kTile + at, row_of(value, args.column_value, columns[b][i]), true);
      }
    }
    const int bits_block = threadIdx.x / kBits, bits_vector = threadIdx.x % kBits;
    if (bits_block < kDotBlocks && next + bits_block < end) {
      const int64_t from = int64_t{next + bits_block} * kBits + bits_vector;
      projection::copy_vector(to + bits_block * Of::kBlock + 2 * Of::kTile + bits_vector,
                              reinterpret_cast<const uint4*>(args.blocks.bits) + from, true);
    }
    if constexpr (kPass == DotPass::by_src) {  // one float per thread: 2 blocks, 2 arrays, 16 columns
      static_assert(kDotThreads == kDotBlocks * 2 * kBlockColumns);
      const int b = threadIdx.x / kBlockColumns % kDotBlocks, array = threadIdx.x / kBlockColumns / kDotBlocks;
      float* const stats = reinterpret_cast<float*>(to + b * Of::kBlock + 2 * Of::kTile + kBits);
      copy_number(stats + array * kBlockColumns + threadIdx.x % kBlockColumns,
                  (array ? args.delta : args.logsumexp) + int64_t{stats_column} * args.heads + head);
    }
    next += kDotBlocks;
    find_columns();
  }
};

}  // namespace edgeless::cuda::wsb
