// What a CPU min/max kernel is given.
#pragma once

#include <cstdint>

#include "../../common/cpu/views.h"

namespace edgeless::cpu {

struct ReduceArgs {
  Compressed graph;
  int64_t items_per_part;
  int64_t width;
  int64_t graph_columns;  // sources
  bool is_min;
  double fill;  // of rows without edges

  Rows x;            // [columns, width]
  OutRows out;       // [rows, width]
  void* arg;         // [rows, width] position within the row, of arg_size bytes
  int64_t arg_size;  // 1, 2 or 4
  uint8_t* tied;     // [rows]: some element of the row may have its extremum twice; null: the first takes all
  bool zero_shares;  // where the extremum is 0, the zero that a scatter starts from counts as one more
  void* carry;       // forward: [parts, 2, padded width] of A and of positions, and a number; backward: of A, unpadded

  // backward
  Rows grad_out, saved_out;  // [rows, width]
  OutRows grad_x;            // [columns, width]
  Compressed transposed;     // the CSC: its edge ids are those of `graph`
  int64_t slice;             // columns that scatter() does at a time, whole cache lines of A; 0: gather()
  const int32_t* positions;  // [edges] within the row, by edge id; null: edge ids are positions in `graph`
};

template <class A>
struct ReduceKernels {
  int64_t (*scratch_size)(const ReduceArgs&);
  void (*run)(const ReduceArgs&, int64_t part, A* scratch);
  void (*merge)(const ReduceArgs&, int64_t part, A* scratch);
  // The gradient: gather, merge_gather and share, or scatter; see gradient.h.
  void (*gather)(const ReduceArgs&, int64_t part, A* scratch);
  void (*merge_gather)(const ReduceArgs&, int64_t part, A* scratch);
  void (*share)(const ReduceArgs&, int64_t first, int64_t last, A* scratch);
  void (*scatter)(const ReduceArgs&, int64_t first, int64_t last, A* scratch);
};

}  // namespace edgeless::cpu
