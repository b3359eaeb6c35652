// The router's forward on a CPU in one parallel region, token after token: x is read once, the
// scores of a token live in the first-level cache. Called by cpu.py.

#include <memory>

#include "products.h"
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

// --- Larger ranks: a block of tokens at a time, by matrix products; see products.h. ---

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

// See l2r_forward.
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
  each_part(threads, [&](int32_t part) {
    float *query = rooms.of(part), *a = query + block.tokens * block.rank;
    float *rstd = a + block.tokens * block.rank, *length = rstd + block.tokens;
    float *work = length + block.tokens, *probs = work + 2 * block.tokens * kPanel;
    const int64_t end = s.tokens * (part + 1) / threads;
    for (int64_t first = s.tokens * part / threads; first < end; first += block.tokens) {
      const int64_t count = std::min(block.tokens, end - first);
      project(x, first, w, count, c.norm_eps, block.rank, query, in.gain ? rstd : nullptr);
      for (int64_t t = 0; t < count; ++t) {
        float *q = query + t * block.rank, *kept = in.query + (first + t) * s.rank;
        if (in.query) std::memcpy(kept, q, s.rank * sizeof(float));
        if (in.rstd) in.rstd[first + t] = rstd[t];
        length[t] = query_side(q, s, c, a + t * block.rank);
      }
      float* logits = in.logits + first * s.experts;
      pool_block(a, keys.b.data(), count, s, c, block, work, logits);
      for (int64_t t = 0; t < count; ++t) {
        if (s.heads > 1 && !(length[t] * keys.longest <= kSafeExponent))
          pool(a + t * block.rank, length[t], keys, s, c, logits + t * s.experts);
        if (!in.weights) continue;
        const int64_t place = (first + t) * s.top_k;
        const float total = select(logits + t * s.experts, in.routes ? in.routes + place : nullptr,
                                   s, normalize_weights, in.weights + place, in.indices + place,
                                   probs);
        if (in.lse) in.lse[first + t] = total;
      }
    }
  });
}

// See l2r_forward.
void forward(const Sizes& s, const ScoreConstants& c, int32_t threads, bool normalize_weights,
             const Tensors& in) {
  const AnchorSide keys(in.anchors, s, c);
  const std::vector<float> folded = fold(in.weight, in.gain, in.x ? s.rank : 0, s.hidden);
  const Hidden x{in.x, s.bf16 != 0};
  Rooms rooms(2 * s.rank + s.experts + (x.bf16 ? s.hidden : 0), threads);
  each_part(threads, [&](int32_t part) {
    float *own = rooms.of(part), *a = own + s.rank, *probs = a + s.rank;
    float* room = probs + s.experts;
    const int64_t end = s.tokens * (part + 1) / threads;
    for (int64_t t = s.tokens * part / threads; t < end; ++t) {
      float* q = in.query ? in.query + t * s.rank : own;
      float* logits = in.logits + t * s.experts;
      if (in.x) {
        const float* row = x.read(t * s.hidden, s.hidden, room);
        const float scale = project(row, folded.data(), s, c, in.gain != nullptr, q);
        if (in.rstd) in.rstd[t] = scale;
        pool(a, query_side(q, s, c, a), keys, s, c, logits);
      }
      if (!in.weights) continue;
      const int64_t place = t * s.top_k;
      const float total = select(logits, in.routes ? in.routes + place : nullptr, s,
                                 normalize_weights, in.weights + place, in.indices + place, probs);
      if (in.lse) in.lse[t] = total;
    }
  });
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

// A router where x is given, and a selection where weights are not null; query, rstd and lse are
// filled where not null:
//   router:    x, weight, maybe gain, anchors -> logits, query, rstd
//   selection: logits, maybe routes           -> weights, indices, lse
// 1 where memory ran out, 2 where a route names no expert, or one twice.
int32_t l2r_forward(const Call* call) {
  if (is_wrong(call->tensors.routes, call->sizes)) return 2;
  try {
    const auto run = call->sizes.in_blocks() ? forward_in_blocks : forward;
    run(call->sizes, call->score, call->threads, call->normalize, call->tensors);
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}

}  // extern "C"
