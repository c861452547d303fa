#include "exact.cuh"
#include "kernels.h"

namespace edgeless::cuda {
namespace {

constexpr int kThreads = 256, kMostBlocks = 512;

__global__ void any_large_kernel(const float* logits, int64_t count, int* found) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  bool large = false;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < count; at += threads) {
    large |= is_large(logits[at] * float(kLog2e));
  }
  if (large) *found = 1;
}

}  // namespace

cudaError_t any_large(const float* logits, int64_t count, int* found, cudaStream_t stream) {
  const int64_t blocks = (count + kThreads - 1) / kThreads;
  any_large_kernel<<<static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks), kThreads, 0, stream>>>(
      logits, count, found);
  return cudaGetLastError();
}

}  // namespace edgeless::cuda
