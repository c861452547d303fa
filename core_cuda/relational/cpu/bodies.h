// Headers that every instruction set compiles. Each uses those before it.
// clang-format off
#include "../../common/cpu/vec.h"
#include "../../common/cpu/rows.h"
#include "../../common/cpu/gather.h"
#include "../../common/cpu/tiles.h"
#include "../../spmm/cpu/passes.h"
#include "passes.h"
