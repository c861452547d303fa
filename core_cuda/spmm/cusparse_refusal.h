// Unsupported reasons of the cuSPARSE engine, worded to follow "cusparse: ". Null: supported.
#pragma once

#include "../common/engine.h"
#include "inputs.h"

namespace edgeless {

// Returns why the library cannot be used at all.
const char* cusparse_library_refusal();

// Returns whether the library may synchronize with the GPU in a product of this element size. CUDA 13.0 does so in
// float32 on seven of eight graphs; float64 is assumed to do the same.
inline bool cusparse_waits(Engine engine, int64_t element_size) {
  return engine == Engine::cusparse && element_size >= 4;
}

// Returns why a product with x cannot be captured; null too if the current stream is not being captured.
const char* cusparse_capture_refusal(Engine engine, const at::Tensor& x);

// Returns why cuSPARSE does not compute a product of x [columns, F] or [columns, H, F], or sampled products of dst and
// src. The arguments must have passed the checks of their ops.
const char* cusparse_spmm_refusal(Engine engine, const at::Tensor& x, const OptTensor& weight, at::TensorList csr);
const char* cusparse_sddmm_refusal(const at::Tensor& dst, const at::Tensor& src, at::TensorList csr);

}  // namespace edgeless
