// Runs CUDA kernels on the host, for tests without a GPU: every thread of a block is a fiber, and those that meet at an
// exchange or a barrier wait for one another. Blocks run one after the other.
#pragma once

#include <math.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define asm(...)

using std::max;
using std::min;

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class To, class From>
inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

struct __half {
  _Float16 x;
};
struct __nv_bfloat16 {
  uint16_t x;
};
struct __half2 {
  __half x, y;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float __half2float(__half h) { return h.x; }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
inline float __bfloat162float(__nv_bfloat16 h) { return bits_as<float>(static_cast<uint32_t>(h.x) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const uint32_t word = bits_as<uint32_t>(x);
  if (x != x) return {0x7fff};
  return {static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16)};
}
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline __half2 __hneg2(__half2 h) { return {{static_cast<_Float16>(-h.x.x)}, {static_cast<_Float16>(-h.y.x)}}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline float __uint_as_float(uint32_t x) { return bits_as<float>(x); }
inline uint32_t __float_as_uint(float x) { return bits_as<uint32_t>(x); }
inline double __hiloint2double(uint32_t high, uint32_t low) {
  return bits_as<double>(static_cast<uint64_t>(high) << 32 | low);
}
inline int __double2loint(double x) { return static_cast<int>(bits_as<uint64_t>(x)); }
inline int __double2hiint(double x) { return static_cast<int>(bits_as<uint64_t>(x) >> 32); }
uint32_t __byte_perm(uint32_t, uint32_t, uint32_t);
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline float __expf(float x) { return expf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float a, float b) { return a / b; }

template <class T>
inline T __ldg(const T* at) {
  return *at;
}
template <class T>
inline T __ldcs(const T* at) {
  return *at;
}
template <class T>
inline void __stcs(T* at, const T& x) {
  *at = x;
}

namespace on_host {

struct Place {
  unsigned x = 0, y = 0, z = 0;
};
// What the lanes of a mask exchange, in turns.
struct Meeting {
  unsigned mask;
  uint64_t arrived[32] = {};
  unsigned char values[2][32][16];
};
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool done = true;
  uint64_t barriers = 0;
};
inline std::vector<Fiber> fibers;
inline std::vector<Meeting> meetings[32];
inline ucontext_t scheduler;
inline int current = 0;
inline uint64_t progress = 0;
inline Place thread_, block_;
inline uint4* dynamic = nullptr;  // shared memory

inline void pause() { swapcontext(&fibers[current].context, &scheduler); }

inline void fail(const char* why) {
  fprintf(stderr, "on_host: %s\n", why);
  abort();
}

// Leaves a value for the other lanes of a mask and waits for theirs.
inline const unsigned char (*exchange(unsigned mask, const void* value, size_t size))[16] {
  const int lane = current % 32, warp = current / 32;
  if (!(mask >> lane & 1)) fail("a lane that is not of the mask");
  auto& all = meetings[warp];
  size_t at = 0;
  while (at < all.size() && all[at].mask != mask) ++at;
  if (at == all.size()) all.push_back({mask});
  const uint64_t turn = all[at].arrived[lane] + 1;
  memcpy(all[at].values[turn % 2][lane], value, size);
  all[at].arrived[lane] = turn;
  auto ready = [&] {
    for (int l = 0; l < 32; ++l) {
      if ((mask >> l & 1) && !fibers[32 * warp + l].done && all[at].arrived[l] < turn) return false;
    }
    return true;
  };
  while (!ready()) pause();
  ++progress;
  return all[at].values[turn % 2];
}

template <class T>
inline T of_lane(unsigned mask, T x, int lane) {
  static_assert(sizeof(T) <= 16);
  const auto values = exchange(mask, &x, sizeof(x));
  if (!(mask >> lane & 1)) fail("a value of a lane that is not of the mask");
  T found;
  memcpy(&found, values[lane], sizeof(found));
  return found;
}

inline unsigned ballot(unsigned mask, bool holds) {
  const auto values = exchange(mask, &holds, 1);
  unsigned found = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) && !fibers[current / 32 * 32 + lane].done && values[lane][0]) found |= 1u << lane;
  }
  return found;
}

inline void barrier() {
  const uint64_t turn = ++fibers[current].barriers;
  auto ready = [&] {
    return std::all_of(fibers.begin(), fibers.end(), [&](const Fiber& f) { return f.done || f.barriers >= turn; });
  };
  while (!ready()) pause();
  ++progress;
}

inline bool any_of_block(bool holds) {
  static std::vector<char> all;
  all.resize(fibers.size());
  all[current] = holds;
  barrier();
  const bool found = std::any_of(all.begin(), all.end(), [](char x) { return x != 0; });
  barrier();
  return found;
}

template <class Args>
struct Launch {
  static inline void (*kernel)(Args);
  static inline const Args* args;
  static void run() {
    kernel(*args);
    fibers[current].done = true;
    pause();
  }
};

// Runs all blocks of a grid one after the other. In every other block the last thread runs first, since in one order a
// missing barrier may do no harm.
template <class Args>
inline void launch(void (*kernel)(Args), const char* words, int columns, int rows, int threads, int shared_bytes = 0) {
  std::vector<uint4> memory;
  Launch<Args>::kernel = kernel, Launch<Args>::args = reinterpret_cast<const Args*>(words);
  fibers.resize(threads);
  for (int block = 0; block < columns * rows; ++block) {
    block_ = {static_cast<unsigned>(block % columns), static_cast<unsigned>(block / columns), 0};
    memory.assign(shared_bytes / 16 + 1, uint4{~0u, ~0u, ~0u, ~0u});
    dynamic = memory.data();
    for (auto& all : meetings) all.clear();
    for (Fiber& fiber : fibers) {
      fiber.stack.assign(1 << 18, '\xff');
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, Launch<Args>::run, 0);
      fiber.done = false, fiber.barriers = 0;
    }
    for (bool left = true; left;) {
      left = false;
      const uint64_t before = progress;
      bool ended = false;
      for (int turn = 0; turn < threads; ++turn) {
        current = block % 2 ? threads - 1 - turn : turn;
        if (fibers[current].done) continue;
        thread_ = {static_cast<unsigned>(current), 0, 0};
        swapcontext(&scheduler, &fibers[current].context);
        ended |= fibers[current].done, left |= !fibers[current].done;
      }
      if (left && !ended && progress == before) fail("threads wait for one another");
    }
  }
}

}  // namespace on_host

#define threadIdx on_host::thread_
#define blockIdx on_host::block_

template <class T>
inline T __shfl_sync(unsigned mask, T x, int lane, int width = 32) {
  const int own = on_host::current % 32;
  return on_host::of_lane(mask, x, own / width * width + (lane & (width - 1)));
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T x, int step) {
  return on_host::of_lane(mask, x, on_host::current % 32 ^ step);
}
inline unsigned __ballot_sync(unsigned mask, bool holds) { return on_host::ballot(mask, holds); }
inline bool __any_sync(unsigned mask, bool holds) { return on_host::ballot(mask, holds) != 0; }
inline bool __all_sync(unsigned mask, bool holds) { return on_host::ballot(mask, !holds) == 0; }
inline void __trap() { on_host::fail("the kernel has stopped"); }
inline void __syncthreads() { on_host::barrier(); }
inline int __syncthreads_or(bool holds) { return on_host::any_of_block(holds); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { on_host::ballot(mask, true); }

// mma.m16n8k8 of TF32 values, whose lowest 13 bits do not count.
inline void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool fresh) {
  uint32_t left[32][4], right[32][4];
  memcpy(left, on_host::exchange(~0u, a, sizeof(a)), sizeof(left));
  memcpy(right, on_host::exchange(~0u, b, sizeof(b)), sizeof(right));
  const auto value = [](uint32_t word) { return static_cast<double>(__uint_as_float(word & 0xffffe000u)); };
  const int lane = on_host::current % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double sum = fresh ? 0 : c[i];
    for (int k = 0; k < 8; ++k) {
      sum += value(left[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]) * value(right[column * 4 + k % 4][k / 4]);
    }
    c[i] = static_cast<float>(sum);
  }
}

// mma.m16n8k16 of 16-bit values.
template <class S>
inline void multiply_halves(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t b[2] = {b0, b1};
  S left[32][8], right[32][4];
  memcpy(left, on_host::exchange(~0u, a, sizeof(a)), sizeof(left));
  const auto words = on_host::exchange(~0u, b, sizeof(b));
  for (int lane = 0; lane < 32; ++lane) memcpy(right[lane], words[lane], sizeof(b));
  const auto value = [](S x) -> double {
    if constexpr (std::is_same_v<S, __half>) {
      return __half2float(x);
    } else {
      return __bfloat162float(x);
    }
  };
  const int lane = on_host::current % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const int word = k % 8 / 2, part = k / 8 * 2;
      sum +=
          value(left[row % 8 * 4 + word][2 * (part + row / 8) + k % 2]) * value(right[column * 4 + word][part + k % 2]);
    }
    c[i] = static_cast<float>(sum);
  }
}
