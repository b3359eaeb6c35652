// Top-k and softmax of one token's logits.

#pragma once

#include <algorithm>

#include "router.h"

namespace {

constexpr int64_t kCandidates = 128;  // most logits that are put in order by counting

// The K-th largest of the largest logits of kParts parts of the row: at least K logits reach it, and
// few more. -inf where fewer than K parts have a logit above that.
template <int kParts>
inline float reached_by_top_k(const float* logits, int64_t n, int64_t k) {
  float largest[kParts];
  int32_t above[kParts] = {};
  for (int j = 0; j < kParts; ++j) largest[j] = -HUGE_VALF;
  for (int64_t i = 0; i + kParts <= n; i += kParts)
#pragma omp simd
    for (int j = 0; j < kParts; ++j)
      largest[j] = logits[i + j] > largest[j] ? logits[i + j] : largest[j];
  for (int i = 0; i < kParts; ++i)
#pragma omp simd
    for (int j = 0; j < kParts; ++j) above[j] += largest[i] > largest[j];
  float bound = HUGE_VALF;
#pragma omp simd reduction(min : bound)
  for (int j = 0; j < kParts; ++j) {
    const float reached = above[j] < k ? largest[j] : HUGE_VALF;
    bound = reached < bound ? reached : bound;
  }
  return bound;
}

// The same with twice K parts or more; -inf where the row is too short for that to save anything.
inline float bound_of_top_k(const float* logits, int64_t n, int64_t k) {
  if (2 * k <= 16 && n >= 16) return reached_by_top_k<16>(logits, n, k);
  if (2 * k <= 32 && n >= 32) return reached_by_top_k<32>(logits, n, k);
  if (2 * k <= 64 && n >= 64) return reached_by_top_k<64>(logits, n, k);
  if (2 * k <= 128 && n >= 256) return reached_by_top_k<128>(logits, n, k);
  return -HUGE_VALF;
}

// Experts whose logits reach a bound, in their order; their number, or -1 where there are too many.
// A logit that is NaN reaches none.
inline int64_t reaching(const float* logits, int64_t n, float bound, int32_t* experts) {
  constexpr int64_t kPart = 64;
  int64_t count = 0;
  for (int64_t first = 0; first < n; first += kPart) {
    const int64_t end = std::min(first + kPart, n);
    int32_t any = 0;
#pragma omp simd reduction(| : any)
    for (int64_t i = first; i < end; ++i) any |= logits[i] >= bound;
    if (!any) continue;
    for (int64_t i = first; i < end; ++i) {
      experts[count] = static_cast<int32_t>(i);
      count += logits[i] >= bound;
    }
    if (count > kCandidates) return -1;
  }
  return count;
}

// The K largest of those experts, each at the place that the number of larger ones gives.
inline void choose_by_counting(const float* logits, const int32_t* experts, int64_t count,
                               int64_t k, float* values, int64_t* indices) {
  float own[kCandidates];
  int32_t place[kCandidates] = {};
  const int64_t padded = (count + 15) / 16 * 16;
  for (int64_t j = 0; j < padded; ++j) own[j] = j < count ? logits[experts[j]] : -HUGE_VALF;
  for (int32_t i = 0; i < count; ++i)
#pragma omp simd
    for (int32_t j = 0; j < padded; ++j)
      place[j] += (own[i] > own[j]) | ((own[i] == own[j]) & (i < j));
  for (int64_t j = 0; j < count; ++j) {
    if (place[j] >= k) continue;
    values[place[j]] = own[j];
    indices[place[j]] = experts[j];
  }
}

// The K largest by insertion, NaN as -inf.
inline void choose_by_insertion(const float* logits, int64_t n, int64_t k, float* values,
                                int64_t* indices) {
  int64_t filled = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float value = logits[i] == logits[i] ? logits[i] : -HUGE_VALF;
    if (filled == k && !(value > values[k - 1])) continue;
    int64_t place = filled < k ? filled++ : k - 1;
    for (; place > 0 && value > values[place - 1]; --place) {
      values[place] = values[place - 1];
      indices[place] = indices[place - 1];
    }
    values[place] = value;
    indices[place] = i;
  }
}

// The K largest logits and their experts, smallest index first among equals.
inline void choose(const float* logits, int64_t n, int64_t k, float* values, int64_t* indices) {
  int32_t experts[2 * kCandidates];
  const float bound = bound_of_top_k(logits, n, k);
  const int64_t count = bound > -HUGE_VALF ? reaching(logits, n, bound, experts) : -1;
  if (count < 0)
    choose_by_insertion(logits, n, k, values, indices);
  else
    choose_by_counting(logits, experts, count, k, values, indices);
}

// Weights of the K largest, or of the K of a route; returns the log-sum-exp. One sum for both, so
// that the weights of an own choice that returns are equal to the bit.
inline float select(const float* logits, const int64_t* route, const Sizes& s, bool normalize,
                    float* weights, int64_t* indices, float* probs) {
  const int64_t n = s.experts, k = s.top_k;
  float top = logits[0], total = 0.0f;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; ++i) top = logits[i] > top ? logits[i] : top;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) {
    probs[i] = fast_exp(logits[i] - top);
    total += probs[i];
  }
  if (!route || route[0] < 0) {
    choose(logits, n, k, weights, indices);
  } else {
    for (int64_t j = 0; j < k; ++j) {
      indices[j] = route[j];
      weights[j] = logits[route[j]];
    }
  }
  // Of a route all may be unlikely; the k largest include the top itself, and keep their bits.
  float chosen = 0.0f, shift = top;
  if (normalize) {
    shift = weights[0];
    for (int64_t j = 1; j < k; ++j) shift = weights[j] > shift ? weights[j] : shift;
  }
  for (int64_t j = 0; j < k; ++j) {
    weights[j] = fast_exp(weights[j] - shift) / total;
    chosen += weights[j];
  }
  if (normalize)
    for (int64_t j = 0; j < k; ++j) weights[j] /= chosen;
  return top + std::log(total);
}

}  // namespace
