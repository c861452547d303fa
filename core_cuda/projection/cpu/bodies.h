// Compiled once per instruction set. The order matters: each file uses the ones above it.
// clang-format off
#include "../../common/cpu/vec.h"
#include "../../common/cpu/rows.h"
#include "../../common/cpu/gather.h"
#include "../../common/cpu/tiles.h"
#include "passes.h"
