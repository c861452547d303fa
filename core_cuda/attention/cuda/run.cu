// The dispatch over scores and storage types; the kernels are in instances/.
#include "kernels.h"
#include "scores.cuh"

namespace edgeless::cuda {

template <class S, class Fn>
cudaError_t run_instance(const Problem&, const Plan&, const Args<Arithmetic<S>>&, cudaStream_t);

template <class S>
static cudaError_t run_score(const Problem& problem, const Plan& plan, const Args<Arithmetic<S>>& args,
                             cudaStream_t stream) {
#define EDGELESS_RUN(name, functor) \
  case Score::name: return run_instance<S, functor>(problem, plan, args, stream);
  switch (problem.score) { EDGELESS_SCORES(EDGELESS_RUN) }
#undef EDGELESS_RUN
  return cudaErrorInvalidValue;
}

template <>
cudaError_t run_pass(const Problem& problem, const Plan& plan, const Args<float>& args, cudaStream_t stream) {
  switch (problem.storage) {
    case Storage::f32: return run_score<float>(problem, plan, args, stream);
    case Storage::f16: return run_score<__half>(problem, plan, args, stream);
    case Storage::bf16: return run_score<__nv_bfloat16>(problem, plan, args, stream);
    case Storage::f16x4: return run_score<OfFour<__half>>(problem, plan, args, stream);
    case Storage::bf16x4: return run_score<OfFour<__nv_bfloat16>>(problem, plan, args, stream);
    default: return cudaErrorInvalidValue;
  }
}

template <>
cudaError_t run_pass(const Problem& problem, const Plan& plan, const Args<double>& args, cudaStream_t stream) {
  return run_score<double>(problem, plan, args, stream);
}

}  // namespace edgeless::cuda
