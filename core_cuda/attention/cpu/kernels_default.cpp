// The CPU attention kernels for the instruction set "default". The pragma, not a compiler flag, selects it, so one build
// serves every machine; headers of others stay outside of it.
#include "kernels.h"

#include "../../common/dropout.h"
#include "partition.h"

#define EDGELESS_VECTOR_BYTES 16
namespace edgeless::cpu::baseline {
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
