// What the forward and the backward of the router share; included by both, compiled once.
//
// Letters: T tokens, D hidden size, R rank, N experts, H anchors, K chosen. Layouts: x [T, D],
// folded [R, D], query and a [T, R], b [R, columns], logits [T, N], all fp32 and contiguous, but
// that x and its gradient may be bf16.
// Same mathematics as cpu_blocks.py.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <vector>

namespace {

constexpr int64_t kBlockedRank = 8;  // from here on products of blocks are faster than of tokens
constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

// 2 ** x on (-inf, 127], relative error 2e-7; written out so that the compiler vectorises it.
inline float fast_exp2(float x) {
  x = x < -126.0f ? -126.0f : x;
  const float rounded = std::nearbyintf(x);
  const float rest = x - rounded;
  float series = 1.326472689e-03f;
  series = series * rest + 9.671512910e-03f;
  series = series * rest + 5.550733747e-02f;
  series = series * rest + 2.402224208e-01f;
  series = series * rest + 6.931469776e-01f;
  series = series * rest + 1.0f;
  const uint32_t power = (static_cast<uint32_t>(static_cast<int32_t>(rounded)) + 127u) << 23;
  float scale;
  std::memcpy(&scale, &power, sizeof scale);
  return series * scale;
}

inline float fast_exp(float x) { return fast_exp2(x * kLog2E); }

// log of a normal positive number, relative error 1e-7.
inline float fast_log(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  int32_t power = (bits >> 23) - 126;
  bits = (bits & 0x007fffff) | 0x3f000000;
  float part;
  std::memcpy(&part, &bits, sizeof part);
  const bool small = part < 0.707106781186547524f;
  power -= small;
  part = (small ? part + part : part) - 1.0f;
  const float square = part * part;
  float series = 7.0376836292e-2f;
  series = series * part - 1.1514610310e-1f;
  series = series * part + 1.1676998740e-1f;
  series = series * part - 1.2420140846e-1f;
  series = series * part + 1.4249322787e-1f;
  series = series * part - 1.6668057665e-1f;
  series = series * part + 2.0000714765e-1f;
  series = series * part - 2.4999993993e-1f;
  series = series * part + 3.3333331174e-1f;
  const float exponent = static_cast<float>(power);
  const float tail = series * part * square - 2.12194440e-4f * exponent - 0.5f * square;
  const float value = part + tail + 0.693359375f * exponent;
  return x == x ? value : x;
}

struct Sizes {
  int64_t tokens, hidden, rank, experts, heads, top_k;
  int64_t bf16;  // whether x and its gradient are bf16

  // Whether products are most of the work. A matter of the rank alone, so that a token has the same
  // bits among any number of others.
  bool in_blocks() const { return rank >= kBlockedRank; }

  int64_t num_anchors() const { return heads * experts; }  // of all experts

  // Columns of b from an anchor to the next of the same expert, and in all: whole vectors, an odd
  // number of lines of a cache, since places an even number of lines apart share its sets.
  int64_t anchor_step() const { return odd_lines(experts); }
  int64_t columns() const { return odd_lines(heads * anchor_step()); }

  static int64_t odd_lines(int64_t numbers) { return ((numbers + 15) / 16 | 1) * 16; }
};

// Fields in the order of ScoreConstants in contract.py.
struct ScoreConstants {
  int32_t scoring;  // 0 dot, 1 cosine, 2 sips
  float gamma, beta, p, eps, scale, norm_eps;
};

// A call's tensors or their gradients, in the order of Tensors in contract.py; null: not there.
struct Tensors {
  void* x;  // see Hidden
  float *weight, *gain, *anchors;
  const int64_t* routes;  // experts [T, K] to weigh; a token whose first is negative chooses
  float *logits, *query, *rstd, *weights;
  int64_t* indices;
  float* lse;
};

// A call, in the order of cpu.py: one structure, since each argument of a foreign function costs time.
struct Call {
  Sizes sizes;
  ScoreConstants score;
  int32_t threads, normalize;  // whether weights sum to 1
  Tensors tensors;
};

// Hidden states or their gradient, [T, D], fp32 or bf16, counted in numbers from the first. bf16 is
// widened and rounded by parts of a row that stay in the caches, with the bits of a copy in fp32.
struct Hidden {
  void* data;
  bool bf16;

  float* fp32_at(int64_t place) const { return static_cast<float*>(data) + place; }

  uint16_t* bf16_at(int64_t place) const { return static_cast<uint16_t*>(data) + place; }

  template <int kToWrite>
  void prefetch(int64_t place) const {
    __builtin_prefetch(static_cast<char*>(data) + place * (bf16 ? 2 : 4), kToWrite);
  }

  void copy(int64_t place, int64_t count, float* to) const {
    if (!bf16) {
      std::memcpy(to, fp32_at(place), count * sizeof(float));
      return;
    }
    const uint16_t* from = bf16_at(place);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
      std::memcpy(to + i, &bits, sizeof bits);
    }
  }

  // In place where it is fp32, else in room.
  const float* read(int64_t place, int64_t count, float* room) const {
    if (!bf16) return fp32_at(place);
    copy(place, count, room);
    return room;
  }

  // Rounds to nearest, ties to even, as torch does.
  void write(const float* from, int64_t place, int64_t count) const {
    if (!bf16) {
      std::memcpy(fp32_at(place), from, count * sizeof(float));
      return;
    }
    uint16_t* to = bf16_at(place);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      uint32_t bits;
      std::memcpy(&bits, from + i, sizeof bits);
      const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
      to[i] = static_cast<uint16_t>(from[i] == from[i] ? rounded : 0x7fc0u);
    }
  }
};

// b [R, H, N], padded by zeros, times unit from the anchors [N, H, R], their lengths [N, H] and the
// largest |b|. Scores go through an exponential where there are several anchors: in units of
// 1 / log2(e) then.
struct AnchorSide {
  std::vector<float> b, norm;
  float longest = 0.0f, unit = 1.0f;

  AnchorSide(const float* anchors, const Sizes& s, const ScoreConstants& c)
      : b(anchors ? s.rank * s.columns() : 0), norm(anchors ? s.num_anchors() : 0) {
    if (!anchors) return;
    unit = s.heads > 1 ? kLog2E : 1.0f;
    const int64_t count = s.num_anchors();
    std::vector<float> factor(count);
    if (s.rank == 2) {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i)
        norm[i] = anchors[2 * i] * anchors[2 * i] + anchors[2 * i + 1] * anchors[2 * i + 1];
    } else {
      for (int64_t i = 0; i < count; ++i)
        for (int64_t r = 0; r < s.rank; ++r)
          norm[i] += anchors[i * s.rank + r] * anchors[i * s.rank + r];
    }
#pragma omp simd reduction(max : longest)
    for (int64_t i = 0; i < count; ++i) {
      norm[i] = std::sqrt(norm[i]);
      factor[i] = psi(norm[i], c) / clamped_norm(norm[i], c);
      const float reach = std::fabs(factor[i]) * norm[i];
      factor[i] *= unit;
      longest = reach > longest ? reach : longest;
    }
    if (s.rank == 2)
      transpose_scaled<2>(anchors, factor.data(), s);
    else
      transpose_scaled<0>(anchors, factor.data(), s);
  }

  // b from the anchors times their factors; a rank known to the compiler is three times faster.
  template <int kRank>
  void transpose_scaled(const float* anchors, const float* factor, const Sizes& s) {
    const int64_t rank = kRank ? kRank : s.rank, columns = s.columns();
    for (int64_t n = 0; n < s.experts; ++n)
      for (int64_t h = 0; h < s.heads; ++h)
        for (int64_t r = 0, i = n * s.heads + h; r < rank; ++r)
          b[r * columns + h * s.anchor_step() + n] = anchors[i * rank + r] * factor[i];
  }

  // psi of the length for sips, 1 for the others.
  static float psi(float length, const ScoreConstants& c) {
    return c.scoring == 2 ? 1.0f + (length - 1.0f) * (1.0f / c.p) : 1.0f;
  }

  // What the anchor is divided by.
  static float clamped_norm(float length, const ScoreConstants& c) {
    return c.scoring == 0 ? 1.0f : length > c.eps ? length : c.eps;
  }
};

// Work of one thread, on cache lines of its own; made before threads start, since what they throw
// would end the process.
struct Rooms {
  static constexpr int64_t kLine = 16;
  int64_t size;
  std::vector<float> numbers;

  Rooms(int64_t size, int32_t threads) : size(size + kLine), numbers(this->size * threads) {}

  float* of(int32_t part) { return numbers.data() + part * size; }
};

// Calls work(part) for every part, a thread each. A single one is called here: to enter a region
// of one thread takes 2 us where the caches are cold.
template <class Work>
inline void each_part(int32_t threads, Work work) {
  if (threads == 1) return work(0);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int32_t part = 0; part < threads; ++part) work(part);
}

// W_q [R, D] with the gain of the norm folded in.
inline std::vector<float> fold(const float* weight, const float* gain, int64_t rank,
                               int64_t width) {
  std::vector<float> folded(weight, weight + rank * width);
  if (gain)
    for (int64_t r = 0; r < rank; ++r)
      for (int64_t d = 0; d < width; ++d) folded[r * width + d] *= gain[d];
  return folded;
}

inline float length_of(const float* vector, int64_t size) {
  float square = 0.0f;
  for (int64_t r = 0; r < size; ++r) square += vector[r] * vector[r];
  return std::sqrt(square);
}

// a from q; returns |a|.
inline float query_side(const float* query, const Sizes& s, const ScoreConstants& c, float* a) {
  const float norm = length_of(query, s.rank);
  float factor = 1.0f;
  if (c.scoring == 1) factor = 1.0f / std::fmax(norm, c.eps);
  if (c.scoring == 2)
    factor = c.gamma * (1.0f + c.beta * std::tanh(norm)) / std::fmax(norm, c.eps);
  for (int64_t r = 0; r < s.rank; ++r) a[r] = factor * query[r];
  return std::fabs(factor) * norm;
}

}  // namespace
