// Every instruction set compiles these, in this order (each uses what stands before it).
// clang-format off
#include "../../common/cpu/vec.h"
#include "../../common/cpu/rows.h"
#include "../../common/cpu/gather.h"
#include "passes.h"

template SpmmKernels<float> spmm_kernels<float>();
template SpmmKernels<double> spmm_kernels<double>();
