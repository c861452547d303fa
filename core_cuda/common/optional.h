// The optional type of op signatures: std::optional, or c10::optional before torch 2.4.
#pragma once

#include <torch/version.h>

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 4
#include <optional>
#else
#include <c10/util/Optional.h>
#endif

namespace edgeless {

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 4
template <class T>
using Optional = std::optional<T>;
#else
template <class T>
using Optional = c10::optional<T>;
#endif

}  // namespace edgeless
