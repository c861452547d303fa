// Launches the kernels of pair_weights.cuh.
#include "pair_weights.h"

#include "../../common/kernel_types.h"
#include "../../jit/launch.h"
#include "geometry.h"

namespace edgeless::cuda::relational {
namespace {

jit::Shape shape_of(const PairWeightsArgs& args) { return {{args.types, 2 * args.heads}, pair_weights::kThreads}; }

}  // namespace

void run_pair_weights(Storage rows, const PairWeightsArgs& args, const jit::Queue& queue) {
  const jit::Type stored = type_of(rows), parameters = args.wide ? kFloatType : stored;
  jit::launch(
      queue,
      {"relational/cuda/pair_weights.cuh", "relational::pair_weights::pair_weights_kernel", {stored, parameters}},
      shape_of(args), args);
}

void run_pair_weight_gradients(Storage rows, const PairWeightsArgs& args, const jit::Queue& queue) {
  const jit::Type parameters = args.wide ? kFloatType : type_of(rows);
  jit::launch(
      queue,
      {"relational/cuda/pair_weights.cuh", "relational::pair_weights::pair_weight_gradients_kernel", {parameters}},
      shape_of(args), args);
}

}  // namespace edgeless::cuda::relational
