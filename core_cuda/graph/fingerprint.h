// Hashes of arrays of ids, over all elements or a sample, to detect changed contents.
#pragma once

#include <cstdint>

namespace edgeless {

inline constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15ull;  // 2^64 / the golden ratio, odd

inline std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ value) * kGolden;
  return hash ^ (hash >> 32);
}

// Hashes `count` elements, `stride` apart. A single changed element always changes the hash, because mix() is a
// bijection in either argument. Eight independent lanes hide the latency of the dependent mix() steps.
template <typename T>
std::uint64_t hash_all(const T* data, std::int64_t count, std::int64_t stride) {
  constexpr int kLanes = 8;
  std::uint64_t lanes[kLanes] = {1, 2, 3, 4, 5, 6, 7, 8};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int k = 0; k < kLanes; ++k) lanes[k] = mix(lanes[k], static_cast<std::uint64_t>(data[(i + k) * stride]));
  }
  std::uint64_t hash = static_cast<std::uint64_t>(count);
  for (; i < count; ++i) hash = mix(hash, static_cast<std::uint64_t>(data[i * stride]));
  for (const std::uint64_t lane : lanes) hash = mix(hash, lane);
  return hash;
}

// Hashes the last element and `samples` others, the first among them. Multiples of the golden ratio modulo 1 are spread
// evenly but not periodically, so a regular pattern of edits cannot avoid all samples. `count` > 0.
template <typename T>
std::uint64_t hash_sample(const T* data, std::int64_t count, std::int64_t stride, int samples) {
  std::uint64_t hash = static_cast<std::uint64_t>(data[(count - 1) * stride]), place = 0;
  for (int k = 0; k < samples; ++k, place += kGolden) {
    // count * (place / 2^64) in 32-bit halves, whose products do not overflow
    const std::uint64_t n = static_cast<std::uint64_t>(count), part = place >> 32;
    const std::uint64_t i = part * (n >> 32) + ((part * (n & 0xFFFFFFFFu)) >> 32);
    hash = mix(hash, static_cast<std::uint64_t>(data[static_cast<std::int64_t>(i) * stride]));
  }
  return hash;
}

}  // namespace edgeless
