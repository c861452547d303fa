// The C++ types of kernels' template arguments. No CUDA and no torch.
#pragma once

#include <type_traits>

#include "../jit/expression.h"
#include "storage.h"

namespace edgeless::cuda {

inline constexpr jit::Type kFloatType{"float"}, kDoubleType{"double"}, kHalfType{"__half"},
    kBfloat16Type{"__nv_bfloat16"}, kHalfOfFourType{"edgeless::cuda::OfFour<__half>"},
    kBfloat16OfFourType{"edgeless::cuda::OfFour<__nv_bfloat16>"}, kInt32Type{"int32_t"}, kInt64Type{"int64_t"},
    kUint8Type{"uint8_t"}, kUint16Type{"uint16_t"}, kUint32Type{"uint32_t"}, kUint64Type{"uint64_t"};

// The type of stored values.
inline jit::Type type_of(Storage storage) {
  switch (storage) {
    case Storage::f32: return kFloatType;
    case Storage::f64: return kDoubleType;
    case Storage::f16: return kHalfType;
    case Storage::bf16: return kBfloat16Type;
    case Storage::f16x4: return kHalfOfFourType;
    case Storage::bf16x4: return kBfloat16OfFourType;
  }
  return kFloatType;
}

// Bytes of a stored value.
constexpr int size_of(Storage storage) { return storage == Storage::f64 ? 8 : storage == Storage::f32 ? 4 : 2; }

// The opmath type of a storage.
inline jit::Type opmath_of(Storage storage) { return storage == Storage::f64 ? kDoubleType : kFloatType; }

// The type A itself: float, double, int32_t or int64_t.
template <class A>
jit::Type type_of() {
  if constexpr (std::is_same_v<A, double>) return kDoubleType;
  if constexpr (std::is_same_v<A, int32_t>) return kInt32Type;
  if constexpr (std::is_same_v<A, int64_t>) return kInt64Type;
  if constexpr (std::is_same_v<A, float>) return kFloatType;
}

inline jit::Type index_type(bool wide) { return wide ? kInt64Type : kInt32Type; }

}  // namespace edgeless::cuda
