// Stamps of tensors: a cached graph compares them to see whether a tensor that it was built from has changed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>

namespace edgeless {

inline constexpr size_t kStampBytes = 1 + 8 * 10;  // size of the stamp of a two-dimensional tensor

// Appends version (-1 for inference tensors, which have none), address, dtype, device, shape and strides of a strided
// tensor, and on the CPU a fingerprint of its contents, to detect writes that raise no version. The fingerprint covers
// all elements where they are few, where other processes can write to them (shared memory), and with `whole`; else a
// sample. Contents on other devices are not read, because that would synchronize.
void add_stamp(std::string& all, const at::Tensor& tensor, bool whole);

}  // namespace edgeless
