// The CPU attention kernels for the instruction set "avx2". The pragma, not a compiler flag, selects it, so one build
// serves every machine; headers of others stay outside of it.
#include "kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#include "../../common/dropout.h"
#include "partition.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define EDGELESS_VECTOR_BYTES 32
namespace edgeless::cpu::avx2 {
#include "vec.h"
// order matters below
#include "rows.h"
// clang-format off
#include "blocks.h"
#include "scores.h"
#include "edge_term.h"
#include "chunk.h"
#include "passes.h"
// clang-format on
}  // namespace
#pragma GCC pop_options
#endif
