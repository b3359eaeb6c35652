// The forward for larger ranks: a block of tokens at a time, by matrix products; see products.h.

#pragma once

#include "products.h"

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRanks = 8;  // of a tile of three tokens: 24 sums, 3 rows, 3 squares and a column
#else
constexpr int kRanks = 4;  // in 16 registers: 12 sums, 3 rows and a column
#endif

// W_q with the gain folded in, as [R / kRanks, D / kLanes, kRanks, kLanes], padded by zeros.
inline std::vector<float> tiles(const float* weight, const float* gain, const Sizes& s) {
  const int64_t width = padded(s.hidden, kLanes);
  std::vector<float> out(weight ? padded(s.rank, kRanks) * width : 0);
  for (int64_t r = 0; weight && r < s.rank; ++r) {
    float* to = out.data() + r / kRanks * kRanks * width + r % kRanks * kLanes;
    for (int64_t d = 0; d < s.hidden; ++d)
      to[d / kLanes * kRanks * kLanes + d % kLanes] =
          weight[r * s.hidden + d] * (gain ? gain[d] : 1.0f);
  }
  return out;
}

// Keeps a vector that is used several times in a register; compilers read it again each time.
inline void keep(Lanes& lanes) {
#if defined(__x86_64__)
  asm("" : "+v"(lanes));
#elif defined(__aarch64__)
  asm("" : "+w"(lanes));
#endif
}

inline float sum_of(const Lanes& lanes) {
  float numbers[kLanes], sum = 0.0f;
  store(numbers, lanes);
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < kLanes; ++i) sum += numbers[i];
  return sum;
}

// Products of kRows rows of x, the first at place, with kRanks of W_q: query [kRows, step]. kFirst:
// the rows come from memory, so the next ones are fetched; their sums of squares go to squares.
template <int kRows, bool kBf16, bool kFirst>
inline void project_rows(Hidden x, int64_t place, const float* weight, int64_t hidden, float* query,
                         int64_t step, float* squares) {
  Lanes sums[kRows][kRanks] = {}, square[kRows] = {}, row[kRows];
  const auto add = [&](const float* columns) {
    for (int t = 0; kFirst && t < kRows; ++t) square[t] += row[t] * row[t];
#pragma GCC unroll 8
    for (int r = 0; r < kRanks; ++r) {
      Lanes column = load(columns + r * kLanes);
      keep(column);
#pragma GCC unroll 8
      for (int t = 0; t < kRows; ++t) sums[t][r] += row[t] * column;
    }
  };
  const int64_t whole = hidden / kLanes * kLanes;
  for (int64_t d = 0; d < whole; d += kLanes) {
#pragma GCC unroll 8
    for (int t = 0; t < kRows; ++t) {
      const int64_t at = place + t * hidden + d;
      if (kFirst) x.prefetch<0>(at + kRows * hidden);
      row[t] = kBf16 ? widen(x.bf16_at(at)) : load(x.fp32_at(at));
    }
    add(weight + d * kRanks);
  }
  if (whole < hidden) {
    for (int t = 0; t < kRows; ++t) {
      float rest[kLanes] = {};
      x.copy(place + t * hidden + whole, hidden - whole, rest);
      row[t] = load(rest);
    }
    add(weight + whole * kRanks);
  }
  for (int t = 0; t < kRows; ++t) {
    for (int r = 0; r < kRanks; ++r) query[t * step + r] = sum_of(sums[t][r]);
    if (kFirst) squares[t] = sum_of(square[t]);
  }
}

template <bool kBf16, bool kFirst>
inline void project_tokens(Hidden x, int64_t place, const float* weight, int64_t count,
                           int64_t hidden, float* query, int64_t step, float* squares) {
  for (; count > 0; count -= 3, place += 3 * hidden, query += 3 * step, squares += 3) {
    const auto run = count >= 3   ? project_rows<3, kBf16, kFirst>
                     : count == 2 ? project_rows<2, kBf16, kFirst>
                                  : project_rows<1, kBf16, kFirst>;
    run(x, place, weight, hidden, query, step, squares);
  }
}

// query [count, R padded] of the block of tokens from the first on, times one over the RMS where that
// is wanted.
template <bool kBf16>
inline void project_block(Hidden x, int64_t first, const float* weight, int64_t count,
                          const Sizes& s, const ScoreConstants& c, const Blocking& block,
                          float* query, float* rstd) {
  float squares[48];
  const int64_t width = padded(s.hidden, kLanes);
  for (int64_t r = 0; r < s.rank; r += kRanks) {
    const auto run = r ? project_tokens<kBf16, false> : project_tokens<kBf16, true>;
    run(x, first * s.hidden, weight + r * width, count, s.hidden, query + r, block.rank, squares);
  }
  for (int64_t t = 0; rstd && t < count; ++t) {
    rstd[t] = 1.0f / std::sqrt(squares[t] / static_cast<float>(s.hidden) + c.norm_eps);
    for (int64_t r = 0; r < s.rank; ++r) query[t * block.rank + r] *= rstd[t];
  }
}

// Logits of a block: log-sum-exp over the anchors of each expert, where no score needs a maximum.
inline void pool_block(const float* a, const float* b, int64_t count, const Sizes& s,
                       const ScoreConstants& c, const Blocking& block, float* work, float* logits) {
  float* scores = work + block.tokens * kPanel;
  for (int64_t first = 0; first < block.experts; first += kPanel) {
    const int64_t width = std::min(kPanel, block.experts - first);
    for (int64_t h = 0; h < s.heads; ++h) {
      float* out = h ? scores : work;
      multiply({a, block.rank, 1}, b + h * block.experts + first, block.columns, s.rank, out,
               kPanel, count, width, false);
      if (s.heads == 1) break;
      for (int64_t t = 0; t < count; ++t) {
        float *sum = work + t * kPanel, *row = out + t * kPanel;
        if (h == 0) {
#pragma omp simd
          for (int64_t i = 0; i < width; ++i) sum[i] = fast_exp2(row[i]);
        } else {
#pragma omp simd
          for (int64_t i = 0; i < width; ++i) sum[i] += fast_exp2(row[i]);
        }
      }
    }
    const int64_t real = std::min(width, s.experts - first);
    for (int64_t t = 0; t < count; ++t) {
      const float* sum = work + t * kPanel;
      float* out = logits + t * s.experts + first;
      if (s.heads == 1) {
        for (int64_t i = 0; i < real; ++i) out[i] = sum[i] * c.scale;
      } else {
#pragma omp simd
        for (int64_t i = 0; i < real; ++i) out[i] = fast_log(sum[i]) * c.scale;
      }
    }
  }
}

}  // namespace
