// Typed products on tensor cores: each row of x is multiplied by the weight matrices of its entry's type, and a bias is
// added (ProductArgs in kernels.h has the shapes). Float32 is split into two TF32 values as in dense linear maps
// (projection/cuda/float_tiles.cuh), and the results are as exact.
//
// Each warp has its own rows, and each thread prefetches exactly the elements that it multiplies later, so warps do not
// wait for each other's rows. Which thread of a warp holds which element of an operand is free, as long as both
// operands of a product agree. Depths are assigned to the four threads of a row, and columns to the threads that store
// them, such that every thread loads and stores whole 16-byte vectors. In its warp a thread has the indices `group`, of
// eight, and `in_group`, of four.
#pragma once

#include <type_traits>

#include "../../projection/cuda/float_tiles.cuh"
#include "../../projection/cuda/half_tiles.cuh"
#include "geometry.h"
#include "product_parts.cuh"
#include "shared_access.cuh"

namespace edgeless::cuda::relational::product {

constexpr int kRows = 16;  // of a warp's mma

template <class S>
constexpr int kVector = vector(sizeof(S));
template <class S>
constexpr int kGroupDepth = group_depth(sizeof(S));
template <class S>
constexpr int kChunk = chunk(sizeof(S));
template <class S>
constexpr int kVectors = vectors(sizeof(S));
template <class S>
constexpr int kStep = kGroups * kGroupDepth<S>;  // depth per copy and, for floats, per sum on the tensor cores

static_assert(kMostColumnsInPlace <= 8 * kWideSides && kMostColumnsInPlace <= kChunk<float>);

// Target occupancy in blocks per SM.
template <class S, int kSides>
constexpr int kBlocks = kSides < kWideSides ? 5 : (std::is_same_v<S, float> ? 3 : 4);

struct Place {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, in_group = lane % 4;
};

struct alignas(16) Vector {
  uint32_t words[4];
};

// Returns whether a value of one row of mma results is infinite or NaN.
template <int kCount>
__device__ __forceinline__ bool any_is_not_finite(const float (&sum)[kCount][4], int first) {
  float zero = 0;
#pragma unroll
  for (int j = 0; j < kCount; ++j) zero += 0 * sum[j][first] + 0 * sum[j][first + 1];
  return zero != 0;
}

// In both operands, element `at` of a thread's vector has depth kVector in_group + at within its group of depths. This
// is the column of element `at` (of 8) of an 8-column mma. Columns are assigned such that a thread's two results of
// each of kVector / 2 mma make one vector.
template <class S>
__device__ __forceinline__ int column_of(int side, int at) {
  constexpr int kSidesOfVector = kVector<S> / 2;
  return side / kSidesOfVector * kGroupDepth<S> + at / 2 * kVector<S> + side % kSidesOfVector * 2 + at % 2;
}

// Stages depths [first, first + depth) of the weight, for the columns of a block, in shared memory in the layout of
// mma: for every group of depths and eight columns, the elements of each thread. Elements outside the matrix are zero.
// To be called by the whole block.
template <class S, bool kTransposed, int kSides>
__device__ __forceinline__ void stage_weights(const ProductArgs& args, const S* weight, int first, int depth,
                                              int first_column, Vector* staged) {
  constexpr int kAtOnce = 4;  // independent loads of vectors
  union Numbers {
    Vector vector = {};
    S of[kVector<S>];
  };
  const int lane = threadIdx.x % 32, count = (depth + kGroupDepth<S> - 1) / kGroupDepth<S> * kSides;
  for (int begin = threadIdx.x / 32; begin < count; begin += kAtOnce * kWarps) {
    Numbers found[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int side = (begin + j * kWarps) % kSides, group = (begin + j * kWarps) / kSides;
      const int column = first_column + column_of<S>(side, lane / 4);
      const int inner = group * kGroupDepth<S> + lane % 4 * kVector<S>;
      if (inner >= depth || column >= args.columns) continue;
      if constexpr (kTransposed) {
        found[j].vector = *reinterpret_cast<const Vector*>(weight + column * args.weight_row + first + inner);
      } else {
        const S* from = weight + (first + inner) * args.weight_row + column;
#pragma unroll
        for (int v = 0; v < kVector<S>; ++v) found[j].of[v] = from[v * args.weight_row];
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int side = (begin + j * kWarps) % kSides, group = (begin + j * kWarps) / kSides;
      if (begin + j * kWarps >= count) break;
      if constexpr (std::is_same_v<S, float>) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Vector& to = staged[((group * 2 + half) * kSides + side) * 32 + lane];
#pragma unroll
          for (int h = 0; h < 2; ++h) split(found[j].of[2 * half + h], to.words[h], to.words[2 + h]);
        }
      } else {
        staged[(group * kSides + side) * 32 + lane] = found[j].vector;
      }
    }
  }
}

// sum += the rows of one step times the weights staged for it. left: depth from the step's begin to the end of the
// chunk.
template <class S, int kSides>
__device__ __forceinline__ void multiply_step(const Vector (&rows)[2][kGroups], const Vector* staged, int left,
                                              float (&sum)[kSides][4]) {
  constexpr bool kFloat = std::is_same_v<S, float>;
  const int lane = threadIdx.x % 32;
  constexpr int kAtOnce = kSides < 4 ? kSides : 4;  // independent mma of floats
  float part[kSides / kAtOnce][1][kAtOnce][4];      // accumulators of the tensor cores, for floats
#pragma unroll
  for (int q = 0; q < kGroups; ++q) {
    if (q > 0 && q * kGroupDepth<S> >= left) break;
    const Vector &upper = rows[0][q], &lower = rows[1][q];
    const Vector* weights_of = staged + q * (kVectors<S> * kSides * 32) + lane;
    if constexpr (kFloat) {
      uint32_t parts[2][2][1][4];  // of both mma the TF32 parts: nearest, remainder
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int h = 0; h < 4; ++h) {
          const float number = __uint_as_float((h % 2 ? lower : upper).words[2 * half + h / 2]);
          split(number, parts[half][0][0][h], parts[half][1][0][h]);
        }
      }
#pragma unroll
      for (int i = 0; i < kSides / kAtOnce; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t columns[2][kAtOnce][2];
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) {
            const Vector weights = weights_of[(half * kSides + i * kAtOnce + j) * 32];
#pragma unroll
            for (int h = 0; h < 4; ++h) columns[h / 2][j][h % 2] = weights.words[h];
          }
          multiply_parts(part[i], parts[half], columns, half == 0 && q == 0);
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kSides; ++j) {
        const Vector weights = weights_of[j * 32];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t numbers[4] = {upper.words[2 * half], lower.words[2 * half], upper.words[2 * half + 1],
                                       lower.words[2 * half + 1]};
          projection::half::multiply_add<S>(sum[j], numbers, weights.words[2 * half], weights.words[2 * half + 1]);
        }
      }
    }
  }
  if constexpr (kFloat) {
#pragma unroll
    for (int j = 0; j < kSides; ++j) {
#pragma unroll
      for (int h = 0; h < 4; ++h) sum[j][h] += part[j / kAtOnce][0][j % kAtOnce][h];
    }
  }
}

// Prefetches the rows of a warp's entries into shared memory, tile by tile and in steps of the depth. Prefetching to
// registers would take 64 registers and the scoreboards that other loads need.
template <class S>
class RowSteps {
 public:
  // x: at the first depth of the block of columns. room: kRowBytes for every warp.
  __device__ __forceinline__ RowSteps(const ProductArgs& args, const Range& range, const S* x, const Vector* room)
      : args_(args), begin_(range.begin), count_(static_cast<int>(range.end - range.begin)) {
    x_ = x + place_.in_group * kVector<S>;
    room_ = projection::shared_address(room) + place_.warp * kRowBytes + place_.lane * 16;
    row_ = place_.warp * kRows;
    prefetch_ids(row_), begin_tile();
#pragma unroll
    for (int slot = 0; slot < kSlots - 1; ++slot) prefetch(slot);
  }

  // Waits for the next step and loads the thread's vectors of rows `group` and `group + 8`. To be called by the whole
  // warp.
  __device__ __forceinline__ void take(Vector (&rows)[2][kGroups]) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kSlots - 2));
#endif
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int q = 0; q < kGroups; ++q) load_shared(address(slot_, h, q), rows[h][q].words);
    }
    prefetch((slot_ + kSlots - 1) % kSlots);
    slot_ = (slot_ + 1) % kSlots;
  }

 private:
  __device__ __forceinline__ uint32_t address(int slot, int h, int q) const {
    return room_ + slot * kSlotBytes + (h * kGroups + q) * 32 * 16;
  }

  __device__ __forceinline__ void prefetch(int slot) {
    if (row_ < count_) {
      const int left = args_.depth - step_ - place_.in_group * kVector<S>;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int q = 0; q < kGroups; ++q) {
          copy_shared(address(slot, h, q), from_[h] + q * kGroupDepth<S>,
                      row_ + place_.group + 8 * h < count_ && q * kGroupDepth<S> < left);
        }
        from_[h] += kStep<S>;
      }
      step_ += kStep<S>;
      if (step_ >= args_.depth) row_ += kWarps * kRows, begin_tile();
    }
    projection::commit_stage();
  }

  __device__ __forceinline__ void begin_tile() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      from_[h] = x_ + __shfl_sync(0xffffffffu, id_.get(), place_.group + 8 * h) * args_.x.stride;
    }
    step_ = 0;
    prefetch_ids(row_ + kWarps * kRows);
  }

  __device__ __forceinline__ void prefetch_ids(int first) {
    const int row = first + place_.lane % kRows;
    if (row < count_) id_ = id_in_flight(args_.x, args_.entries, begin_ + row);
  }

  const Place place_;
  const ProductArgs& args_;
  int64_t begin_;
  int count_;  // entries of the block
  const S* x_;
  uint32_t room_;
  int slot_ = 0;
  int row_, step_;    // next to prefetch: the warp's first row in the block, and the depth
  const S* from_[2];  // next to copy, of rows `group` and `group + 8`; for rows behind the end, any valid row
  IdInFlight id_;     // of row lane % 16 in the tile after the one that is being prefetched
};

// Stores one row of a warp's results plus row `bias` of the bias, if there is one, kVector columns at a time.
template <class S, int kSides>
__device__ __forceinline__ void store_row(const ProductArgs& args, S* to, int64_t bias, int first_column, int first,
                                          const float (&sum)[kSides][4]) {
  constexpr int kSidesOfVector = kVector<S> / 2;
  const int in_group = threadIdx.x % 4;
#pragma unroll
  for (int side = 0; side < kSides; side += kSidesOfVector) {
    const int column = first_column + column_of<S>(side, 2 * in_group);
    if (column >= args.columns) continue;
    union {
      Vector vector = {};
      S numbers[kVector<S>];
    } made;
    if (args.bias) {
      made.vector = *reinterpret_cast<const Vector*>(static_cast<const S*>(args.bias) + bias * args.columns + column);
    }
#pragma unroll
    for (int v = 0; v < kVector<S>; ++v) {
      made.numbers[v] = to_storage<S>(sum[side + v / 2][first + v % 2] + to_arithmetic(made.numbers[v]));
    }
    *reinterpret_cast<Vector*>(to + column) = made.vector;
  }
}

// A block computes up to args.share rows of one type by 8 kSides columns; every warp computes 16 rows at a time.
template <class S, bool kTransposed, int kSides>
__global__ void __launch_bounds__(kThreads, kBlocks<S, kSides>)
    product_kernel(const __grid_constant__ ProductArgs args) {
  check_offsets(args.entries);
  extern __shared__ float4 memory[];
  Vector* const room = reinterpret_cast<Vector*>(memory);
  Vector* const staged = room + kWarps * kRowBytes / sizeof(Vector);
  constexpr int kColumns = 8 * kSides;
  const int across = (args.columns + kColumns - 1) / kColumns, block = blockIdx.y, depth = args.depth;
  const int first_column = static_cast<int>(blockIdx.x % across) * kColumns;
  const Range range = range_of_tile(args.entries, blockIdx.x / across, args.share);
  if (range.begin >= range.end) return;
  const Place place;
  const S* weight = static_cast<const S*>(args.weight) + range.type * args.weight_type + block * args.weight_block;
  S* const out = const_cast<S*>(static_cast<const S*>(args.out.numbers)) +
                 begin_of_block(args.out, block, args.blocks, args.columns);
  const S* const x = static_cast<const S*>(args.x.numbers) + begin_of_block(args.x, block, args.blocks, depth);
  RowSteps<S> steps(args, range, x, room);
  const int entries = static_cast<int>(range.end - range.begin);
  for (int tile = 0; tile < entries; tile += kWarps * kRows) {
    __syncwarp();       // the threads may have diverged at the stores
    IdInFlight out_id;  // of the warp's row lane % 16
    const int own = tile + place.warp * kRows + place.lane % kRows;
    if (own < entries) out_id = id_in_flight(args.out, args.entries, range.begin + own);
    float sum[kSides][4] = {};
    for (int chunk = 0; chunk < depth; chunk += kChunk<S>) {
      const int end = min(depth, chunk + kChunk<S>);
      if (tile == 0 || depth > kChunk<S>) {
        __syncthreads();
        stage_weights<S, kTransposed, kSides>(args, weight, chunk, end - chunk, first_column, staged);
        __syncthreads();
      }
      const Vector* weights = staged;
      for (int step = chunk; step < end; step += kStep<S>) {
        Vector rows[2][kGroups];
        steps.take(rows);
        multiply_step<S>(rows, weights, end - step, sum);
        weights += kGroups * kVectors<S> * kSides * 32;
      }
    }
    const int64_t to[2] = {__shfl_sync(0xffffffffu, out_id.get(), place.group),
                           __shfl_sync(0xffffffffu, out_id.get(), place.group + 8)};
    const int of_warp = tile + place.warp * kRows + place.group;
    if constexpr (std::is_same_v<S, float>) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (of_warp + 8 * h >= entries || !any_is_not_finite(sum, 2 * h)) continue;
        const int64_t entry = range.begin + of_warp + 8 * h;
#pragma unroll
        for (int i = 0; i < 2 * kSides; ++i) {
          const int column = first_column + column_of<S>(i / 2, 2 * place.in_group + i % 2);
          if (column >= args.columns) continue;
          sum[i / 2][2 * h + i % 2] = product_in_floats(args, entry, range.type, block, column);
        }
      }
      __syncwarp();  // in place, the stores overwrite what product_in_floats reads
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (of_warp + 8 * h >= entries) continue;
      store_row(args, out + to[h] * args.out.stride, static_cast<int64_t>(range.type) * args.blocks + block,
                first_column, 2 * h, sum);
    }
  }
}

}  // namespace edgeless::cuda::relational::product
