// The scores of attention, for every part of the core. No torch.
#pragma once

#include <cstdint>

namespace edgeless {

enum class Score : uint8_t { dot, gatv2, gat, cosine };

// Whether the values are the keys: an edge then gathers one row.
constexpr bool values_are_keys(Score score) { return score == Score::gatv2 || score == Score::cosine; }

}  // namespace edgeless
