// Launches of the kernels that sum the columns of several matrices (column_sums.cuh).
#include "column_sums.cuh"

namespace edgeless::cuda::projection {
namespace {

template <class S>
cudaError_t launch(const ColumnSumsArgs& args, bool partial_sums, cudaStream_t stream) {
  int widest = 0;
  for (int t = 0; t < args.tensors; ++t) widest = args.columns[t].width > widest ? args.columns[t].width : widest;
  const dim3 block(kLanes, kSides);
  const auto blocks = [&](int columns) { return static_cast<unsigned>((widest + columns - 1) / columns); };
  const unsigned chunks = static_cast<unsigned>(args.chunks), tensors = static_cast<unsigned>(args.tensors);
  if (partial_sums && !args.partial) {
    few_rows_kernel<S><<<dim3(1, blocks(kLanes), tensors), dim3(kLanes, kManySides), 0, stream>>>(args);
    return cudaGetLastError();
  }
  if (partial_sums) {
    partial_sums_kernel<S><<<dim3(chunks, blocks(kLanes * kPer), tensors), block, 0, stream>>>(args);
  }
  add_chunks_kernel<S><<<dim3(1, blocks(kLanes), tensors), block, 0, stream>>>(args);
  return cudaGetLastError();
}

template <bool kPartialSums>
cudaError_t dispatch(Storage dtype, const ColumnSumsArgs& args, cudaStream_t stream) {
  switch (dtype) {
    case Storage::f32: return launch<float>(args, kPartialSums, stream);
    case Storage::f16: return launch<__half>(args, kPartialSums, stream);
    case Storage::bf16: return launch<__nv_bfloat16>(args, kPartialSums, stream);
    default: return launch<double>(args, kPartialSums, stream);
  }
}

}  // namespace

cudaError_t run_column_sums(Storage dtype, const ColumnSumsArgs& args, cudaStream_t stream) {
  return dispatch<true>(dtype, args, stream);
}

cudaError_t add_chunks(Storage dtype, const ColumnSumsArgs& args, cudaStream_t stream) {
  return dispatch<false>(dtype, args, stream);
}

}  // namespace edgeless::cuda::projection
