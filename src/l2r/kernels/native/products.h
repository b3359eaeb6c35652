// Matrix products over blocks of tokens, for ranks at which products are most of the work.
//
// One routine does all of them, with strides: c = a b or c += a b, where rows of c are taken six at
// a time and columns in vectors of the width that the compiler targets (16 floats with AVX-512, 8
// with AVX, 4 otherwise), so that all sums of a tile stay in registers.

#pragma once

#include <algorithm>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "router.h"

namespace {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
constexpr int64_t kPanel = 128;  // columns of a panel: a block of tokens fits the second-level cache
constexpr int64_t kTile = 6;    // rows of a tile: 12 sums and 2 columns fit 16 registers
// Rows of W_q in a tile of the projection, beside three tokens, whose rows have 3 sums of squares: 24
// sums fit 32 registers, 12 fit 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int64_t kRanks = 8;
#else
constexpr int64_t kRanks = 4;
#endif

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

// kLanes numbers of bf16.
inline Lanes widen(const uint16_t* from) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __m128i halves;  // compilers take three times as many instructions
  std::memcpy(&halves, from, sizeof halves);
  return (Lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
#else
  typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));
  typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  const Words words = __builtin_convertvector(halves, Words) << 16;
  Lanes lanes;
  std::memcpy(&lanes, &words, sizeof lanes);
  return lanes;
#endif
}

inline void store(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof lanes); }

// The first `count` of kLanes numbers, all where it is larger; zeros for the rest.
inline Lanes load_first(const float* from, int64_t count) {
  if (count >= kLanes) return load(from);
  float numbers[kLanes] = {};
  std::memcpy(numbers, from, count * sizeof(float));
  return load(numbers);
}

inline void store_first(float* to, Lanes lanes, int64_t count) {
  if (count >= kLanes) return store(to, lanes);
  float numbers[kLanes];
  store(numbers, lanes);
  std::memcpy(to, numbers, count * sizeof(float));
}

// A function of a number, of each lane.
template <class Function>
inline Lanes each(Lanes lanes, Function function) {
  float numbers[kLanes];
  store(numbers, lanes);
#pragma omp simd
  for (int64_t i = 0; i < kLanes; ++i) numbers[i] = function(numbers[i]);
  return load(numbers);
}

inline float sum_of(const Lanes& lanes) {
  float numbers[kLanes], sum = 0.0f;
  store(numbers, lanes);
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < kLanes; ++i) sum += numbers[i];
  return sum;
}

// Scores of kLanes experts with an anchor of each, whose columns of b begin at `column`.
// kRank: the rank, or 0 for that of s; a rank known to the compiler is faster.
template <int kRank>
inline Lanes scores_of(const float* a, const float* column, const Sizes& s) {
  const int64_t rank = kRank ? kRank : s.rank, columns = s.columns();
  Lanes scores = a[0] * load(column);
#pragma GCC unroll 2
  for (int64_t r = 1; r < rank; ++r) scores += a[r] * load(column + r * columns);
  return scores;
}

inline int64_t padded(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// A matrix: entry (row, column) is at data[row * row_step + column * column_step].
struct View {
  const float* data;
  int64_t row_step, column_step;
};

// One tile of c [kRows, kVectors * kLanes] = or += a [kRows, depth] b [depth, ...].
template <int kRows, int kVectors>
inline void tile(View a, const float* b, int64_t b_step, int64_t depth, float* c, int64_t c_step,
                 bool add) {
  Lanes sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j)
      sums[i][j] = add ? load(c + i * c_step + j * kLanes) : Lanes{};
  for (int64_t k = 0; k < depth; ++k) {
    Lanes columns[kVectors];
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) columns[j] = load(b + k * b_step + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const float factor = a.data[i * a.row_step + k * a.column_step];
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) sums[i][j] += factor * columns[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) store(c + i * c_step + j * kLanes, sums[i][j]);
}

template <int kRows>
inline void tile_row(View a, const float* b, int64_t b_step, int64_t depth, float* c,
                     int64_t c_step, int64_t width, bool add) {
  int64_t j = 0;
  for (; j + 2 * kLanes <= width; j += 2 * kLanes)
    tile<kRows, 2>(a, b + j, b_step, depth, c + j, c_step, add);
  if (j < width) tile<kRows, 1>(a, b + j, b_step, depth, c + j, c_step, add);
}

// c [rows, width] = or += a [rows, depth] b [depth, width]; width is a multiple of kLanes.
inline void multiply(View a, const float* b, int64_t b_step, int64_t depth, float* c,
                     int64_t c_step, int64_t rows, int64_t width, bool add) {
  for (; rows > 0; rows -= kTile, a.data += kTile * a.row_step, c += kTile * c_step) {
    if (rows >= 6) tile_row<6>(a, b, b_step, depth, c, c_step, width, add);
    if (rows == 5) tile_row<5>(a, b, b_step, depth, c, c_step, width, add);
    if (rows == 4) tile_row<4>(a, b, b_step, depth, c, c_step, width, add);
    if (rows == 3) tile_row<3>(a, b, b_step, depth, c, c_step, width, add);
    if (rows == 2) tile_row<2>(a, b, b_step, depth, c, c_step, width, add);
    if (rows == 1) tile_row<1>(a, b, b_step, depth, c, c_step, width, add);
  }
}

// Sizes of a call in blocks.
struct Blocking {
  int64_t tokens, rank, experts, columns, hidden;

  explicit Blocking(const Sizes& s)
      : tokens(std::min<int64_t>(s.tokens, s.experts <= 256 ? 48 : 24)),
        rank(padded(s.rank, std::max(kLanes, kRanks))),
        experts(padded(s.experts, 16)),
        columns(s.columns()),
        hidden(padded(s.hidden, kPanel) + 16) {}
};

}  // namespace
