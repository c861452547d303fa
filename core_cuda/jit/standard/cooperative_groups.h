// The part of <cooperative_groups.h> that kernels use: a barrier for all blocks of a cooperative launch. CUDA's own
// header includes others that PyTorch does not bring along.
#pragma once

namespace cooperative_groups {

struct grid_group {
  unsigned* barrier;  // counts the blocks that arrive; its highest bit changes with the last of them

  __device__ __forceinline__ void sync() const {
    __syncthreads();
    if (threadIdx.x + threadIdx.y + threadIdx.z == 0) {
      const bool first = blockIdx.x + blockIdx.y + blockIdx.z == 0;
      const unsigned added = first ? 0x80000000u - (gridDim.x * gridDim.y * gridDim.z - 1) : 1;
      unsigned before, now;
      asm volatile("atom.add.release.gpu.u32 %0, [%1], %2;" : "=r"(before) : "l"(barrier), "r"(added) : "memory");
      do {
        asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(now) : "l"(barrier) : "memory");
      } while (((before ^ now) & 0x80000000u) == 0);
    }
    __syncthreads();
  }
};

// The driver leaves the address of the launch's workspace, whose second word is the barrier, in two registers.
__device__ __forceinline__ grid_group this_grid() {
  unsigned high, low;
  asm("mov.u32 %0, %%envreg1;" : "=r"(high));
  asm("mov.u32 %0, %%envreg2;" : "=r"(low));
  return {reinterpret_cast<unsigned*>(static_cast<unsigned long long>(high) << 32 | low) + 1};
}

}  // namespace cooperative_groups
