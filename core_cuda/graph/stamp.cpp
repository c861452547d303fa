#include "stamp.h"

#include <ATen/Parallel.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <vector>

#include "fingerprint.h"

namespace edgeless {
namespace {

constexpr int64_t kFew = 4096;     // elements that take about a microsecond to hash
constexpr int64_t kSamples = 256;  // samples of all rows together
constexpr int64_t kPart = 1 << 15;

// Returns whether the memory may be a mapped file or shared with other processes: it comes neither from torch's
// allocator nor from NumPy, DLPack or a C++ program.
bool is_mapped(const c10::DataPtr& data) {
  static const c10::DeleterFnPtr lent =
      c10::InefficientStdFunctionContext::makeDataPtr(nullptr, [](void*) {}, c10::Device(c10::kCPU)).get_deleter();
  static const c10::DeleterFnPtr own = c10::GetCPUAllocator()->raw_deleter();
  const c10::DeleterFnPtr deleter = data.get_deleter();
  return deleter != own && deleter != lent && deleter != nullptr && deleter != c10::detail::deleteNothing;
}

template <typename T>
uint64_t fingerprint(const T* data, int64_t rows, int64_t row_stride, int64_t cols, int64_t stride, bool whole) {
  uint64_t hash = 0;
  for (int64_t r = 0; r < rows; ++r, data += row_stride) {
    if (!whole) {
      hash = mix(hash, hash_sample(data, cols, stride, static_cast<int>(std::max<int64_t>(kSamples / rows, 1))));
    } else if (cols <= kPart) {
      hash = mix(hash, hash_all(data, cols, stride));
    } else {
      std::vector<uint64_t> parts((cols + kPart - 1) / kPart);
      at::parallel_for(0, static_cast<int64_t>(parts.size()), 1, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) {
          parts[p] = hash_all(data + p * kPart * stride, std::min(kPart, cols - p * kPart), stride);
        }
      });
      hash = mix(hash, hash_all(parts.data(), static_cast<int64_t>(parts.size()), 1));
    }
  }
  return hash;
}

uint64_t fingerprint(const at::Tensor& t, bool whole) {
  const void* data = t.const_data_ptr();
  if (!t.is_cpu() || t.numel() == 0 || data == nullptr) return 0;
  const bool matrix = t.dim() == 2;
  if (!matrix && !t.is_contiguous()) return 0;  // no graph is built from such a tensor
  const int64_t rows = matrix ? t.size(0) : 1, row_stride = matrix ? t.stride(0) : 0;
  const int64_t cols = matrix ? t.size(1) : t.numel(), stride = matrix ? t.stride(1) : 1;
  const c10::Storage& storage = t.storage();
  const auto end = t.storage_offset() + (rows - 1) * row_stride + (cols - 1) * stride + 1;
  if (static_cast<size_t>(end) * t.itemsize() > storage.nbytes()) return 0;  // the owner has freed the storage
  whole = whole || t.numel() <= kFew || is_mapped(storage.data_ptr());
  const auto of = [&](auto type) {
    return fingerprint(static_cast<const decltype(type)*>(data), rows, row_stride, cols, stride, whole);
  };
  switch (t.itemsize()) {
    case 1: return of(uint8_t{});
    case 2: return of(uint16_t{});
    case 4: return of(uint32_t{});
    case 8: return of(uint64_t{});
    default: return 0;
  }
}

}  // namespace

void add_stamp(std::string& all, const at::Tensor& tensor, bool whole) {
  int64_t fields[16];
  size_t size = 0;
  const auto add = [&](int64_t field) { fields[size++] = field; };
  TORCH_CHECK_VALUE(tensor.dim() <= 4, "stamp: tensor must have at most 4 dimensions, got ", tensor.dim());
  add(tensor.is_inference() ? -1 : static_cast<int64_t>(tensor._version()));
  add(reinterpret_cast<int64_t>(tensor.const_data_ptr()));
  add(static_cast<int64_t>(tensor.scalar_type()));
  add(static_cast<int64_t>(tensor.device().type()));
  add(tensor.device().index());
  for (const int64_t extent : tensor.sizes()) add(extent);
  for (const int64_t stride : tensor.strides()) add(stride);
  add(static_cast<int64_t>(fingerprint(tensor, whole)));
  all += static_cast<char>(size);  // a length prefix, so that concatenated stamps are unambiguous
  all.append(reinterpret_cast<const char*>(fields), size * sizeof(fields[0]));
}

}  // namespace edgeless
