// The scores of attention, for every part of the core. No torch.
#pragma once

#include <cstdint>

namespace edgeless {

enum class Score : uint8_t { dot, gatv2, gat, cosine };

constexpr const char* name_of(Score score) {
  switch (score) {
    case Score::dot: return "dot";
    case Score::gatv2: return "gatv2";
    case Score::gat: return "gat";
    default: return "cosine";
  }
}

// Whether the values are the keys: an edge then gathers one row.
constexpr bool values_are_keys(Score score) { return score == Score::gatv2 || score == Score::cosine; }

// The passes of the kernels on a GPU.
namespace cuda {
enum class Pass : uint8_t { forward, by_dst, by_src };
}

}  // namespace edgeless
