// Arguments of the CPU projection kernels: float32 products of many rows with a matrix that fits in the caches.
#pragma once

#include <cstdint>

namespace edgeless::cpu {

// One linear map of the rows: out = x weight^T + bias, [rows, width].
struct ProjectionMap {
  int64_t width;
  const float* weight;  // [F, width], packed by pack()
  const float* bias;    // [width], null: none
  float* out;           // [rows, width] contiguous
  bool bypass;          // out exceeds the caches: use streaming stores

  // backward
  const float* grad;  // [rows, width]
  int64_t grad_stride;
};

struct ProjectionArgs {
  const float* x;  // [rows, features]
  int64_t features, x_stride;
  const ProjectionMap* maps;
  int64_t num_maps;

  int64_t block_stride;  // row stride of a block of kProjectionRows rows: of x, in the backward of all maps' gradients

  // backward
  int64_t columns;       // total width of all maps
  const float* weights;  // all weights stacked and packed, [columns, features]; null: no grad_x
  float* grad_x;         // [rows, features]
  bool bypass;
};

struct ProjectionKernels {
  // Elements of a packed matrix [k, n].
  int64_t (*packed_size)(int64_t k, int64_t n);
  // Packs b, whose element (k, n) is at b[k * k_stride + n * n_stride], for the kernels below.
  void (*pack)(const float* b, int64_t k_stride, int64_t n_stride, int64_t k, int64_t n, float* packed);
  // Rows [begin, end) of every map's out. block: [kProjectionRows, block_stride].
  void (*forward)(const ProjectionArgs&, int64_t begin, int64_t end, float* block);
  // Rows [begin, end): writes grad_x, adds x^T grad to grad_weight [features, block_stride] and the column sums of the
  // gradient to grad_bias [block_stride]; null: not needed. The padding of `block` must be zero.
  void (*backward)(const ProjectionArgs&, int64_t begin, int64_t end, float* grad_weight, float* grad_bias,
                   float* block);
};

// Rows of a block, which stays in L2.
constexpr int64_t kProjectionRows = 96;

}  // namespace edgeless::cpu
