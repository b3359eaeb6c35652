// The forward for larger ranks: a block of tokens at a time, by matrix products; see products.h.

#pragma once

#include "products.h"

namespace {

// W_q with the gain folded in, transposed to [D, R] with R padded by zeros.
inline std::vector<float> transposed(const float* weight, const float* gain, const Sizes& s,
                                     const Blocking& block) {
  std::vector<float> out(weight ? s.hidden * block.rank : 0);
  for (int64_t first = 0; weight && first < s.hidden; first += 16)  // a line of the cache
    for (int64_t r = 0; r < s.rank; ++r)
      for (int64_t d = first; d < std::min(first + 16, s.hidden); ++d)
        out[d * block.rank + r] = weight[r * s.hidden + d] * (gain ? gain[d] : 1.0f);
  return out;
}

// query [count, R padded] of the block of tokens from the first on, times one over the RMS where that
// is wanted; room for [tokens of a block, depth].
inline void project_block(Hidden x, int64_t first_token, const float* columns, int64_t count,
                          const Sizes& s, const ScoreConstants& c, const Blocking& block,
                          float* room, float* query, float* rstd) {
  float square[48] = {};
  for (int64_t first = 0; first < s.hidden; first += block.depth) {
    const int64_t depth = std::min(block.depth, s.hidden - first);
    const int64_t place = first_token * s.hidden + first;
    for (int64_t t = 0; x.bf16 && t < count; ++t)
      x.copy(place + t * s.hidden, depth, room + t * block.depth);
    const View rows = x.bf16 ? View{room, block.depth, 1} : View{x.fp32_at(place), s.hidden, 1};
    for (int64_t t = 0; rstd && t < count; ++t) {
      const float* row = rows.data + t * rows.row_step;
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t d = 0; d < depth; ++d) sum += row[d] * row[d];
      square[t] += sum;
    }
    multiply(rows, columns + first * block.rank, block.rank, depth, query, block.rank, count,
             block.rank, first > 0);
  }
  for (int64_t t = 0; rstd && t < count; ++t) {
    rstd[t] = 1.0f / std::sqrt(square[t] / static_cast<float>(s.hidden) + c.norm_eps);
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
