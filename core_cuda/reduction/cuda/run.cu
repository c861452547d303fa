// The dispatch over storage types; the kernels are in instances/.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "instance.h"

namespace edgeless::cuda::reduction {

template <class F>
static auto with_storage(Storage storage, F&& f) {
  switch (storage) {
    case Storage::f16: return f(Instance<__half>());
    case Storage::bf16: return f(Instance<__nv_bfloat16>());
    case Storage::f64: return f(Instance<double>());
    default: return f(Instance<float>());
  }
}

cudaError_t run_reduce(Storage storage, bool wide_index, bool shares, const ReduceArgs& args, cudaStream_t stream) {
  return with_storage(storage, [&](auto of) { return of.reduce(wide_index, shares, args, stream); });
}

int64_t piece_bytes(Storage storage, bool wide_index, bool shares) {
  return with_storage(storage, [&](auto of) { return of.piece_bytes(wide_index, shares); });
}

template <bool kShares>
static cudaError_t gather_shared(Storage storage, const GatherArgs& args, cudaStream_t stream) {
  switch (storage) {
    case Storage::f32: return gather_grad_instance<float, kShares>(args, stream);
    case Storage::f16: return gather_grad_instance<__half, kShares>(args, stream);
    case Storage::bf16: return gather_grad_instance<__nv_bfloat16, kShares>(args, stream);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t gather_grad(Storage storage, bool shares, const GatherArgs& args, cudaStream_t stream) {
  return shares ? gather_shared<true>(storage, args, stream) : gather_shared<false>(storage, args, stream);
}

cudaError_t sorted_grad(Storage storage, const SortArgs& args, cudaStream_t stream) {
  switch (storage) {
    case Storage::f16: return sorted_grad_instance<__half>(args, stream);
    case Storage::bf16: return sorted_grad_instance<__nv_bfloat16>(args, stream);
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t measure(Storage storage, const ScatterArgs& args, cudaStream_t stream) {
  return with_storage(storage, [&](auto of) { return of.measure(args, stream); });
}

cudaError_t slice(Storage storage, bool wide_index, const ScatterArgs& args, cudaStream_t stream) {
  return with_storage(storage, [&](auto of) { return of.slice(wide_index, args, stream); });
}

cudaError_t rest(Storage storage, bool wide_index, const ScatterArgs& args, cudaStream_t stream) {
  return with_storage(storage, [&](auto of) { return of.rest(wide_index, args, stream); });
}

cudaError_t shared_scatter_grad(Storage storage, bool wide_index, const SharedScatterArgs& args, cudaStream_t stream) {
  switch (storage) {
    case Storage::f32: return shared_scatter_grad_instance<float>(wide_index, args, stream);
    case Storage::f16: return shared_scatter_grad_instance<__half>(wide_index, args, stream);
    case Storage::bf16: return shared_scatter_grad_instance<__nv_bfloat16>(wide_index, args, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace edgeless::cuda::reduction
