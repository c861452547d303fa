// Attention dropout without a stored mask.
//
// Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011: the fewest rounds that pass
// every test of BigCrush) as a pure function of (seed, original edge id, head): forward and backward, CPU and CUDA draw
// the same mask, and no tensor of E elements is saved. One call serves four neighbouring heads.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define EDGELESS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define EDGELESS_HOST_DEVICE inline
#endif

namespace edgeless {

struct Philox4 {
  uint32_t lane[4];

  // The draw of a head. Selects instead of indexing, since a run-time index would move `lane` from registers to local
  // memory.
  EDGELESS_HOST_DEVICE uint32_t of(int head) const {
    const uint32_t low = head & 1 ? lane[1] : lane[0], high = head & 1 ? lane[3] : lane[2];
    return head & 2 ? high : low;
  }
};

constexpr int kPhiloxRounds = 7;
constexpr uint32_t kPhiloxFactor0 = 0xD2511F53u, kPhiloxFactor1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxKey0 = 0x9E3779B9u, kPhiloxKey1 = 0xBB67AE85u;

EDGELESS_HOST_DEVICE Philox4 philox(uint64_t seed, uint64_t edge_id, uint32_t head_group) {
  uint32_t c0 = static_cast<uint32_t>(edge_id), c1 = static_cast<uint32_t>(edge_id >> 32), c2 = head_group, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxFactor0) * c0;
    const uint64_t p1 = static_cast<uint64_t>(kPhiloxFactor1) * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += kPhiloxKey0;
    k1 += kPhiloxKey1;
  }
  return {{c0, c1, c2, c3}};
}

// A uniform 32-bit draw below the threshold is dropped; p = 1 drops everything.
EDGELESS_HOST_DEVICE uint64_t dropout_threshold(double p) { return static_cast<uint64_t>(p * 4294967296.0); }

// Sets the threshold and the scale 1 / (1 - p) in a kernel's arguments.
template <class Args>
void set_dropout_rate(Args& args, double p) {
  using A = decltype(args.keep_scale);
  args.threshold = dropout_threshold(p);
  args.keep_scale = p < 1 ? static_cast<A>(1 / (1 - p)) : A(0);
}

}  // namespace edgeless
