// What a CPU min/max kernel is given.
#pragma once

#include <cstdint>

#include "../../common/cpu/views.h"

namespace edgeless::cpu {

struct ReduceArgs {
  Compressed graph;
  int64_t items_per_part;
  int64_t width;
  bool is_min;
  double fill;  // of rows without edges

  Rows x;            // [columns, width]
  OutRows out;       // [rows, width]
  void* arg;         // [rows, width] position within the row, of arg_size bytes
  int64_t arg_size;  // 1, 2 or 4
  uint8_t* tied;     // [rows]: some element of the row may have its extremum twice; null: the first takes all
  bool zero_shares;  // where the extremum is 0, the zero that a scatter starts from counts as one more
  void* carry;       // [parts, 2, width] of A, then [parts, 2, width] of int32, then [parts, 2] of int32 for ties

  // backward
  Rows grad_out, saved_out;  // [rows, width]
  void* grad_x;              // [columns, width] of A, zero before
};

template <class A>
struct ReduceKernels {
  int64_t (*scratch_size)(const ReduceArgs&);
  void (*run)(const ReduceArgs&, int64_t part, A* scratch);
  void (*merge)(const ReduceArgs&, int64_t part, A* scratch);
  // Adds the gradient of the columns [first, last) of every row.
  void (*backward)(const ReduceArgs&, int64_t first, int64_t last, A* scratch);
};

}  // namespace edgeless::cpu
