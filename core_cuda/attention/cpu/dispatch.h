// Chooses the kernel table of a call by the instruction sets of this machine and the head dims.
#pragma once

#include <cstdint>

#include "../../common/cpu/capability.h"
#include "kernels.h"

namespace edgeless::cpu {

// Cost of a row in vectors of `width` elements. A head that is no multiple of the width needs a padded copy of every
// gathered row, which costs about as much as the row's arithmetic, so it counts twice. The width is chosen by the keys
// where the score has any, since ops without values must sum logits in the same order.
inline int64_t row_cost(int64_t elements, int64_t width) {
  return (elements + width - 1) / width * (elements % width ? 2 : 1);
}

template <class A>
Kernels<A> choose_kernels(Score score, int64_t dim, int64_t channels) {
  int bytes = 16;
  int64_t least = 0;
  const int widest = capability() == Capability::avx512 ? 64 : capability() == Capability::avx2 ? 32 : 16;
  for (int candidate = 16; candidate <= widest; candidate *= 2) {
    const int64_t width = candidate / static_cast<int64_t>(sizeof(A));
    const int64_t cost = row_cost(score == Score::gat ? channels : dim, width);
    if (candidate == 16 || cost < least) {
      bytes = candidate;
      least = cost;
    }
  }
  const int64_t width = bytes / static_cast<int64_t>(sizeof(A));
  const int64_t vectors = (channels + width - 1) / width;
  const bool alike = score == Score::gat || (dim + width - 1) / width == vectors;
  const int64_t fixed = alike ? vectors : 0;
#if EDGELESS_X86
  if (bytes == 64) return avx512::kernels<A>(score, fixed);
  if (bytes == 32) return avx2::kernels<A>(score, fixed);
#endif
  return baseline::kernels<A>(score, fixed);
}

}  // namespace edgeless::cpu
