// The router's forward on a CPU in one parallel region, token after token: x is read once, the
// scores of a token live in the first-level cache. Called by cpu.py.

#include "forward_blocks.h"
#include "selection.h"

namespace {

constexpr float kSafeExponent = 60.0f;  // |score| up to which exp needs no maximum

// q = rstd * (folded x), two columns of the projection per pass over the row.
inline float project(const float* x, const float* folded, const Sizes& s, const ScoreConstants& c,
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

// Logits of one token: log-sum-exp over the anchors of each expert, times scale. Sums stay in
// registers: loads would wait for stores whose addresses end in the same 12 bits.
template <int kRank>
inline void pool_experts(const float* a, bool safe, const float* b, const Sizes& s, float scale,
                         float* logits) {
  for (int64_t i = 0; i < s.experts; i += kLanes) {
    const float* column = b + i;
    const auto scores = [&](int64_t h) {
      return scores_of<kRank>(a, column + h * s.anchor_step(), s);
    };
    Lanes top = {}, pooled = {};
    if (s.heads == 1) {
      pooled = scores(0);
    } else {
      if (!safe) top = scores(0);
      for (int64_t h = 1; !safe && h < s.heads; ++h) {
        const Lanes other = scores(h);
        top = other > top ? other : top;
      }
      for (int64_t h = 0; h < s.heads; ++h)
        pooled += each(safe ? scores(h) : scores(h) - top, fast_exp2);
      pooled = each(pooled, fast_log) + top * kLn2;
    }
    store_first(logits + i, pooled * scale, s.experts - i);
  }
}

inline void pool(const float* a, float length, const AnchorSide& keys, const Sizes& s,
                 const ScoreConstants& c, float* logits) {
  const bool safe = length * keys.longest <= kSafeExponent;
  const auto run = s.rank == 2 ? pool_experts<2> : pool_experts<0>;
  run(a, safe, keys.b.data(), s, c.scale, logits);
}

// The same for larger ranks, a block of tokens after another.
void forward_in_blocks(const Sizes& s, const ScoreConstants& c, int32_t threads,
                       bool normalize_weights, const Tensors& in) {
  const Blocking block(s);
  const AnchorSide keys(in.anchors, s, c);
  const Projection w(in.weight, in.gain, s);
  const Hidden x{in.x, s.bf16 != 0};
  const auto project = x.bf16 ? (w.tiles ? project_block<true, true> : project_block<true, false>)
                       : w.tiles ? project_block<false, true> : project_block<false, false>;
  const int64_t numbers = 2 * block.rank + 2 * kPanel + 2;  // of a token
  Rooms rooms(block.tokens * numbers + s.experts, threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int32_t part = 0; part < threads; ++part) {
    float *query = rooms.of(part), *a = query + block.tokens * block.rank;
    float *rstd = a + block.tokens * block.rank, *length = rstd + block.tokens;
    float *work = length + block.tokens, *probs = work + 2 * block.tokens * kPanel;
    const int64_t end = s.tokens * (part + 1) / threads;
    for (int64_t first = s.tokens * part / threads; first < end; first += block.tokens) {
      const int64_t count = std::min(block.tokens, end - first);
      if (in.x)
        project(x, first, w, count, c.norm_eps, block.rank, query, in.gain ? rstd : nullptr);
      for (int64_t t = 0; t < count; ++t) {
        float *q = query + t * block.rank, *kept = in.query + (first + t) * s.rank;
        if (!in.x) std::memcpy(q, kept, s.rank * sizeof(float));
        if (in.x && in.query) std::memcpy(kept, q, s.rank * sizeof(float));
        if (in.rstd) in.rstd[first + t] = rstd[t];
        if (in.anchors) length[t] = query_side(q, s, c, a + t * block.rank);
      }
      float* logits = in.logits + first * s.experts;
      if (in.anchors) pool_block(a, keys.b.data(), count, s, c, block, work, logits);
      for (int64_t t = 0; t < count; ++t) {
        if (in.anchors && s.heads > 1 && !(length[t] * keys.longest <= kSafeExponent))
          pool(a + t * block.rank, length[t], keys, s, c, logits + t * s.experts);
        if (!in.weights) continue;
        const int64_t place = (first + t) * s.top_k;
        const float total = select(logits + t * s.experts, in.routes ? in.routes + place : nullptr,
                                   s, normalize_weights, in.weights + place, in.indices + place,
                                   probs);
        if (in.lse) in.lse[first + t] = total;
      }
    }
  }
}

// See l2r_forward.
void forward(const Sizes& s, const ScoreConstants& c, int32_t threads, bool normalize_weights,
             const Tensors& in) {
  const AnchorSide keys(in.anchors, s, c);
  const std::vector<float> folded = fold(in.weight, in.gain, in.x ? s.rank : 0, s.hidden);
  const Hidden x{in.x, s.bf16 != 0};
  Rooms rooms(2 * s.rank + s.experts + (x.bf16 ? s.hidden : 0), threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int32_t part = 0; part < threads; ++part) {
    float *own = rooms.of(part), *a = own + s.rank, *probs = a + s.rank;
    float* room = probs + s.experts;
    const int64_t end = s.tokens * (part + 1) / threads;
    for (int64_t t = s.tokens * part / threads; t < end; ++t) {
      float* q = in.query ? in.query + t * s.rank : own;
      if (in.x) {
        const float* row = x.read(t * s.hidden, s.hidden, room);
        const float scale = project(row, folded.data(), s, c, in.gain != nullptr, q);
        if (in.rstd) in.rstd[t] = scale;
      }
      float* logits = in.logits + t * s.experts;
      if (in.anchors) pool(a, query_side(q, s, c, a), keys, s, c, logits);
      if (!in.weights) continue;
      const int64_t place = t * s.top_k;
      const float total = select(logits, in.routes ? in.routes + place : nullptr, s,
                                 normalize_weights, in.weights + place, in.indices + place, probs);
      if (in.lse) in.lse[t] = total;
    }
  }
}

// Whether a route names no expert, which would be read past the logits, or one expert twice.
bool is_wrong(const int64_t* routes, const Sizes& s) {
  bool wrong = false;
  for (int64_t t = 0; routes && t < s.tokens; ++t) {
    const int64_t* route = routes + t * s.top_k;
    for (int64_t j = 0; route[0] >= 0 && j < s.top_k; ++j) {
      wrong |= route[j] < 0 || route[j] >= s.experts;
      for (int64_t i = 0; i < j; ++i) wrong |= route[i] == route[j];
    }
  }
  return wrong;
}

}  // namespace

extern "C" {

// Stages by what is given; results are filled where not null, logits always where anchors are
// given:
//   project: x, weight, maybe gain       -> query, rstd
//   score:   anchors and the query       -> logits
//   select:  weights not null, logits, maybe routes -> weights, indices, lse
// 1 where memory ran out, 2 where a route names no expert, or one twice.
int32_t l2r_forward(const Sizes* sizes, const ScoreConstants* score, int32_t threads,
                    int32_t normalize_weights, const Tensors* tensors) {
  if (is_wrong(tensors->routes, *sizes)) return 2;
  try {
    const auto run = sizes->in_blocks() ? forward_in_blocks : forward;
    run(*sizes, *score, threads, normalize_weights, *tensors);
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}

}  // extern "C"
