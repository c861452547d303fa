// Every instruction set compiles these headers, in this order: each uses those before it.
// clang-format off
#include "../../common/cpu/vec.h"
#include "../../common/cpu/rows.h"
#include "../../common/cpu/gather.h"
#include "blocks.h"
#include "scores.h"
#include "edge_term.h"
#include "draws.h"
#include "chunk.h"
#include "state.h"
#include "softmax.h"
#include "passes.h"
