// The kernels of SpMM and SDDMM: header and template arguments, for launches and printed plans. No CUDA and no torch.
#pragma once

#include "../../common/kernel_types.h"
#include "../plan.h"

namespace edgeless::cuda::spmm {

constexpr int kUsualBatch = 4;  // edges per batch, also of the functors that merge hubs

inline constexpr const char *kSumHeader = "spmm/cuda/product.cuh", *kSampledHeader = "spmm/cuda/sampled.cuh";

// The weights of a sum.
struct SumWeights {
  bool weighed = false;   // there are weights or scales of the sources
  bool by_head = false;   // a weight for each head
  bool in_order = false;  // an array of weights in CSR order exists
};

struct SumKernel {
  Weighing weighing;
  int batch;
};

// words: 4-byte words of a vector. 32-bit indices have more specialized kernels, most of them for vectors of 16 bytes.
inline SumKernel sum_kernel(bool wide_index, int words, const SumWeights& weights, int sub_warp_log2, int64_t num_edges,
                            int64_t num_rows) {
  if (wide_index) return {Weighing::by_head, kUsualBatch};
  const Weighing weighing = weighing_of(weights.weighed, weights.by_head, weights.in_order, sub_warp_log2);
  if (weighing == Weighing::by_head) return {weighing, kUsualBatch};
  if (words == 4) return {weighing, sum_batch(sub_warp_log2, num_edges, num_rows)};
  return {weighing == Weighing::by_edge_ahead ? weighing : Weighing::by_head, kUsualBatch};
}

inline jit::Expression sum_expression(Storage storage, bool wide_index, int words, const SumKernel& use) {
  return {kSumHeader, "spmm::spmm_kernel", {type_of(storage), index_type(wide_index), words, use.weighing, use.batch}};
}

// vectors: 16-byte vectors of a head.
inline jit::Expression sampled_expression(Storage storage, bool wide_index, int vectors) {
  const jit::Type stored = type_of(storage), index = index_type(wide_index);
  if (vectors == 1) return {kSampledHeader, "spmm::sddmm_few_kernel", {stored, index}};
  return {kSampledHeader, "spmm::sddmm_kernel", {stored, index, vectors <= 32}};
}

}  // namespace edgeless::cuda::spmm
