// Launches the kernels of typed_rows.cuh.
#include "typed_rows.h"

#include <algorithm>

#include "../../common/kernel_types.h"
#include "../../jit/launch.h"
#include "expression.h"
#include "geometry.h"

namespace edgeless::cuda::relational {

namespace {

// size: elements of a vector.
jit::Shape rows_shape(const TypedRowsArgs& args, int size) {
  const int vectors = args.width / size;
  int lanes = 1;
  while (lanes < 32 && lanes < vectors) lanes *= 2;
  return {{num_tiles(args.entries.count, args.entries.types, args.chunk), (vectors + lanes - 1) / lanes},
          {lanes, typed_rows::kThreads / lanes}};
}

// Elements of the vectors in which rows are read: 16 bytes, or one element.
int vector_size(Storage storage, const TypedRowsArgs& args) {
  const auto aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  const bool all =
      aligned(args.grad) && aligned(args.y) && aligned(args.x) && aligned(args.out_y) && aligned(args.out_x);
  return typed_rows_vector(storage, args.width, all);
}

}  // namespace

void run_typed_blend(Storage storage, const TypedRowsArgs& args, const jit::Queue& queue) {
  const int size = vector_size(storage, args);
  jit::launch(queue, blend_expression(storage, size), rows_shape(args, size), args);
}

void run_typed_sums(Storage storage, const TypedRowsArgs& args, const jit::Queue& queue) {
  using typed_rows::kLanes, typed_rows::kSides;
  constexpr int kMostOfGrid = 65535;  // maximum size of a grid's second dimension
  const int size = vector_size(storage, args);
  const bool blends = args.alpha != nullptr;
  jit::launch(queue, typed_sums_expression(storage, size, blends), rows_shape(args, size), args);
  if (!args.partial) return;
  const jit::Size grid(args.total ? 1 : (args.width + kLanes - 1) / kLanes, std::min(args.entries.types, kMostOfGrid));
  jit::launch(queue, {kTypedRowsHeader, "relational::typed_rows::add_partials_kernel", {type_of(storage)}},
              {grid, {kLanes, kSides}}, args);
}

}  // namespace edgeless::cuda::relational
