// What a cached graph compares to see whether a tensor that it was built from is still the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>

namespace edgeless {

inline constexpr size_t kStampBytes = 1 + 8 * 10;  // of a tensor of two dimensions

// Appends version (of inference tensors, which have none, -1), address, type, device, shape and strides of a strided
// tensor, and on the CPU a fingerprint of its contents, for the writes that raise no version: of all of them where they
// are few, where other processes can write to them (shared memory), and where `whole` asks for it; else of a sample.
// Nothing is read of tensors on other devices: that would wait for them.
void add_stamp(std::string& all, const at::Tensor& tensor, bool whole);

}  // namespace edgeless
