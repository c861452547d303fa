// Typed products on tensor cores. A warp reads the rows of its entries from memory straight into the registers of mma
// and needs no other warp; float32 is split as in linear maps (projection/cuda/float_tiles.cuh) and as exact.
//
// Which thread of a warp has which number of an operand is up to us, as long as both operands of a product agree:
// depths are dealt to the four threads of a row, and columns to the threads that store them, so that each of them reads
// and writes whole vectors of 16 bytes. A thread is number `group` of eight and `in_group` of four.
#include <algorithm>
#include <atomic>
#include <type_traits>

#include "../../projection/cuda/float_tiles.cuh"
#include "../../projection/cuda/half_tiles.cuh"
#include "../../projection/cuda/shared_memory.cuh"
#include "of_storage.cuh"
#include "product_parts.cuh"

namespace edgeless::cuda::relational {
namespace {

using projection::floats::split;

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kColumns = 64, kSides = kColumns / 8;  // of a block's products, and mma of 8 columns
constexpr int kRows = 16;                            // of a warp's mma
constexpr int kStep = 64;                            // depth of the rows that a warp has in registers

template <class S>
constexpr int kVector = 16 / sizeof(S);

template <class S>
constexpr int kGroupDepth = 4 * kVector<S>;  // of the vectors that the four threads of a row have, and of two mma

// The depth of the weights that are in shared memory, and how many vectors they take there for a group of depths and
// eight columns: a float is two numbers.
template <class S>
constexpr int kChunk = std::is_same_v<S, float> ? 128 : 256;
template <class S>
constexpr int kVectors = std::is_same_v<S, float> ? 2 : 1;

template <class S>
constexpr int kBlocks = std::is_same_v<S, float> ? 3 : 4;  // that a multiprocessor has registers for

struct Place {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, in_group = lane % 4;
};

struct alignas(16) Vector {
  uint32_t words[4];
};

__device__ __forceinline__ Vector load_vector(const void* from) { return *static_cast<const Vector*>(from); }

// Whether a float of these, which are a row of mma's results, is infinite or no number.
template <int kCount>
__device__ __forceinline__ bool any_is_not_finite(const float (&sum)[kCount][4], int first) {
  float zero = 0;
#pragma unroll
  for (int j = 0; j < kCount; ++j) zero += 0 * sum[j][first] + 0 * sum[j][first + 1];
  return zero != 0;
}

// Products ------------------------------------------------------------------------------------------------------------

// The depth within its group that a thread's number `at` of a vector has in both operands is kVector in_group + at. The
// column of number `at` (of 8) of an mma of 8 columns is chosen so that a thread's two results of each of kVector / 2
// mma make one vector.
template <class S>
__device__ __forceinline__ int column_of(int side, int at) {
  constexpr int kSidesOfVector = kVector<S> / 2;
  return side / kSidesOfVector * kGroupDepth<S> + at / 2 * kVector<S> + side % kSidesOfVector * 2 + at % 2;
}

// Brings depths [first, first + depth) of the weight of a block's columns to shared memory, as mma takes it: for every
// group of depths and eight columns, the thread's numbers. Zeros outside. Whole block.
template <class S, bool kTransposed>
__device__ __forceinline__ void stage_weights(const ProductArgs& args, const S* weight, int first, int depth,
                                              int first_column, Vector* staged) {
  const int count = (depth + kGroupDepth<S> - 1) / kGroupDepth<S> * kSides * 32;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int lane = i % 32, side = i / 32 % kSides, group = i / (32 * kSides);
    const int column = first_column + column_of<S>(side, lane / 4);
    const int inner = group * kGroupDepth<S> + lane % 4 * kVector<S>;
    struct alignas(16) {
      S numbers[kVector<S>];
    } found;
#pragma unroll
    for (int v = 0; v < kVector<S>; ++v) {
      const int k = first + inner + v;
      const bool there = inner + v < depth && column < args.columns;
      const int64_t at = kTransposed ? column * args.weight_row + k : k * args.weight_row + column;
      found.numbers[v] = there ? weight[at] : to_storage<S>(0.0f);
    }
    if constexpr (std::is_same_v<S, float>) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Vector& to = staged[((group * 2 + half) * kSides + side) * 32 + lane];
#pragma unroll
        for (int h = 0; h < 2; ++h) split(found.numbers[2 * half + h], to.words[h], to.words[2 + h]);
      }
    } else {
      staged[(group * kSides + side) * 32 + lane] = *reinterpret_cast<const Vector*>(&found);
    }
  }
}

// A thread's vectors of kStep numbers of two rows, in_group's of `group` and of the one eight further.
template <class S>
struct Rows {
  static constexpr int kGroups = kStep / kGroupDepth<S>;
  Vector of[2][kGroups];

  __device__ __forceinline__ void load(const S* const (&from)[2], int left_depth) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        of[h][q] = from[h] && q * kGroupDepth<S> < left_depth ? load_vector(from[h] + q * kGroupDepth<S>) : Vector{};
      }
    }
  }
};

// sum += the product of the rows of one group of depths and the weights staged for it.
template <class S>
__device__ __forceinline__ void multiply_group(const Vector& upper, const Vector& lower, const Vector* staged,
                                               float (&sum)[kSides][4]) {
  const int lane = threadIdx.x % 32;
  if constexpr (std::is_same_v<S, float>) {
    uint32_t rows[2][2][4];  // the nearest numbers, and what is left, of both mma
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        const float number = __uint_as_float((h % 2 ? lower : upper).words[2 * half + h / 2]);
        split(number, rows[0][half][h], rows[1][half][h]);
      }
    }
    constexpr int kAtOnce = 4;  // mma that do not wait for each other
#pragma unroll
    for (int first = 0; first < kSides; first += kAtOnce) {
      float part[kAtOnce][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Vector weights[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) weights[j] = staged[(half * kSides + first + j) * 32 + lane];
        // The small products first.
#pragma unroll
        for (int product = 0; product < 3; ++product) {
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) {
            const int from = product == 1 ? 2 : 0;
            const uint32_t b[2] = {weights[j].words[from], weights[j].words[from + 1]};
            projection::floats::multiply_add(part[j], rows[product == 0][half], b, product == 0 && half == 0);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
        for (int h = 0; h < 4; ++h) sum[first + j][h] += part[j][h];
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < kSides; ++j) {
      const Vector weights = staged[j * 32 + lane];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t rows[4] = {upper.words[2 * half], lower.words[2 * half], upper.words[2 * half + 1],
                                  lower.words[2 * half + 1]};
        projection::half::multiply_add<S>(sum[j], rows, weights.words[2 * half], weights.words[2 * half + 1]);
      }
    }
  }
}

// One row of a warp's results, kVector columns at a time.
template <class S>
__device__ __forceinline__ void store_row(S* to, int first_column, int columns, int first,
                                          const float (&sum)[kSides][4]) {
  constexpr int kSidesOfVector = kVector<S> / 2;
  const int in_group = threadIdx.x % 4;
#pragma unroll
  for (int side = 0; side < kSides; side += kSidesOfVector) {
    const int column = first_column + column_of<S>(side, 2 * in_group);
    if (column >= columns) continue;
    struct alignas(16) {
      S numbers[kVector<S>];
    } made;
#pragma unroll
    for (int v = 0; v < kVector<S>; ++v) made.numbers[v] = to_storage<S>(sum[side + v / 2][first + v % 2]);
    *reinterpret_cast<Vector*>(to + column) = *reinterpret_cast<const Vector*>(&made);
  }
}

// A block makes args.share rows of one type, or what is left of it, by 64 columns: every warp 16 rows at a time.
template <class S, bool kTransposed>
__global__ void __launch_bounds__(kThreads, kBlocks<S>) product_kernel(const __grid_constant__ ProductArgs args) {
  check_offsets(args.entries);
  extern __shared__ float4 memory[];
  Vector* staged = reinterpret_cast<Vector*>(memory);
  const int across = (args.columns + kColumns - 1) / kColumns, block = blockIdx.y, depth = args.depth;
  const int first_column = static_cast<int>(blockIdx.x % across) * kColumns;
  const Range range = range_of_tile(args.entries, blockIdx.x / across, args.share);
  if (range.begin >= range.end) return;
  const Place place;
  const S* weight = static_cast<const S*>(args.weight) + range.type * args.weight_type + block * args.weight_block;
  const S* x = static_cast<const S*>(args.x.numbers) + static_cast<int64_t>(block) * depth;

  // The thread's rows of the next tile, and the ids of those after it.
  const S* from[2];
  int64_t ids[2];
  const auto find_ids = [&](int64_t tile) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t entry = tile + place.warp * kRows + place.group + 8 * h;
      ids[h] = entry < range.end ? row_of(args.x, args.entries, entry) : -1;
    }
  };
  const auto begin_rows = [&] {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      from[h] = ids[h] < 0 ? nullptr : x + ids[h] * args.x.stride + place.in_group * kVector<S>;
    }
  };
  // Numbers of the four threads of a row lie side by side: a thread has none where its vector begins outside.
  const auto left = [&](int at) { return depth - at - place.in_group * kVector<S>; };
  Rows<S> next;
  find_ids(range.begin);
  begin_rows();
  next.load(from, left(0));
  find_ids(range.begin + kWarps * kRows);
  for (int64_t tile = range.begin; tile < range.end; tile += kWarps * kRows) {
    __syncwarp();  // whose threads may part where they store
    float sum[kSides][4] = {};
    for (int chunk = 0; chunk < depth; chunk += kChunk<S>) {
      const int end = min(depth, chunk + kChunk<S>);
      if (tile == range.begin || depth > kChunk<S>) {
        __syncthreads();
        stage_weights<S, kTransposed>(args, weight, chunk, end - chunk, first_column, staged);
        __syncthreads();
      }
      for (int step = chunk; step < end; step += kStep) {
        const Rows<S> rows = next;
        if (step + kStep < depth) {
#pragma unroll
          for (int h = 0; h < 2; ++h) from[h] = from[h] ? from[h] + kStep : nullptr;
          next.load(from, left(step + kStep));
        } else if (tile + kWarps * kRows < range.end) {
          begin_rows();
          next.load(from, left(0));
          find_ids(tile + 2 * kWarps * kRows);
        }
#pragma unroll
        for (int q = 0; q < Rows<S>::kGroups; ++q) {
          const int inner = step - chunk + q * kGroupDepth<S>;
          if (chunk + inner >= end) break;
          multiply_group<S>(rows.of[0][q], rows.of[1][q], staged + inner / kGroupDepth<S> * (kVectors<S> * kSides * 32),
                            sum);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t entry = tile + place.warp * kRows + place.group + 8 * h;
      if (entry >= range.end) continue;
      if constexpr (std::is_same_v<S, float>) {
        if (any_is_not_finite(sum, 2 * h)) {
#pragma unroll
          for (int i = 0; i < 2 * kSides; ++i) {
            const int column = first_column + column_of<S>(i / 2, 2 * place.in_group + i % 2);
            if (column >= args.columns) continue;
            sum[i / 2][2 * h + i % 2] = product_in_floats(args, entry, range.type, block, column);
          }
        }
      }
      S* out = const_cast<S*>(static_cast<const S*>(args.out.numbers)) + static_cast<int64_t>(block) * args.columns;
      store_row(out + row_of(args.out, args.entries, entry) * args.out.stride, first_column, args.columns, 2 * h, sum);
    }
  }
}

// Outer products ------------------------------------------------------------------------------------------------------

constexpr int kEntries = 16;                    // of a step: four for each thread of four
constexpr int kDown = 4, kSide = 2;             // mma of a warp: 64 rows by 16 columns
constexpr int kBlockRows = kDown * 16;          // of a matrix
static_assert(kWarps * kSide * 8 == kColumns);  // all warps have the same rows

// The two numbers of x that a thread gives to one mma lie side by side, and so do all of its numbers of 16 bytes. This
// is the first of both, for the thread number `group`.
template <class S>
__device__ __forceinline__ int row_of_mma(int down, int group) {
  constexpr int kOfVector = kVector<S> / 2;
  return down / kOfVector * 8 * kVector<S> + group * kVector<S> + down % kOfVector * 2;
}

// A thread's numbers of four entries.
template <class S>
struct Numbers {
  static constexpr int kVectorsOfRow = kBlockRows / (8 * kVector<S>);
  Vector x[4][kVectorsOfRow];
  uint32_t y[4][sizeof(S) / 2];  // two numbers

  // rows: of x, or -1 outside.
  __device__ __forceinline__ void load(const OuterArgs& args, const S* x_base, const S* y_base,
                                       const int64_t (&rows)[4], int64_t first, int left_rows, bool has_y) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t entry = first + i;
      const bool there = rows[i] >= 0;
      const S* from = x_base + (there ? rows[i] : 0) * args.x.stride;
#pragma unroll
      for (int v = 0; v < kVectorsOfRow; ++v) {
        x[i][v] = there && v * 8 * kVector<S> < left_rows ? load_vector(from + v * 8 * kVector<S>) : Vector{};
      }
      struct alignas(2 * sizeof(S)) Pair {
        uint32_t words[sizeof(S) / 2];
      };
      Pair pair{};
      if (there && has_y) {
        pair = *reinterpret_cast<const Pair*>(y_base + row_of(args.y, args.entries, entry) * args.y.stride);
      }
#pragma unroll
      for (int w = 0; w < static_cast<int>(sizeof(S)) / 2; ++w) y[i][w] = pair.words[w];
    }
  }

  // Adds the outer products of all entries of the step.
  __device__ __forceinline__ void add_to(float (&sum)[kDown][kSide][4]) const {
    if constexpr (std::is_same_v<S, float>) {
      float part[kDown][kSide][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t columns[2][kSide][2];  // the nearest numbers, and what is left
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            split(__uint_as_float(y[2 * half + h][j]), columns[0][j][h], columns[1][j][h]);
          }
        }
#pragma unroll
        for (int i = 0; i < kDown; ++i) {
          uint32_t rows[2][4];
#pragma unroll
          for (int h = 0; h < 4; ++h) {
            split(__uint_as_float(x[2 * half + h / 2][i / 2].words[i % 2 * 2 + h % 2]), rows[0][h], rows[1][h]);
          }
          // The small products first.
#pragma unroll
          for (int product = 0; product < 3; ++product) {
#pragma unroll
            for (int j = 0; j < kSide; ++j) {
              projection::floats::multiply_add(part[i][j], rows[product == 0], columns[product == 1][j],
                                               product == 0 && half == 0);
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
#pragma unroll
          for (int h = 0; h < 4; ++h) sum[i][j][h] += part[i][j][h];
        }
      }
    } else {
      constexpr uint32_t kFirsts = 0x5410, kSeconds = 0x7632;  // of the numbers of two entries
      uint32_t columns[kSide][2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        columns[0][h] = __byte_perm(y[2 * h][0], y[2 * h + 1][0], kFirsts);
        columns[1][h] = __byte_perm(y[2 * h][0], y[2 * h + 1][0], kSeconds);
      }
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
        uint32_t rows[4];
#pragma unroll
        for (int h = 0; h < 4; ++h) {
          rows[h] = __byte_perm(x[h / 2 * 2][0].words[i], x[h / 2 * 2 + 1][0].words[i], h % 2 ? kSeconds : kFirsts);
        }
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
          projection::half::multiply_add<S>(sum[i][j], rows, columns[j][0], columns[j][1]);
        }
      }
    }
  }
};

// A block makes 64 by 64 numbers of a matrix from one chunk of entries, a warp 64 by 16.
template <class S>
__global__ void __launch_bounds__(kThreads, kBlocks<S>) outer_kernel(const __grid_constant__ OuterArgs args) {
  check_offsets(args.entries);
  const int across = (args.columns + kColumns - 1) / kColumns, block = blockIdx.z;
  const Place place;
  const int first_row = static_cast<int>(blockIdx.y / across) * kBlockRows;
  const int first_column = static_cast<int>(blockIdx.y % across) * kColumns + place.warp * kSide * 8;
  const Range range = range_of_tile(args.entries, blockIdx.x, args.chunk);
  if (range.begin >= range.end) return;
  const int own_row = first_row + place.group * kVector<S>, own_column = first_column + 2 * place.group;
  const S* x = static_cast<const S*>(args.x.numbers) + static_cast<int64_t>(block) * args.rows + own_row;
  const S* y = static_cast<const S*>(args.y.numbers) + static_cast<int64_t>(block) * args.columns + own_column;
  const int64_t own = range.begin + 4 * place.in_group;
  const int left_rows = args.rows - own_row;
  const bool has_y = own_column < args.columns;

  int64_t rows[4];  // of the entries after the next
  const auto find_rows = [&](int64_t first) {
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i] = first + i < range.end ? row_of(args.x, args.entries, first + i) : -1;
  };
  Numbers<S> next;
  find_rows(own);
  next.load(args, x, y, rows, own, left_rows, has_y);
  find_rows(own + kEntries);
  float sum[kDown][kSide][4] = {};
  for (int64_t step = 0; range.begin + step < range.end; step += kEntries) {
    const Numbers<S> numbers = next;
    next.load(args, x, y, rows, own + step + kEntries, left_rows, has_y);
    find_rows(own + step + 2 * kEntries);
    numbers.add_to(sum);
  }

  const int64_t size = static_cast<int64_t>(args.rows) * args.columns;
  float* partial = static_cast<float*>(args.partial) + (static_cast<int64_t>(blockIdx.x) * args.blocks + block) * size;
  const int column = first_column + 4 * place.in_group;
  if (column >= args.columns) return;
#pragma unroll
  for (int i = 0; i < kDown; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + row_of_mma<S>(i, place.group) + h;
      if (row >= args.rows) continue;
      float made[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) made[c] = sum[i][c % 2][2 * h + c / 2];
      if constexpr (std::is_same_v<S, float>) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (!isfinite(made[c])) made[c] = outer_in_floats(args, range, block, row, column + c);
        }
      }
      *reinterpret_cast<float4*>(partial + row * static_cast<int64_t>(args.columns) + column) =
          make_float4(made[0], made[1], made[2], made[3]);
    }
  }
}

unsigned tiles(int size, int tile) { return static_cast<unsigned>((size + tile - 1) / tile); }

template <class S, bool kTransposed>
cudaError_t launch(const ProductArgs& args, cudaStream_t stream) {
  static std::atomic<uint64_t> done{0};
  constexpr int kBytes = kVectors<S> * kSides * 32 * sizeof(Vector);  // of a group of depths
  const auto kernel = product_kernel<S, kTransposed>;
  const cudaError_t error = projection::allow_shared_memory(kernel, kChunk<S> / kGroupDepth<S> * kBytes, done);
  if (error != cudaSuccess) return error;
  const int64_t down = num_tiles(args.entries.count, args.entries.types, args.share);
  const dim3 grid(static_cast<unsigned>(down * tiles(args.columns, kColumns)), args.blocks);
  const int bytes = static_cast<int>(tiles(std::min(args.depth, kChunk<S>), kGroupDepth<S>)) * kBytes;
  kernel<<<grid, kThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

template <class S>
cudaError_t launch(Storage storage, const OuterArgs& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(num_tiles(args.entries.count, args.entries.types, args.chunk)),
                  tiles(args.rows, kBlockRows) * tiles(args.columns, kColumns), args.blocks);
  outer_kernel<S><<<grid, kThreads, 0, stream>>>(args);
  const cudaError_t error = cudaGetLastError();
  return error != cudaSuccess ? error : add_chunks(storage, args, stream);
}

}  // namespace

cudaError_t run_warp_product(Storage storage, const ProductArgs& args, cudaStream_t stream) {
  return of_storage<true>(storage, [&](auto zero) {
    using S = decltype(zero);
    return args.transposed ? launch<S, true>(args, stream) : launch<S, false>(args, stream);
  });
}

cudaError_t run_warp_outer(Storage storage, const OuterArgs& args, cudaStream_t stream) {
  return of_storage<true>(storage, [&](auto zero) { return launch<decltype(zero)>(storage, args, stream); });
}

}  // namespace edgeless::cuda::relational
