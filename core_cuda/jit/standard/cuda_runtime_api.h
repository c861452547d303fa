// What the kernels' headers name of the CUDA runtime beside what NVRTC declares itself.
#pragma once

typedef struct CUstream_st* cudaStream_t;
