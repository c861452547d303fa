// Launches the kernels of dot.cuh, sum.cuh and scale_rows.cuh.
#include <stdexcept>

#include "../../common/kernel_types.h"
#include "../../common/threads.h"
#include "../../jit/launch.h"
#include "dot.h"
#include "sum.h"

namespace edgeless::cuda::wsb {
namespace {

void check_16_bit(Storage storage) {
  if (storage != Storage::bf16 && storage != Storage::f16) {
    throw std::logic_error("edgeless: kernels over weighted sparse blocks take 16-bit storage");
  }
}

}  // namespace

void run_dot(DotPass pass, Storage storage, int dim, const DotArgs& args, const jit::Queue& queue) {
  check_16_bit(storage);
  if (dim != 32 && dim != 64 && dim != 128) {
    throw std::logic_error("edgeless: attention over weighted sparse blocks takes heads of 32, 64 or 128 elements");
  }
  const int64_t blocks = int64_t{args.blocks.windows} * args.heads;
  if (blocks == 0) return;
  const jit::Expression kernel("wsb/cuda/dot.cuh", "wsb::dot_kernel", {pass, type_of(storage), dim});
  jit::launch(queue, kernel, {blocks, kDotThreads, dot_bytes(pass, dim)}, args);
}

void run_sum(Storage storage, const SumArgs& args, const jit::Queue& queue) {
  check_16_bit(storage);
  const int split = args.shared_windows ? kSumWarps : 1;
  const int64_t blocks = int64_t{args.blocks.windows} * num_parts(args, split);
  if (blocks == 0) return;
  const jit::Expression kernel("wsb/cuda/sum.cuh", "wsb::sum_kernel", {type_of(storage), split});
  jit::launch(queue, kernel, {blocks, kSumWarps * 32, kSharedBytes}, args);
}

void run_scale(Storage storage, const ScaleArgs& args, const jit::Queue& queue) {
  check_16_bit(storage);
  const int64_t blocks = blocks_for(args.rows * args.vectors);
  if (blocks == 0) return;
  const jit::Expression kernel("wsb/cuda/scale_rows.cuh", "wsb::scale_kernel", {type_of(storage)});
  jit::launch(queue, kernel, {blocks, kThreads}, args);
}

}  // namespace edgeless::cuda::wsb
