// The part of <cooperative_groups.h> that kernels use: a barrier for all blocks of a cooperative launch, implemented as
// in CUDA's own header, which includes headers that PyTorch does not ship.
#pragma once

namespace cooperative_groups {

struct grid_group {
  // Address of the driver's workspace for this launch; 0: the launch is not cooperative. Its second word is the
  // barrier, a count of arrived blocks, whose highest bit flips when the last block arrives.
  unsigned long long workspace;

  __device__ __forceinline__ void sync() const {
    if (workspace == 0) __trap();
    unsigned* const barrier = reinterpret_cast<unsigned*>(workspace) + 1;
    __barrier_sync(0);
    if (threadIdx.x + threadIdx.y + threadIdx.z == 0) {
      const unsigned blocks = gridDim.x * gridDim.y * gridDim.z;
      const unsigned arrives = blockIdx.x + blockIdx.y + blockIdx.z == 0 ? 0x80000000u - (blocks - 1) : 1;
      unsigned before, now;
      asm volatile("atom.add.release.gpu.u32 %0,[%1],%2;" : "=r"(before) : "l"(barrier), "r"(arrives) : "memory");
      do {
        asm volatile("ld.acquire.gpu.u32 %0,[%1];" : "=r"(now) : "l"(barrier) : "memory");
      } while (((before ^ now) & 0x80000000u) == 0);
    }
    __barrier_sync(0);
  }
};

// The driver stores the workspace's address to two registers.
__device__ __forceinline__ grid_group this_grid() {
  unsigned high, low;
  asm("mov.u32 %0, %%envreg1;" : "=r"(high));
  asm("mov.u32 %0, %%envreg2;" : "=r"(low));
  return {static_cast<unsigned long long>(high) << 32 | low};
}

}  // namespace cooperative_groups
