// Rows of 16-bit numbers times a number each, rounded to 16 bits: memory decides.
#include "../../common/vec.cuh"
#include "blocks.h"

namespace edgeless::cuda::wsb {
namespace {

constexpr int kThreads = 256;

template <class S>
__global__ void scale_kernel(const __grid_constant__ ScaleArgs args) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.rows * args.vectors) return;
  const int64_t row = i / args.vectors;
  float x[8];
  unpack(load_once(args.x + row * args.x_row + i % args.vectors * 16), x, S{});
  const float scale = __ldg(args.scale + row);
#pragma unroll
  for (float& number : x) number *= scale;
  reinterpret_cast<uint4*>(args.out)[i] = pack(x, S{});
}

}  // namespace

cudaError_t run_scale(Storage storage, const ScaleArgs& args, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((args.rows * args.vectors + kThreads - 1) / kThreads);
  if (blocks == 0) return cudaSuccess;
  if (storage == Storage::bf16) {
    scale_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(args);
  } else {
    scale_kernel<__half><<<blocks, kThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

}  // namespace edgeless::cuda::wsb
