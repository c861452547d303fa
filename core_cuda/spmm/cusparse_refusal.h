// What cuSPARSE does not compute for us, in words that go behind "cusparse: ".
#pragma once

#include "../engine.h"
#include "inputs.h"

namespace edgeless {

// Why the library cannot be used at all, null if it can.
const char* cusparse_library_refusal();

// Whether the library may wait for the GPU within a product of numbers of this size: seen with CUDA 13.0 in float32,
// for all but one of eight graphs. float64 is not taken for better.
inline bool cusparse_waits(Engine engine, int64_t element_size) {
  return engine == Engine::cusparse && element_size >= 4;
}

// Why a product with x cannot be captured; null if it can, or if the current stream is not being captured.
const char* cusparse_capture_refusal(Engine engine, const at::Tensor& x);

// Of a product of x [columns, F] or [columns, H, F] and of sampled products of rows, for arguments that their ops
// accept. Null: cuSPARSE computes it.
const char* cusparse_spmm_refusal(Engine engine, const at::Tensor& x, const OptTensor& weight, at::TensorList csr);
const char* cusparse_sddmm_refusal(const at::Tensor& dst, const at::Tensor& src, at::TensorList csr);

}  // namespace edgeless
