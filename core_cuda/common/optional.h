// The optional types of op signatures.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace edgeless {

template <class T>
using Optional = std::optional<T>;

using OptTensor = Optional<at::Tensor>;

}  // namespace edgeless
