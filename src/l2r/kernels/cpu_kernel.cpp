// The router on a CPU in one parallel region, token after token: x is read once, the scores of a
// token live in the first-level cache. Same mathematics as factored.py; called by cpu_native.py.
//
// Letters: T tokens, D hidden size, R rank, N experts, H anchors, K chosen. Layouts: x [T, D],
// folded [R, D], query and a [T, R], b [R, H, N], logits [T, N], all fp32 and contiguous.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr float kSafeExponent = 60.0f;  // |score| up to which exp needs no maximum

// exp on (-inf, 88], relative error 2e-7; written out so that the compiler vectorises it.
inline float fast_exp(float x) {
  x = x < -87.0f ? -87.0f : x;
  const float rounded = std::nearbyintf(x * 1.44269504088896341f);
  const float rest = (x - rounded * 0.693359375f) + rounded * 2.12194440e-4f;
  float series = 1.9875691500e-4f;
  series = series * rest + 1.3981999507e-3f;
  series = series * rest + 8.3334519073e-3f;
  series = series * rest + 4.1665795894e-2f;
  series = series * rest + 1.6666665459e-1f;
  series = series * rest + 5.0000001201e-1f;
  series = series * rest * rest + rest + 1.0f;
  const int32_t power = (static_cast<int32_t>(rounded) + 127) << 23;
  float scale;
  std::memcpy(&scale, &power, sizeof scale);
  return series * scale;
}

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
};

struct Score {
  int32_t scoring;  // 0 dot, 1 cosine, 2 sips
  float gamma, beta, p, eps, scale, norm_eps;
};

// b [R, H, N] from the anchors [N, H, R], and the largest |b|.
struct AnchorSide {
  std::vector<float> b;
  float longest = 0.0f;

  AnchorSide(const float* anchors, const Sizes& s, const Score& c) : b(s.rank * s.heads * s.experts) {
    const int64_t plane = s.heads * s.experts;
    for (int64_t n = 0; n < s.experts; ++n)
      for (int64_t h = 0; h < s.heads; ++h)
        for (int64_t r = 0; r < s.rank; ++r)
          b[r * plane + h * s.experts + n] = anchors[(n * s.heads + h) * s.rank + r];
    std::vector<float> norm(plane, 0.0f);
    for (int64_t r = 0; r < s.rank; ++r)
#pragma omp simd
      for (int64_t i = 0; i < plane; ++i) norm[i] += b[r * plane + i] * b[r * plane + i];
    float largest = 0.0f;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < plane; ++i) {
      const float length = std::sqrt(norm[i]);
      const float divisor = length > c.eps ? length : c.eps;
      const float grown = c.scoring == 2 ? 1.0f + (length - 1.0f) / c.p : 1.0f;
      norm[i] = c.scoring > 0 ? grown / divisor : 1.0f;
      const float reach = std::fabs(norm[i]) * length;
      largest = reach > largest ? reach : largest;
    }
    longest = largest;
    for (int64_t r = 0; r < s.rank; ++r)
#pragma omp simd
      for (int64_t i = 0; i < plane; ++i) b[r * plane + i] *= norm[i];
  }
};

// W_q [R, D] with the gain of the norm folded in.
std::vector<float> fold(const float* weight, const float* gain, int64_t rank, int64_t width) {
  std::vector<float> folded(weight, weight + rank * width);
  if (gain)
    for (int64_t r = 0; r < rank; ++r)
      for (int64_t d = 0; d < width; ++d) folded[r * width + d] *= gain[d];
  return folded;
}

// q = rstd * (folded x), two columns of the projection per pass over the row.
inline float project(const float* x, const float* folded, const Sizes& s, const Score& c,
                     bool normalize, float* query) {
  const int64_t width = s.hidden;
  float square = 0.0f;
  for (int64_t r = 0; r < s.rank; r += 2) {
    const float* first = folded + r * width;
    const float* second = r + 1 < s.rank ? first + width : first;
    float one = 0.0f, two = 0.0f, sum = 0.0f;
#pragma omp simd reduction(+ : one, two, sum)
    for (int64_t d = 0; d < width; ++d) {
      one += x[d] * first[d];
      two += x[d] * second[d];
      sum += x[d] * x[d];
    }
    query[r] = one;
    if (r + 1 < s.rank) query[r + 1] = two;
    square = sum;
  }
  if (!normalize) return 1.0f;
  const float rstd = 1.0f / std::sqrt(square / static_cast<float>(width) + c.norm_eps);
  for (int64_t r = 0; r < s.rank; ++r) query[r] *= rstd;
  return rstd;
}

// a from q; returns |a|.
inline float query_side(const float* query, const Sizes& s, const Score& c, float* a) {
  float norm = 0.0f;
  for (int64_t r = 0; r < s.rank; ++r) norm += query[r] * query[r];
  norm = std::sqrt(norm);
  float factor = 1.0f;
  if (c.scoring == 1) factor = 1.0f / std::fmax(norm, c.eps);
  if (c.scoring == 2)
    factor = c.gamma * (1.0f + c.beta * std::tanh(norm)) / std::fmax(norm, c.eps);
  for (int64_t r = 0; r < s.rank; ++r) a[r] = factor * query[r];
  return std::fabs(factor) * norm;
}

// Scores of one anchor of all experts.
inline void score_row(const float* a, const float* b, int64_t h, const Sizes& s, float* out) {
  const int64_t n = s.experts, plane = s.heads * n;
  const float* first = b + h * n;
  const float* second = s.rank > 1 ? first + plane : first;
  const float a0 = a[0], a1 = s.rank > 1 ? a[1] : 0.0f;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = a0 * first[i] + a1 * second[i];
  for (int64_t r = 2; r < s.rank; ++r) {
    const float* row = first + r * plane;
    const float factor = a[r];
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] += factor * row[i];
  }
}

inline void pool(const float* a, float length, const float* b, const Sizes& s, const Score& c,
                 float longest, float* work, float* logits) {
  const int64_t n = s.experts;
  if (s.heads == 1) {
    score_row(a, b, 0, s, logits);
  } else if (length * longest <= kSafeExponent) {
    for (int64_t i = 0; i < n; ++i) logits[i] = 0.0f;
    for (int64_t h = 0; h < s.heads; ++h) {
      score_row(a, b, h, s, work);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) logits[i] += fast_exp(work[i]);
    }
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) logits[i] = fast_log(logits[i]);
  } else {
    float* top = work + n;
    score_row(a, b, 0, s, top);
    for (int64_t h = 1; h < s.heads; ++h) {
      score_row(a, b, h, s, work);
      for (int64_t i = 0; i < n; ++i) top[i] = work[i] > top[i] ? work[i] : top[i];
    }
    for (int64_t i = 0; i < n; ++i) logits[i] = 0.0f;
    for (int64_t h = 0; h < s.heads; ++h) {
      score_row(a, b, h, s, work);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) logits[i] += fast_exp(work[i] - top[i]);
    }
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) logits[i] = top[i] + fast_log(logits[i]);
  }
  if (c.scale != 1.0f)
    for (int64_t i = 0; i < n; ++i) logits[i] *= c.scale;
}

// The K largest, smallest index first among equals; returns the log-sum-exp.
inline float select(const float* logits, const Sizes& s, bool normalize, float* weights,
                    int64_t* indices, float* probs) {
  const int64_t n = s.experts, k = s.top_k;
  float top = logits[0], total = 0.0f;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; ++i) top = logits[i] > top ? logits[i] : top;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) {
    probs[i] = fast_exp(logits[i] - top);
    total += probs[i];
  }
  int64_t filled = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float value = logits[i];
    if (filled == k && !(value > weights[k - 1])) continue;
    int64_t place = filled < k ? filled++ : k - 1;
    for (; place > 0 && value > weights[place - 1]; --place) {
      weights[place] = weights[place - 1];
      indices[place] = indices[place - 1];
    }
    weights[place] = value;
    indices[place] = i;
  }
  float chosen = 0.0f;
  for (int64_t j = 0; j < k; ++j) {
    weights[j] = fast_exp(weights[j] - top) / total;
    chosen += weights[j];
  }
  if (normalize)
    for (int64_t j = 0; j < k; ++j) weights[j] /= chosen;
  for (int64_t i = 0; i < n; ++i) probs[i] /= total;
  return top + std::log(total);
}

}  // namespace

extern "C" {

// x null: query is given. gain null: no norm. weights null: logits alone. sums null: no
// by-products; else [threads, 2, N], zeroed.
void l2r_forward(const int64_t* sizes, const Score* score, int32_t threads,
                 int32_t normalize_weights, const float* x, const float* weight, const float* gain,
                 const float* anchors, float* query, float* rstd, float* logits, float* weights,
                 int64_t* indices, float* lse, float* sums) {
  const Sizes s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
  const Score c = *score;
  const AnchorSide keys(anchors, s, c);
  const std::vector<float> folded = fold(weight, gain, x ? s.rank : 0, s.hidden);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int32_t part = 0; part < threads; ++part) {
    std::vector<float> room(s.rank + 3 * s.experts);
    float *a = room.data(), *work = a + s.rank, *probs = work + 2 * s.experts;
    float* mine = sums ? sums + part * 2 * s.experts : nullptr;
    const int64_t end = s.tokens * (part + 1) / threads;
    for (int64_t t = s.tokens * part / threads; t < end; ++t) {
      float* q = query + t * s.rank;
      if (x) {
        const float scale = project(x + t * s.hidden, folded.data(), s, c, gain != nullptr, q);
        if (gain) rstd[t] = scale;
      }
      float* out = logits + t * s.experts;
      pool(a, query_side(q, s, c, a), keys.b.data(), s, c, keys.longest, work, out);
      if (!weights) continue;
      int64_t* chosen = indices + t * s.top_k;
      lse[t] = select(out, s, normalize_weights, weights + t * s.top_k, chosen, probs);
      if (mine) {
        for (int64_t i = 0; i < s.experts; ++i) mine[i] += probs[i];
        for (int64_t j = 0; j < s.top_k; ++j) mine[s.experts + chosen[j]] += 1.0f;
      }
    }
  }
}

// grad [T, N]: gradient of the logits. grad_a [T, R] receives that of a; grad_b [threads, R, H, N],
// zeroed, one partial sum per thread.
void l2r_score_backward(const int64_t* sizes, const Score* score, int32_t threads,
                        const float* query, const float* anchors, const float* logits,
                        const float* grad, float* grad_a, float* grad_b) {
  const Sizes s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
  const Score c = *score;
  const AnchorSide keys(anchors, s, c);
  const float* b = keys.b.data();
  const int64_t n = s.experts, plane = s.heads * n;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int32_t part = 0; part < threads; ++part) {
    std::vector<float> room(s.rank + 3 * n);
    float *a = room.data(), *work = a + s.rank, *pooled = work + n, *weight = pooled + n;
    float* mine = grad_b + part * s.rank * plane;
    const int64_t end = s.tokens * (part + 1) / threads;
    for (int64_t t = s.tokens * part / threads; t < end; ++t) {
      query_side(query + t * s.rank, s, c, a);
      const float *z = logits + t * n, *g = grad + t * n;
      for (int64_t i = 0; i < n; ++i) {
        pooled[i] = z[i] / c.scale;
        weight[i] = g[i] * c.scale;
      }
      float* out = grad_a + t * s.rank;
      for (int64_t r = 0; r < s.rank; ++r) out[r] = 0.0f;
      for (int64_t h = 0; h < s.heads; ++h) {
        if (s.heads > 1) {
          score_row(a, b, h, s, work);
#pragma omp simd
          for (int64_t i = 0; i < n; ++i) work[i] = weight[i] * fast_exp(work[i] - pooled[i]);
        } else {
          std::memcpy(work, weight, n * sizeof(float));
        }
        for (int64_t r = 0; r < s.rank; ++r) {
          const float* row = b + r * plane + h * n;
          float* target = mine + r * plane + h * n;
          const float factor = a[r];
          float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
          for (int64_t i = 0; i < n; ++i) {
            sum += work[i] * row[i];
            target[i] += factor * work[i];
          }
          out[r] += sum;
        }
      }
    }
  }
}

// grad [T, R]: gradient of folded x (times rstd already); pull [T] or null: factor of x in grad_x.
// grad_x null: not wanted. grad_folded [threads, R, D], zeroed.
void l2r_project_backward(const int64_t* sizes, int32_t threads, const float* x,
                          const float* weight, const float* gain, const float* grad,
                          const float* pull, float* grad_x, float* grad_folded) {
  const int64_t tokens = sizes[0], width = sizes[1], rank = sizes[2];
  const std::vector<float> folded = fold(weight, gain, rank, width);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int32_t part = 0; part < threads; ++part) {
    float* mine = grad_folded + part * rank * width;
    const int64_t end = tokens * (part + 1) / threads;
    for (int64_t t = tokens * part / threads; t < end; ++t) {
      const float *row = x + t * width, *g = grad + t * rank;
      const float factor = pull ? pull[t] : 0.0f;
      float* out = grad_x ? grad_x + t * width : nullptr;
      for (int64_t r = 0; r < rank; ++r) {
        const float* w = folded.data() + r * width;
        float* target = mine + r * width;
        const float gr = g[r];
        if (!out) {
#pragma omp simd
          for (int64_t d = 0; d < width; ++d) target[d] += gr * row[d];
        } else if (r == 0) {
#pragma omp simd
          for (int64_t d = 0; d < width; ++d) {
            target[d] += gr * row[d];
            out[d] = factor * row[d] + gr * w[d];
          }
        } else {
#pragma omp simd
          for (int64_t d = 0; d < width; ++d) {
            target[d] += gr * row[d];
            out[d] += gr * w[d];
          }
        }
      }
    }
  }
}

}  // extern "C"
