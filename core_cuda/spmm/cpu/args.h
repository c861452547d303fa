// Arguments of the CPU kernels of SpMM and SDDMM. A is the opmath type.
#pragma once

#include <cstdint>

#include "../../common/cpu/views.h"

namespace edgeless::cpu {

template <class A>
struct SpmmArgs {
  Compressed graph;
  int64_t items_per_part;
  int64_t heads, width;  // a row is [heads, width]

  Rows x;           // [columns, heads, width]
  const A* weight;  // [E, heads] with the strides below, null: 1
  int64_t weight_edge_stride, weight_head_stride;
  const A* column_scale;  // [columns], null: 1
  const A* row_scale;     // [rows], null: 1
  OutRows out;            // [rows, heads, width]
  A* carry;               // fix-up workspace, [parts, 2, heads * width]: sums of rows that parts share

  Rows own;     // SDDMM: destination rows, [rows, heads, width]
  A* products;  // SDDMM: [E, heads]
};

enum class SpmmPass : uint8_t { product, sampled };

template <class A>
struct SpmmKernels {
  int64_t (*scratch_size)(const SpmmArgs<A>&);
  void (*run)(SpmmPass, const SpmmArgs<A>&, int64_t part, A* scratch);
  void (*merge)(const SpmmArgs<A>&, int64_t part, A* scratch);
};

}  // namespace edgeless::cpu
