// The names of the CUDA runtime that kernel headers use and NVRTC does not declare.
#pragma once

typedef struct CUstream_st* cudaStream_t;
