// The C++ name of an attention kernel: its header and the expression that instantiates it, for printed plans and for
// the runtime compiler. No CUDA and no torch.
#pragma once

#include <string>

#include "../../jit/kernel_name.h"
#include "kernel_table.h"

namespace edgeless::cuda {

inline const char* type_of(Storage storage) {
  switch (storage) {
    case Storage::f32: return "float";
    case Storage::f64: return "double";
    case Storage::f16: return "__half";
    case Storage::bf16: return "__nv_bfloat16";
    case Storage::f16x4: return "edgeless::cuda::OfFour<__half>";
    case Storage::bf16x4: return "edgeless::cuda::OfFour<__nv_bfloat16>";
  }
  return "";
}

inline const char* functor_of(Score score) {
#define EDGELESS_FUNCTOR(name, functor) \
  case Score::name: return "edgeless::cuda::" #functor;
  switch (score) { EDGELESS_SCORES(EDGELESS_FUNCTOR) }
#undef EDGELESS_FUNCTOR
  return "";
}

// The kernel of a pass; instances.cuh launches it with the same arguments.
inline jit::KernelName name_of(Pass pass, Score score, Storage storage, const Kernel& kernel) {
  static const char* const passes[] = {"forward", "by_dst", "by_src"};
  const std::string file = (kernel.mma ? "mma_" : "") + std::string(passes[static_cast<int>(pass)]);
  const auto number = [](int value) { return std::to_string(value); };
  const auto flag = [](bool value) { return std::string(value ? "true" : "false"); };
  std::string arguments = std::string(functor_of(score)) + ", " + type_of(storage) + ", ";
  if (kernel.mma) {
    arguments += number(kernel.lanes) + ", " + number(kernel.vectors) + ", " + number(kernel.edges) + ", " +
                 flag(kernel.whole) + ", ";
  } else {
    arguments += std::string(kernel.wide_index ? "int64_t" : "int32_t") + ", " + number(kernel.vectors) +
                 ", edgeless::cuda::TeamShape<" + number(kernel.lanes) + ", " + number(kernel.edges) + ", " +
                 flag(kernel.spread) + ">, ";
  }
  return {"attention/cuda/" + file + ".cuh",
          "edgeless::cuda::" + file + "_kernel<" + arguments + number(kernel.mode) + ">"};
}

}  // namespace edgeless::cuda
