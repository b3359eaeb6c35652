// The backward for larger ranks: a block of tokens at a time, by matrix products; see products.h.

#pragma once

#include "products.h"

namespace {

// b transposed to [columns, R padded].
inline std::vector<float> transposed_anchors(const AnchorSide& keys, const Sizes& s,
                                             const Blocking& block) {
  std::vector<float> out(s.num_anchors() ? block.columns * block.rank : 0);
  for (int64_t r = 0; r < (out.empty() ? 0 : s.rank); ++r)
    for (int64_t h = 0; h < s.heads; ++h)
      for (int64_t n = 0; n < s.experts; ++n)
        out[(h * s.anchor_step() + n) * block.rank + r] =
            keys.b[r * block.columns + h * s.anchor_step() + n];
  return out;
}

// W_q with the gain folded in as panels [D / kPanel, R, kPanel], padded by zeros.
inline std::vector<float> panels(const float* weight, const float* gain, const Sizes& s,
                                 const Blocking& block) {
  std::vector<float> out(weight ? block.hidden * s.rank : 0);
  for (int64_t first = 0; weight && first < s.hidden; first += kPanel)
    for (int64_t r = 0; r < s.rank; ++r) {
      float* row = out.data() + first * s.rank + r * kPanel;
      for (int64_t d = first; d < std::min(first + kPanel, s.hidden); ++d)
        row[d - first] = weight[r * s.hidden + d] * (gain ? gain[d] : 1.0f);
    }
  return out;
}

// Gradient of a [count, R padded] from that of the logits; adds that of b to sum [R, columns].
inline void pool_backward_block(const float* a, const float* b, const float* b_rows, float unit,
                                const float* logits, const float* grad, int64_t count,
                                const Sizes& s, const ScoreConstants& c, const Blocking& block,
                                float* work, float* out, float* sum) {
  const float to_unit = unit / c.scale;
  for (int64_t first = 0; first < block.experts; first += kPanel) {
    const int64_t width = std::min(kPanel, block.experts - first);
    const int64_t real = std::min(width, s.experts - first);
    for (int64_t h = 0; h < s.heads; ++h) {
      const int64_t column = h * s.anchor_step() + first;
      if (s.heads > 1)
        multiply({a, block.rank, 1}, b + column, block.columns, s.rank, work, kPanel, count,
                 width, false);
      for (int64_t t = 0; t < count; ++t) {
        const float *g = grad + t * s.experts + first, *z = logits + t * s.experts + first;
        float* row = work + t * kPanel;
        if (s.heads > 1) {
#pragma omp simd
          for (int64_t i = 0; i < real; ++i)
            row[i] = g[i] * c.scale * fast_exp2(row[i] - z[i] * to_unit);
        } else {
          for (int64_t i = 0; i < real; ++i) row[i] = g[i] * c.scale;
        }
        for (int64_t i = real; i < width; ++i) row[i] = 0.0f;
      }
      multiply({work, kPanel, 1}, b_rows + column * block.rank, block.rank, width, out, block.rank,
               count, block.rank, first > 0 || h > 0);
      multiply({a, 1, block.rank}, work, kPanel, count, sum + column, block.columns, s.rank, width,
               true);
    }
  }
  for (int64_t i = 0; i < count * block.rank; ++i) out[i] /= unit;
}

// grad_x = pull x + grad W of the block of tokens from the first on, if wanted; adds grad x to sum
// [R, D padded].
inline void project_backward_block(Hidden x, int64_t first_token, const float* weight,
                                   const float* grad, const float* pull, int64_t count,
                                   const Sizes& s, const Blocking& block, float* work,
                                   Hidden grad_x, float* sum) {
  float* own = work + block.tokens * kPanel;
  for (int64_t first = 0; first < s.hidden; first += kPanel) {
    const int64_t real = std::min(kPanel, s.hidden - first), width = padded(real, 16);
    for (int64_t t = 0; t < count; ++t) {
      float *row = work + t * kPanel, *out = own + t * kPanel;
      const int64_t place = (first_token + t) * s.hidden + first;
      // Rows are far apart: what the processor fetches ahead by itself ends with the panel.
      for (int64_t d = kPanel; d < 2 * kPanel; d += 16) {
        x.prefetch<0>(place + d);
        if (grad_x.data) grad_x.prefetch<1>(place + d);
      }
      x.copy(place, real, row);
      for (int64_t d = real; d < width; ++d) row[d] = 0.0f;
      if (!grad_x.data) continue;
#pragma omp simd
      for (int64_t d = 0; d < width; ++d) out[d] = pull[t] * row[d];
    }
    multiply({grad, 1, block.rank}, work, kPanel, count, sum + first, block.hidden, s.rank, width,
             true);
    if (!grad_x.data) continue;
    multiply({grad, block.rank, 1}, weight + first * s.rank, kPanel, s.rank, own, kPanel, count,
             width, true);
    for (int64_t t = 0; t < count; ++t)
      grad_x.write(own + t * kPanel, (first_token + t) * s.hidden + first, real);
  }
}

}  // namespace
