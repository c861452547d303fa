// Arguments of the CPU kernels of min and max over in-neighbors.
#pragma once

#include <cstdint>

#include "../../common/cpu/views.h"

namespace edgeless::cpu {

struct ReduceArgs {
  Compressed graph;
  int64_t items_per_part;
  int64_t width;
  int64_t graph_columns;  // number of source nodes
  bool is_min;
  double fill;  // result of rows without edges

  Rows x;            // [columns, width]
  OutRows out;       // [rows, width]
  void* arg;         // [rows, width] position of the extremum within its row, in arg_size bytes; null: not requested
  int64_t arg_size;  // 1, 2 or 4
  uint8_t* tied;     // [rows]: whether an element of the row may have a tied extremum; null: the first edge takes all
  bool zero_shares;  // an extremum of 0 counts one more tie: the initial zero of torch's scatter_reduce
  void* carry;       // fix-up workspace. Forward: [parts, 2] states (see slot()); backward: [parts, 2, width] of A

  // backward
  Rows grad_out, saved_out;  // [rows, width]
  OutRows grad_x;            // [columns, width]
  Compressed transposed;     // the CSC, with the same edge ids as `graph`
  int64_t slice;             // columns of a feature tile of scatter(), whole cache lines of A; 0: gather()
  const int32_t* positions;  // [edges] position within the row, by edge id; null: edge ids are CSR indices
};

template <class A>
struct ReduceKernels {
  int64_t (*scratch_size)(const ReduceArgs&);
  void (*run)(const ReduceArgs&, int64_t part, A* scratch);
  void (*merge)(const ReduceArgs&, int64_t part, A* scratch);
  // The gradient: gather, merge_gather and share; or scatter. See gradient.h.
  void (*gather)(const ReduceArgs&, int64_t part, A* scratch);
  void (*merge_gather)(const ReduceArgs&, int64_t part, A* scratch);
  void (*share)(const ReduceArgs&, int64_t first, int64_t last, A* scratch);
  void (*scatter)(const ReduceArgs&, int64_t first, int64_t last, A* scratch);
};

}  // namespace edgeless::cpu
