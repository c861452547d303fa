// Launches of the kernels for node logits and their gradients (node_logits.cuh).
#include "node_logits.cuh"

namespace edgeless::cuda::projection {
namespace {

template <class S>
cudaError_t launch_logits(const LogitsArgs& args, cudaStream_t stream) {
  const int64_t threads = (args.num_rows * args.heads) << args.team_log2;
  const unsigned blocks = static_cast<unsigned>((threads + kLogitsThreads - 1) / kLogitsThreads);
  if (args.fours) {
    logits_kernel<S, true><<<blocks, kLogitsThreads, 0, stream>>>(args);
  } else {
    logits_kernel<S, false><<<blocks, kLogitsThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

template <class S>
cudaError_t launch_gradients(const LogitsArgs& args, cudaStream_t stream) {
  const int width = args.heads * args.channels, columns = kLanes * kPer;
  const dim3 grid(static_cast<unsigned>(args.chunks), static_cast<unsigned>((width + columns - 1) / columns));
  if (args.fours) {
    gradients_kernel<S, true><<<grid, dim3(kLanes, kSides), 0, stream>>>(args);
  } else {
    gradients_kernel<S, false><<<grid, dim3(kLanes, kSides), 0, stream>>>(args);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t run_logits(Storage dtype, const LogitsArgs& args, cudaStream_t stream) {
  switch (dtype) {
    case Storage::f32: return launch_logits<float>(args, stream);
    case Storage::f16: return launch_logits<__half>(args, stream);
    case Storage::bf16: return launch_logits<__nv_bfloat16>(args, stream);
    default: return launch_logits<double>(args, stream);
  }
}

cudaError_t run_logit_gradients(Storage dtype, const LogitsArgs& args, cudaStream_t stream) {
  switch (dtype) {
    case Storage::f32: return launch_gradients<float>(args, stream);
    case Storage::f16: return launch_gradients<__half>(args, stream);
    case Storage::bf16: return launch_gradients<__nv_bfloat16>(args, stream);
    default: return launch_gradients<double>(args, stream);
  }
}

}  // namespace edgeless::cuda::projection
