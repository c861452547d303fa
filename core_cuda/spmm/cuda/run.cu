// The dispatch over storage types; the kernels are in instances/.
#include "../../common/vec.cuh"
#include "kernels.h"

namespace edgeless::cuda::spmm {

template <class S>
cudaError_t spmm_instance(bool wide_index, int words, const SpmmArgs<Arithmetic<S>>& args, cudaStream_t stream);
template <class S>
cudaError_t sddmm_instance(bool wide_index, const SddmmArgs<Arithmetic<S>>& args, cudaStream_t stream);

template <>
cudaError_t run_spmm(Storage storage, bool wide_index, int words, const SpmmArgs<float>& args, cudaStream_t stream) {
  switch (storage) {
    case Storage::f32: return spmm_instance<float>(wide_index, words, args, stream);
    case Storage::f16: return spmm_instance<__half>(wide_index, words, args, stream);
    case Storage::bf16: return spmm_instance<__nv_bfloat16>(wide_index, words, args, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <>
cudaError_t run_spmm(Storage, bool wide_index, int words, const SpmmArgs<double>& args, cudaStream_t stream) {
  return spmm_instance<double>(wide_index, words, args, stream);
}

template <>
cudaError_t run_sddmm(Storage storage, bool wide_index, const SddmmArgs<float>& args, cudaStream_t stream) {
  switch (storage) {
    case Storage::f32: return sddmm_instance<float>(wide_index, args, stream);
    case Storage::f16: return sddmm_instance<__half>(wide_index, args, stream);
    case Storage::bf16: return sddmm_instance<__nv_bfloat16>(wide_index, args, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <>
cudaError_t run_sddmm(Storage, bool wide_index, const SddmmArgs<double>& args, cudaStream_t stream) {
  return sddmm_instance<double>(wide_index, args, stream);
}

}  // namespace edgeless::cuda::spmm
