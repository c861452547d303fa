// The list of attention scores, shared by all of the core. No torch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

// EACH(name, functor): the user-visible name of a score and the struct that implements it in
// attention/cpu/scores.h and attention/cuda/scores.cuh. The dispatch of both devices, the Python names and the lists of
// the tests derive from this list.
#define EDGELESS_SCORES(EACH) \
  EACH(dot, DotScore)         \
  EACH(gatv2, Gatv2Score)     \
  EACH(gat, GatScore)         \
  EACH(cosine, CosineScore)

namespace edgeless {

#define EDGELESS_NAME(name, functor) name,
enum class Score : uint8_t { EDGELESS_SCORES(EDGELESS_NAME) };
#undef EDGELESS_NAME

#define EDGELESS_STRING(name, functor) #name,
constexpr std::array kScoreNames{EDGELESS_SCORES(EDGELESS_STRING)};
#undef EDGELESS_STRING

constexpr const char* name_of(Score score) { return kScoreNames[static_cast<size_t>(score)]; }

// True if the values are the keys: an edge then gathers one row.
constexpr bool values_are_keys(Score score) { return score == Score::gatv2 || score == Score::cosine; }

// The passes of the CUDA kernels.
namespace cuda {
enum class Pass : uint8_t { forward, by_dst, by_src };
}

}  // namespace edgeless
