// The forward for larger ranks: a block of tokens at a time, by matrix products; see products.h.

#pragma once

#include <memory>

#include "products.h"

namespace {

// W_q with the gain folded in, by tiles: copied to [R / kRanks, D / kLanes, kRanks, kLanes], padded by
// zeros; or, for few tokens, which would not earn back the copy, multiplied where it is used.
struct Projection {
  const float *weight, *gain;
  int64_t hidden, width, rank;
  std::unique_ptr<float[]> tiles;  // not cleared before it is filled

  Projection(const float* weight, const float* gain, const Sizes& s)
      : weight(weight),
        gain(gain),
        hidden(s.hidden),
        width(padded(s.hidden, kLanes)),
        rank(s.rank) {
    const bool fits = hidden % kLanes == 0 && rank % kRanks == 0;
    if (weight && !(fits && s.tokens <= kFewTokens)) fill();
  }

 private:
  static constexpr int64_t kFewTokens = 24;

  void fill() {
    const int64_t ranks = padded(rank, kRanks);
    tiles.reset(new float[ranks * width]);
    const auto copy = [&](const float* from, int64_t d, int64_t count, float* to) {
      for (int64_t i = 0; i < count; ++i) to[i] = gain ? from[d + i] * gain[d + i] : from[d + i];
    };
    for (int64_t r = 0; r < ranks; ++r) {
      const float* from = weight + r * hidden;
      float* to = tiles.get() + r / kRanks * kRanks * width + r % kRanks * kLanes;
      const int64_t known = r < rank ? hidden : 0;
      int64_t d = 0;
      for (; d + kLanes <= known; d += kLanes) copy(from, d, kLanes, to + d * kRanks);
      for (; d < width; d += kLanes) {
        std::memset(to + d * kRanks, 0, kLanes * sizeof(float));
        if (d < known) copy(from, d, known - d, to + d * kRanks);
      }
    }
  }
};

// Keeps a vector that is used several times in a register; compilers read it again each time.
inline void keep(Lanes& lanes) {
#if defined(__x86_64__)
  asm("" : "+v"(lanes));
#elif defined(__aarch64__)
  asm("" : "+w"(lanes));
#endif
}

// Products of kRows rows of x, the first at place, with kRanks rows of W_q, from `rank` on: query
// [kRows, step]. kFirst: the rows come from memory, so the next ones are fetched; their sums of squares
// go to squares. kTiles: W_q was copied.
template <int kRows, bool kBf16, bool kFirst, bool kTiles>
inline void project_rows(Hidden x, int64_t place, const Projection& w, int64_t rank, float* query,
                         int64_t step, float* squares) {
  const int64_t hidden = w.hidden, whole = hidden / kLanes * kLanes;
  const float* from = kTiles ? w.tiles.get() + rank * w.width : w.weight + rank * hidden;
  Lanes sums[kRows][kRanks] = {}, square[kRows] = {}, row[kRows];
  const auto add = [&](int64_t d) {
    for (int t = 0; kFirst && t < kRows; ++t) square[t] += row[t] * row[t];
    const Lanes scale = kTiles || !w.gain ? Lanes{} + 1.0f : load(w.gain + d);
#pragma GCC unroll 8
    for (int r = 0; r < kRanks; ++r) {
      Lanes column = kTiles ? load(from + d * kRanks + r * kLanes) : load(from + r * hidden + d);
      if (!kTiles) column *= scale;
      keep(column);
#pragma GCC unroll 8
      for (int t = 0; t < kRows; ++t) sums[t][r] += row[t] * column;
    }
  };
  for (int64_t d = 0; d < whole; d += kLanes) {
#pragma GCC unroll 8
    for (int t = 0; t < kRows; ++t) {
      const int64_t at = place + t * hidden + d;
      if (kFirst) x.prefetch<0>(at + kRows * hidden);
      row[t] = kBf16 ? widen(x.bf16_at(at)) : load(x.fp32_at(at));
    }
    add(d);
  }
  if (kTiles && whole < hidden) {
    for (int t = 0; t < kRows; ++t) {
      float rest[kLanes] = {};
      x.copy(place + t * hidden + whole, hidden - whole, rest);
      row[t] = load(rest);
    }
    add(whole);
  }
  for (int t = 0; t < kRows; ++t) {
    for (int r = 0; r < kRanks; ++r) query[t * step + r] = sum_of(sums[t][r]);
    if (kFirst) squares[t] = sum_of(square[t]);
  }
}

template <bool kBf16, bool kFirst, bool kTiles>
inline void project_tokens(Hidden x, int64_t place, const Projection& w, int64_t rank,
                           int64_t count, float* query, int64_t step, float* squares) {
  for (; count > 0; count -= 3, place += 3 * w.hidden, query += 3 * step, squares += 3) {
    const auto run = count >= 3   ? project_rows<3, kBf16, kFirst, kTiles>
                     : count == 2 ? project_rows<2, kBf16, kFirst, kTiles>
                                  : project_rows<1, kBf16, kFirst, kTiles>;
    run(x, place, w, rank, query, step, squares);
  }
}

// query [count, R padded] of the block of tokens from the first on, times one over the RMS where that
// is wanted.
template <bool kBf16, bool kTiles>
inline void project_block(Hidden x, int64_t first, const Projection& w, int64_t count,
                          float norm_eps, int64_t step, float* query, float* rstd) {
  float squares[48];
  for (int64_t r = 0; r < w.rank; r += kRanks) {
    const auto run = r ? project_tokens<kBf16, false, kTiles> : project_tokens<kBf16, true, kTiles>;
    run(x, first * w.hidden, w, r, count, query + r, step, squares);
  }
  for (int64_t t = 0; rstd && t < count; ++t) {
    rstd[t] = 1.0f / std::sqrt(squares[t] / static_cast<float>(w.hidden) + norm_eps);
    for (int64_t r = 0; r < w.rank; ++r) query[t * step + r] *= rstd[t];
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
      multiply({a, block.rank, 1}, b + h * s.anchor_step() + first, block.columns, s.rank, out,
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
