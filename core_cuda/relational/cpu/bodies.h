// Every instruction set compiles these, in this order (each uses what stands before it).
// clang-format off
#include "../../common/cpu/vec.h"
#include "../../common/cpu/rows.h"
#include "../../common/cpu/gather.h"
#include "../../common/cpu/tiles.h"
#include "../../spmm/cpu/passes.h"
#include "passes.h"
