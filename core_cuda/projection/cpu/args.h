// What a CPU projection kernel is given: float32 products of many rows and a matrix that fits the caches.
#pragma once

#include <cstdint>

namespace edgeless::cpu {

// One linear map of the rows: out = x weight^T + bias, [rows, width].
struct ProjectionMap {
  int64_t width;
  const float* weight;  // as pack() leaves it, [F, width]
  const float* bias;    // [width], null: none
  float* out;           // rows lie `width` apart
  bool bypass;          // larger than the caches: written around them

  // backward
  const float* grad;  // [rows, width]
  int64_t grad_stride;
};

struct ProjectionArgs {
  const float* x;  // [rows, features]
  int64_t features, x_stride;
  const ProjectionMap* maps;
  int64_t num_maps;

  int64_t block_stride;  // of a block of kProjectionRows rows of x, backward of the gradients of all maps side by side

  // backward
  int64_t columns;       // all maps' width together
  const float* weights;  // as pack() leaves all weights on top of each other, [columns, features]; null: not wanted
  float* grad_x;         // [rows, features]
  bool bypass;
};

struct ProjectionKernels {
  // Numbers that a packed matrix [k, n] takes.
  int64_t (*packed_size)(int64_t k, int64_t n);
  // b[k, n] at b[k * k_stride + n * n_stride] for the kernels below.
  void (*pack)(const float* b, int64_t k_stride, int64_t n_stride, int64_t k, int64_t n, float* packed);
  // Rows [begin, end) of every map's out. block: [kProjectionRows, block_stride].
  void (*forward)(const ProjectionArgs&, int64_t begin, int64_t end, float* block);
  // Rows [begin, end): writes grad_x, adds x^T grad to grad_weight [features, block_stride] and the sums of the
  // gradient's columns to grad_bias [block_stride] (null: not wanted). block is zero where it pads.
  void (*backward)(const ProjectionArgs&, int64_t begin, int64_t end, float* grad_weight, float* grad_bias,
                   float* block);
};

// Rows whose gradients of all maps are laid side by side at a time: they stay in the L2.
constexpr int64_t kProjectionRows = 96;

}  // namespace edgeless::cpu
