// The cuSPARSE library, opened at its first use. The extension does not link to it. Declares what the engine
// calls, as of the library's version 12, whose interface is stable. No CUDA header and no torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "../jit/queue.h"

namespace edgeless::cusparse {

using Handle = void*;  // cusparseHandle_t
using Sparse = void*;  // cusparseSpMatDescr_t
using Dense = void*;   // cusparseDnMatDescr_t

constexpr int kSuccess = 0, kNotSupported = 10;         // cusparseStatus_t
constexpr int kAsIs = 0, kTransposed = 1;               // cusparseOperation_t
constexpr int kFromZero = 0;                            // cusparseIndexBase_t
constexpr int kInt32 = 2, kInt64 = 3;                   // cusparseIndexType_t
constexpr int kByRows = 2;                              // cusparseOrder_t
constexpr int kFloat = 0, kDouble = 1;                  // cudaDataType
constexpr int kHalf = 2, kBfloat16 = 14;                // cudaDataType
constexpr int kCsrAlgorithm2 = 6, kCsrAlgorithm3 = 12;  // cusparseSpMMAlg_t
constexpr int kUsualSampled = 0;                        // cusparseSDDMMAlg_t

// Factors are in host memory. All functions except error_string() return a status.
struct Library {
  int (*create)(Handle*) = nullptr;
  int (*set_stream)(Handle, void* stream) = nullptr;
  const char* (*error_string)(int status) = nullptr;

  int (*create_csr)(Sparse*, int64_t rows, int64_t columns, int64_t edges, void* indptr, void* indices, void* values,
                    int indptr_type, int indices_type, int base, int value_type) = nullptr;
  int (*destroy_sparse)(Sparse) = nullptr;
  int (*set_sparse_values)(Sparse, void*) = nullptr;
  int (*create_dense)(Dense*, int64_t rows, int64_t columns, int64_t stride, void* values, int value_type,
                      int order) = nullptr;
  int (*destroy_dense)(Dense) = nullptr;
  int (*set_dense_values)(Dense, void*) = nullptr;

  // result = alpha * a @ b + beta * result.
  int (*spmm_buffer_size)(Handle, int of_a, int of_b, const void* alpha, Sparse a, Dense b, const void* beta,
                          Dense result, int compute_type, int algorithm, size_t* bytes) = nullptr;
  int (*spmm)(Handle, int of_a, int of_b, const void* alpha, Sparse a, Dense b, const void* beta, Dense result,
              int compute_type, int algorithm, void* buffer) = nullptr;

  // The same, computed only at the nonzeros of `result`.
  int (*sddmm_buffer_size)(Handle, int of_a, int of_b, const void* alpha, Dense a, Dense b, const void* beta,
                           Sparse result, int compute_type, int algorithm, size_t* bytes) = nullptr;
  int (*sddmm_preprocess)(Handle, int of_a, int of_b, const void* alpha, Dense a, Dense b, const void* beta,
                          Sparse result, int compute_type, int algorithm, void* buffer) = nullptr;
  int (*sddmm)(Handle, int of_a, int of_b, const void* alpha, Dense a, Dense b, const void* beta, Sparse result,
               int compute_type, int algorithm, void* buffer) = nullptr;

  std::string refusal;  // why these functions cannot be called; empty: they can
};

// Prefers the library that torch has loaded to one that the loader finds.
const Library& library();

// Throws std::runtime_error unless status is kSuccess. call: the function that returned it.
void check(int status, const char* call);

// The calling thread's handle for a device, which must be current, set to the queue's stream. Threads have handles of
// their own because a handle is used by one thread at a time.
Handle handle_for(const jit::Queue& queue);

}  // namespace edgeless::cusparse
