// Sums and blends of rows by type: at the speed of memory. A block has one chunk of entries of one type, and as many
// lanes side by side as a row has vectors, at most 32; its other threads take other entries. Sums are made chunk by
// chunk, then a second kernel adds the chunks of every type in an order that depends on the offsets alone.
#include "../../common/vec.cuh"
#include "../../projection/cuda/columns.cuh"
#include "entries.cuh"
#include "of_storage.cuh"
#include "typed_rows.h"

namespace edgeless::cuda::relational {
namespace {

using projection::kLanes, projection::kSides;

constexpr int kThreads = 256;

// kSize numbers side by side as arithmetic: one, or a vector of 16 bytes.
template <class S, int kSize>
__device__ __forceinline__ void read(const void* from, int64_t at, Arithmetic<S> (&to)[kSize]) {
  const S* numbers = static_cast<const S*>(from) + at;
  if constexpr (kSize == 1) {
    to[0] = to_arithmetic(*numbers);
  } else {
    unpack(load_once(reinterpret_cast<const char*>(numbers)), to, S{});
  }
}

template <class S, int kSize>
__device__ __forceinline__ void write(void* to, int64_t at, const Arithmetic<S> (&from)[kSize]) {
  S* numbers = static_cast<S*>(to) + at;
  if constexpr (kSize == 1) {
    *numbers = to_storage<S>(from[0]);
  } else {
    *reinterpret_cast<uint4*>(numbers) = pack(from, S{});
  }
}

template <class S, int kSize>
__global__ void __launch_bounds__(kThreads) blend_kernel(const __grid_constant__ TypedRowsArgs args) {
  check_offsets(args.entries);
  using A = Arithmetic<S>;
  const Range range = range_of_tile(args.entries, blockIdx.x, args.chunk);
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * kSize;
  if (range.begin >= range.end || column >= args.width) return;
  const EntryRows ids{nullptr, 0, args.rows};
  const A alpha = to_arithmetic(static_cast<const S*>(args.alpha)[range.type]), rest = A(1) - alpha;
#pragma unroll 4
  for (int64_t entry = range.begin + threadIdx.y; entry < range.end; entry += blockDim.y) {
    const int64_t at = row_of(ids, args.entries, entry) * args.width + column;
    A y[kSize], x[kSize];
    read<S>(args.y, at, y), read<S>(args.x, at, x);
#pragma unroll
    for (int i = 0; i < kSize; ++i) y[i] = alpha * y[i] + rest * x[i];
    write<S>(args.out_y, at, y);
  }
}

template <class S, int kSize, bool kBlend>
__global__ void __launch_bounds__(kThreads) partial_sums_kernel(const __grid_constant__ TypedRowsArgs args) {
  check_offsets(args.entries);
  using A = Arithmetic<S>;
  __shared__ A shared[kSize][kThreads];
  const Range range = range_of_tile(args.entries, blockIdx.x, args.chunk);
  if (range.begin >= range.end) return;
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * kSize;
  const EntryRows ids{nullptr, 0, args.rows};
  A sum[kSize] = {}, alpha = 0, rest = 0;
  if constexpr (kBlend) alpha = to_arithmetic(static_cast<const S*>(args.alpha)[range.type]), rest = A(1) - alpha;
  if (column < args.width) {
#pragma unroll 4
    for (int64_t entry = range.begin + threadIdx.y; entry < range.end; entry += blockDim.y) {
      const int64_t at = row_of(ids, args.entries, entry) * args.width + column;
      A grad[kSize];
      read<S>(args.grad, at, grad);
      if constexpr (kBlend) {
        A made[kSize];
        if (args.partial) {
          A x[kSize];
          read<S>(args.y, at, made), read<S>(args.x, at, x);
#pragma unroll
          for (int i = 0; i < kSize; ++i) sum[i] += grad[i] * (made[i] - x[i]);
        }
        if (args.out_y) {
#pragma unroll
          for (int i = 0; i < kSize; ++i) made[i] = alpha * grad[i];
          write<S>(args.out_y, at, made);
        }
        if (args.out_x) {
#pragma unroll
          for (int i = 0; i < kSize; ++i) made[i] = rest * grad[i];
          write<S>(args.out_x, at, made);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) sum[i] += grad[i];
      }
    }
  }
  if (!args.partial) return;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kSize; ++i) shared[i][thread] = sum[i];
  for (int sides = blockDim.y / 2; sides > 0; sides /= 2) {  // powers of two
    __syncthreads();
    if (threadIdx.y < sides) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) shared[i][thread] += shared[i][thread + sides * blockDim.x];
    }
  }
  if (threadIdx.y > 0 || column >= args.width) return;
  A* partial = static_cast<A*>(args.partial) + static_cast<int64_t>(blockIdx.x) * args.width + column;
#pragma unroll
  for (int i = 0; i < kSize; ++i) partial[i] = shared[i][thread];
}

// A block has 32 columns of a type or, where `total`, all of them.
template <class S>
__global__ void __launch_bounds__(kLanes* kSides) add_partials_kernel(const __grid_constant__ TypedRowsArgs args) {
  using A = Arithmetic<S>;
  __shared__ A shared[kSides][kLanes];
  const Entries& entries = args.entries;
  const int first = blockIdx.x * kLanes, last = args.total ? args.width : min(first + kLanes, args.width);
  for (int64_t type = blockIdx.y; type < entries.types; type += gridDim.y) {
    const int64_t begin = id_at(entries.offsets, entries.wide, type);
    const int64_t end = min(id_at(entries.offsets, entries.wide, type + 1), entries.count);
    const int64_t chunks = (end - begin + args.chunk - 1) / args.chunk;
    const A* partial = static_cast<const A*>(args.partial) + (begin / args.chunk + type) * args.width;
    A sum = 0;
    for (int column = first + threadIdx.x; column < last; column += kLanes) {
#pragma unroll 4
      for (int64_t chunk = threadIdx.y; chunk < chunks; chunk += kSides) sum += partial[chunk * args.width + column];
    }
    A all = projection::over_sides(sum, shared);
    if (threadIdx.y > 0) continue;
    const int column = first + threadIdx.x;
    if (!args.total) {
      if (column < last) static_cast<S*>(args.sums)[type * args.width + column] = to_storage<S>(all);
      continue;
    }
    for (int step = kLanes / 2; step > 0; step /= 2) all += __shfl_xor_sync(0xffffffffu, all, step);
    if (threadIdx.x == 0) static_cast<S*>(args.sums)[type] = to_storage<S>(all);
  }
}

struct Shape {
  dim3 grid, block;

  Shape(const TypedRowsArgs& args, int size) {
    const int vectors = args.width / size;
    unsigned lanes = 1;
    while (lanes < 32 && static_cast<int>(lanes) < vectors) lanes *= 2;
    block = dim3(lanes, kThreads / lanes);
    grid = dim3(static_cast<unsigned>(num_tiles(args.entries.count, args.entries.types, args.chunk)),
                (static_cast<unsigned>(vectors) + lanes - 1) / lanes);
  }
};

bool has_vectors(const TypedRowsArgs& args, int size) {
  const auto aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  return args.width % size == 0 && aligned(args.grad) && aligned(args.y) && aligned(args.x) && aligned(args.out_y) &&
         aligned(args.out_x);
}

template <class S, int kSize>
cudaError_t blend(const TypedRowsArgs& args, cudaStream_t stream) {
  const Shape shape(args, kSize);
  blend_kernel<S, kSize><<<shape.grid, shape.block, 0, stream>>>(args);
  return cudaGetLastError();
}

template <class S, int kSize>
cudaError_t partial_sums(const TypedRowsArgs& args, cudaStream_t stream) {
  const Shape shape(args, kSize);
  if (args.alpha) {
    partial_sums_kernel<S, kSize, true><<<shape.grid, shape.block, 0, stream>>>(args);
  } else {
    partial_sums_kernel<S, kSize, false><<<shape.grid, shape.block, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

template <class S>
cudaError_t sums(const TypedRowsArgs& args, cudaStream_t stream) {
  const cudaError_t error =
      has_vectors(args, kVec<S>) ? partial_sums<S, kVec<S>>(args, stream) : partial_sums<S, 1>(args, stream);
  if (error != cudaSuccess || !args.partial) return error;
  constexpr int most = 65535;  // of a grid's second dimension
  const dim3 grid(args.total ? 1 : static_cast<unsigned>((args.width + kLanes - 1) / kLanes),
                  static_cast<unsigned>(args.entries.types < most ? args.entries.types : most));
  add_partials_kernel<S><<<grid, dim3(kLanes, kSides), 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

cudaError_t run_typed_blend(Storage storage, const TypedRowsArgs& args, cudaStream_t stream) {
  return of_storage<false>(storage, [&](auto zero) {
    using S = decltype(zero);
    return has_vectors(args, kVec<S>) ? blend<S, kVec<S>>(args, stream) : blend<S, 1>(args, stream);
  });
}

cudaError_t run_typed_sums(Storage storage, const TypedRowsArgs& args, cudaStream_t stream) {
  return of_storage<false>(storage, [&](auto zero) { return sums<decltype(zero)>(args, stream); });
}

}  // namespace edgeless::cuda::relational
