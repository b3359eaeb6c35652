// The router's backward on a CPU in one parallel region, token after token: scores are computed
// again, x is read once, only sums over tokens outlive a token. Called by cpu.py.

#include "products.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

// Gradient of the logits of one token through softmax and top-k.
inline void select_backward(int64_t t, const Tensors& in, const Tensors& up, bool normalize,
                            const Sizes& s, float* grad) {
  const int64_t n = s.experts, k = s.top_k;
  const float* own = up.logits ? up.logits + t * n : nullptr;
  if (!up.weights) {
    std::memcpy(grad, own, n * sizeof(float));
    return;
  }
  const float *logits = in.logits + t * n, *weights = in.weights + t * k;
  const int64_t* indices = in.indices + t * k;
  const float* up_weights = up.weights + t * k;
  float prob_coefficient = 0.0f, total = 0.0f;
  for (int64_t j = 0; j < k; ++j) total += weights[j] * up_weights[j];
  if (!normalize) prob_coefficient -= total;
  const float lse = in.lse[t];
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) grad[i] = fast_exp(logits[i] - lse);
  for (int64_t i = 0; i < n; ++i) grad[i] *= prob_coefficient;
  for (int64_t j = 0; j < k; ++j)
    grad[indices[j]] += weights[j] * (up_weights[j] - (normalize ? total : 0.0f));
  if (own)
    for (int64_t i = 0; i < n; ++i) grad[i] += own[i];
}

// Gradient of a from that of the logits; adds that of b to sum [R, columns]. kRank: see scores_of.
template <int kRank>
inline void pool_backward(const float* a, const AnchorSide& keys, const float* logits,
                          const float* grad, const Sizes& s, const ScoreConstants& c, float* out,
                          float* sum) {
  const int64_t rank = kRank ? kRank : s.rank, columns = s.columns();
  const float to_unit = keys.unit / c.scale;
  Lanes inner[kRank ? kRank : kBlockedRank] = {};
  for (int64_t i = 0; i < s.experts; i += kLanes) {
    const Lanes pooled = load_first(logits + i, s.experts - i) * to_unit;
    const Lanes upstream = load_first(grad + i, s.experts - i) * c.scale;
    for (int64_t h = 0; h < s.heads; ++h) {
      const int64_t place = h * s.anchor_step() + i;
      const float* column = keys.b.data() + place;
      float* target = sum + place;
      Lanes share = upstream;
      if (s.heads > 1) share *= each(scores_of<kRank>(a, column, s) - pooled, fast_exp2);
#pragma GCC unroll 2
      for (int64_t r = 0; r < rank; ++r) {
        inner[r] += share * load(column + r * columns);
        store(target + r * columns, load(target + r * columns) + a[r] * share);
      }
    }
  }
  for (int64_t r = 0; r < rank; ++r) out[r] = sum_of(inner[r]) / keys.unit;
}

// Gradient of v, in place, from that of v / max(|v|, eps) and that of |v|; both in steps of stride.
inline void direction_backward(float* grad, const float* vector, float norm, float grad_norm,
                               float eps, int64_t size, int64_t stride) {
  const float inverse = 1.0f / std::fmax(norm, eps);
  float along = 0.0f;
  for (int64_t r = 0; r < size; ++r) along += grad[r * stride] * vector[r];
  float pull = norm >= eps ? -along * inverse * inverse * inverse : 0.0f;
  if (norm > 0.0f) pull += grad_norm / norm;
  for (int64_t r = 0; r < size; ++r)
    grad[r * stride] = grad[r * stride] * inverse + vector[r] * pull;
}

// Gradient of the query, in place, from that of a.
inline void query_side_backward(float* grad, const float* query, const Sizes& s,
                                const ScoreConstants& c) {
  if (c.scoring == 0) return;
  const float norm = length_of(query, s.rank);
  float grad_norm = 0.0f;
  if (c.scoring == 2) {
    const float t = std::tanh(norm);
    float inner = 0.0f;
    for (int64_t r = 0; r < s.rank; ++r) inner += grad[r] * query[r];
    grad_norm = inner / std::fmax(norm, c.eps) * (1.0f - t * t) * c.gamma * c.beta;
    for (int64_t r = 0; r < s.rank; ++r) grad[r] *= c.gamma * (1.0f + c.beta * t);
  }
  direction_backward(grad, query, norm, grad_norm, c.eps, s.rank, 1);
}

// grad_anchors [N, H, R] from the gradient of b [R, columns], which is overwritten.
void anchor_side_backward(float* grad, const float* anchors, const AnchorSide& keys,
                          const Sizes& s, const ScoreConstants& c, float* grad_anchors) {
  const int64_t columns = s.columns();
  for (int64_t n = 0; n < s.experts; ++n)
    for (int64_t h = 0; h < s.heads; ++h) {
      const int64_t flat = n * s.heads + h;
      const float* anchor = anchors + flat * s.rank;
      float* g = grad + h * s.anchor_step() + n;
      const float norm = keys.norm[flat];
      float grad_norm = 0.0f;
      if (c.scoring == 2) {
        for (int64_t r = 0; r < s.rank; ++r) grad_norm += g[r * columns] * anchor[r];
        grad_norm /= std::fmax(norm, c.eps) * c.p;
        const float psi = AnchorSide::psi(norm, c);
        for (int64_t r = 0; r < s.rank; ++r) g[r * columns] *= psi;
      }
      if (c.scoring > 0) direction_backward(g, anchor, norm, grad_norm, c.eps, s.rank, columns);
      float* out = grad_anchors + flat * s.rank;
      for (int64_t r = 0; r < s.rank; ++r) out[r] = g[r * columns];
    }
}

// out = pull x + grad folded; adds grad x to sum [R, D]. Two columns per pass over the row.
inline void project_backward(const float* x, const float* folded, const float* grad, float pull,
                             const Sizes& s, float* out, float* sum) {
  const int64_t width = s.hidden;
  for (int64_t r = 0; r < s.rank; r += 2) {
    const bool pair = r + 1 < s.rank;
    const float g0 = grad[r], g1 = pair ? grad[r + 1] : 0.0f;
    const float *w0 = folded + r * width, *w1 = pair ? w0 + width : w0;
    float *s0 = sum + r * width, *s1 = s0 + width;
    if (out && r == 0) {
#pragma omp simd
      for (int64_t d = 0; d < width; ++d) out[d] = pull * x[d] + g0 * w0[d] + g1 * w1[d];
    } else if (out) {
#pragma omp simd
      for (int64_t d = 0; d < width; ++d) out[d] += g0 * w0[d] + g1 * w1[d];
    }
    if (pair) {
#pragma omp simd
      for (int64_t d = 0; d < width; ++d) {
        s0[d] += g0 * x[d];
        s1[d] += g1 * x[d];
      }
    } else {
#pragma omp simd
      for (int64_t d = 0; d < width; ++d) s0[d] += g0 * x[d];
    }
  }
}

// Asks for large pages under a fresh tensor, whose first writes otherwise cost a fault each 4 KiB.
void large_pages(void* start, int64_t bytes) {
#ifdef __linux__
  constexpr uintptr_t page = uintptr_t{1} << 21;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(start) + page - 1) / page * page;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(start) + bytes) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// Adds the parts of all threads to the first.
void add_parts(std::vector<float>& sums, int64_t size, int32_t parts) {
  for (int32_t part = 1; part < parts; ++part)
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) sums[i] += sums[part * size + i];
}

// Factor of x in its gradient, through the norm; multiplies the query's gradient by one over the RMS.
inline float pull_of(float* grad, const float* query, float rstd, const Sizes& s) {
  float pull = 0.0f;
  for (int64_t r = 0; r < s.rank; ++r) pull -= grad[r] * query[r];
  for (int64_t r = 0; r < s.rank; ++r) grad[r] *= rstd;
  return pull * (rstd * rstd / static_cast<float>(s.hidden));
}

// Gradients of W_q and the gain from that of their product, sums [R, step >= D].
void weight_backward(const float* sums, int64_t step, const Tensors& in, const Sizes& s,
                     const Tensors& grads) {
  for (int64_t d = 0; in.gain && d < s.hidden; ++d) grads.gain[d] = 0.0f;
  for (int64_t r = 0; r < s.rank; ++r)
    for (int64_t d = 0; d < s.hidden; ++d) {
      const float sum = sums[r * step + d];
      const int64_t i = r * s.hidden + d;
      grads.weight[i] = in.gain ? sum * in.gain[d] : sum;
      if (in.gain) grads.gain[d] += sum * in.weight[i];
    }
}

// See l2r_backward.
void backward(const Sizes& s, const ScoreConstants& c, int32_t threads, bool normalize_weights,
              const Tensors& in, const Tensors& up, const Tensors& grads) {
  const AnchorSide keys(in.anchors, s, c);
  const std::vector<float> folded = fold(in.weight, in.gain, in.x ? s.rank : 0, s.hidden);
  const int64_t anchor_numbers = in.anchors ? s.rank * s.columns() : 0;
  const int64_t weight_numbers = in.x ? s.rank * s.hidden : 0;
  std::vector<float> anchor_sums(threads * anchor_numbers), weight_sums(threads * weight_numbers);
  const Hidden x{in.x, s.bf16 != 0}, grad_x{grads.x, s.bf16 != 0};
  Rooms rooms(2 * s.rank + s.experts + (x.bf16 ? 2 * s.hidden : 0), threads);
  const auto pool = s.rank == 2 ? pool_backward<2> : pool_backward<0>;
  if (grads.x) large_pages(grads.x, s.tokens * s.hidden * (s.bf16 ? 2 : 4));
  each_part(threads, [&](int32_t part) {
    float *a = rooms.of(part), *g = a + s.rank, *own = g + s.rank;
    float *row_room = own + s.experts, *out_room = row_room + s.hidden;
    const int64_t end = s.tokens * (part + 1) / threads;
    for (int64_t t = s.tokens * part / threads; t < end; ++t) {
      const float *q = in.query + t * s.rank, *z = in.logits + t * s.experts;
      float* grad = grads.logits ? grads.logits + t * s.experts : own;
      select_backward(t, in, up, normalize_weights, s, grad);
      if (!in.x) continue;
      query_side(q, s, c, a);
      pool(a, keys, z, grad, s, c, g, anchor_sums.data() + part * anchor_numbers);
      query_side_backward(g, q, s, c);
      const float pull = in.gain ? pull_of(g, q, in.rstd[t], s) : 0.0f;
      const int64_t place = t * s.hidden;
      float* out = !grads.x ? nullptr : x.bf16 ? out_room : grad_x.fp32_at(place);
      project_backward(x.read(place, s.hidden, row_room), folded.data(), g, pull, s, out,
                       weight_sums.data() + part * weight_numbers);
      if (out && x.bf16) grad_x.write(out, place, s.hidden);
    }
  });
  if (!in.x) return;
  add_parts(anchor_sums, anchor_numbers, threads);
  anchor_side_backward(anchor_sums.data(), in.anchors, keys, s, c, grads.anchors);
  add_parts(weight_sums, weight_numbers, threads);
  weight_backward(weight_sums.data(), s.hidden, in, s, grads);
}

// --- Larger ranks: a block of tokens at a time, by matrix products; see products.h. ---

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

// See l2r_backward.
void backward_in_blocks(const Sizes& s, const ScoreConstants& c, int32_t threads,
                        bool normalize_weights, const Tensors& in, const Tensors& up,
                        const Tensors& grads) {
  const Blocking block(s);
  const AnchorSide keys(in.anchors, s, c);
  const std::vector<float> b_rows = transposed_anchors(keys, s, block);
  const std::vector<float> weight = panels(in.weight, in.gain, s, block);
  const int64_t anchor_numbers = s.rank * block.columns, weight_numbers = s.rank * block.hidden;
  std::vector<float> anchor_sums(threads * anchor_numbers), weight_sums(threads * weight_numbers);
  const Hidden x{in.x, s.bf16 != 0}, grad_x{grads.x, s.bf16 != 0};
  Rooms rooms(block.tokens * (2 * block.rank + 2 * kPanel + s.experts + 1), threads);
  if (grads.x) large_pages(grads.x, s.tokens * s.hidden * (s.bf16 ? 2 : 4));
  each_part(threads, [&](int32_t part) {
    float *a = rooms.of(part), *g = a + block.tokens * block.rank;
    float *pull = g + block.tokens * block.rank, *work = pull + block.tokens;
    float* grad = work + 2 * block.tokens * kPanel;
    const int64_t end = s.tokens * (part + 1) / threads;
    for (int64_t first = s.tokens * part / threads; first < end; first += block.tokens) {
      const int64_t count = std::min(block.tokens, end - first);
      const float* q = in.query + first * s.rank;
      for (int64_t t = 0; t < count; ++t) {
        select_backward(first + t, in, up, normalize_weights, s, grad + t * s.experts);
        query_side(q + t * s.rank, s, c, a + t * block.rank);
      }
      pool_backward_block(a, keys.b.data(), b_rows.data(), keys.unit, in.logits + first * s.experts,
                          grad, count, s, c, block, work, g,
                          anchor_sums.data() + part * anchor_numbers);
      for (int64_t t = 0; t < count; ++t) {
        float* own = g + t * block.rank;
        const float* query = q + t * s.rank;
        query_side_backward(own, query, s, c);
        pull[t] = in.gain ? pull_of(own, query, in.rstd[first + t], s) : 0.0f;
      }
      project_backward_block(x, first, weight.data(), g, pull, count, s, block, work, grad_x,
                             weight_sums.data() + part * weight_numbers);
    }
  });
  add_parts(anchor_sums, anchor_numbers, threads);
  anchor_side_backward(anchor_sums.data(), in.anchors, keys, s, c, grads.anchors);
  add_parts(weight_sums, weight_numbers, threads);
  weight_backward(weight_sums.data(), block.hidden, in, s, grads);
}

}  // namespace

extern "C" {

// The gradient of the logits from up.logits and up.weights (without the latter it is up.logits), and
// where x was given, of anchors, weight, gain and, if not null, x; else it goes to grads.logits.
// Not 0 where memory ran out.
int32_t l2r_backward(const Call* call, const Tensors* upstream, const Tensors* gradients) {
  try {
    const auto run = call->sizes.in_blocks() ? backward_in_blocks : backward;
    run(call->sizes, call->score, call->threads, call->normalize, call->tensors, *upstream,
        *gradients);
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}

}  // extern "C"
