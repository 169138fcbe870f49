// Attention of single queries over blocks of a pool of keys and values, read in place, each once.
// q, o [B, H, D]; k, v [places, G, D]; the token at position t of row b lies at
// table[b, t / 128] * 128 + t % 128. Scores and sums in float32.
#pragma once
#include <algorithm>
#include <vector>

#include "dense.h"

constexpr int64_t BLOCK = 128;

// e^x for x <= 0: 2^n times a polynomial of what is left (Cephes' expf, coefficients as published).
static inline Floats exp_of(Floats x) {
#if WIDE
  x = _mm512_max_ps(x, floats(-87.0f));
  Floats n = _mm512_roundscale_ps(mul(x, floats(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  x = _mm256_max_ps(x, floats(-87.0f));
  Floats n = _mm256_round_ps(mul(x, floats(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
  Floats r = fma(n, floats(2.12194440e-4f), fma(n, floats(-0.693359375f), x)), p = floats(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma(p, r, floats(c));
  p = add(fma(p, mul(r, r), r), floats(1));
#if WIDE
  return _mm512_scalef_ps(p, n);
#else
  return mul(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)));
#endif
}

// The caches of one layer, of one number.
struct Pool {
  const void* k;
  const void* v;
  int64_t groups, dim;
  // Where head g of a row's token at position t begins.
  int64_t at(const int64_t* table, int64_t t, int64_t g) const {
    return ((table[t / BLOCK] * BLOCK + t % BLOCK) * groups + g) * dim;
  }
};

// scores[r, t - first] of HEADS query rows q [HEADS, padded D] (scaled) of key/value head g.
template <int NUMBER, int HEADS>
static void scores_of(const Pool& pool, const int64_t* table, int64_t g, const float* q, int64_t padded, int64_t first,
                      int64_t end, float* scores, int64_t stride) {
  int64_t whole = pool.dim / LANES * LANES;
  for (int64_t t = first; t < end; ++t) {
    int64_t key = pool.at(table, t, g);
    Floats acc[HEADS];
    for (int r = 0; r < HEADS; ++r) acc[r] = floats(0);
    for (int64_t d = 0; d < whole; d += LANES) {
      Floats kv = wide_of(pool.k, key + d, NUMBER);
      for (int r = 0; r < HEADS; ++r) acc[r] = fma(kv, load(q + r * padded + d), acc[r]);
    }
    if (whole < pool.dim) {
      alignas(64) float rest[LANES] = {};
      copy_floats(rest, pool.k, key + whole, pool.dim - whole, NUMBER);
      for (int r = 0; r < HEADS; ++r) acc[r] = fma(load(rest), load(q + r * padded + whole), acc[r]);
    }
    for (int r = 0; r < HEADS; ++r) scores[r * stride + t - first] = total(acc[r]);
  }
}

// Numbers of `n` scores become e^(score - largest), zeros up to a multiple of LANES; returns their sum.
static inline float exponents(float* scores, int64_t n) {
  float largest = *std::max_element(scores, scores + n);
  int64_t padded = (n + LANES - 1) / LANES * LANES;
  Floats sum = floats(0);
  for (int64_t t = n; t < padded; ++t) scores[t] = -INFINITY;
  for (int64_t t = 0; t < padded; t += LANES) {
    Floats e = exp_of(sub(load(scores + t), floats(largest)));
    store(scores + t, e);
    sum = add(sum, e);
  }
  float found = total(sum);
  for (int64_t t = n; t < padded; ++t) found -= scores[t];
  return found;
}

// out[r, d] = sum over t of weights[r, t - first] * v[t, d], VECTORS * LANES channels from d on.
template <int NUMBER, int HEADS, int VECTORS>
static void sum_values(const Pool& pool, const int64_t* table, int64_t g, const float* weights, int64_t stride,
                       int64_t first, int64_t end, int64_t d, float* out, int64_t padded) {
  Floats acc[HEADS][VECTORS];
  for (int r = 0; r < HEADS; ++r)
    for (int i = 0; i < VECTORS; ++i) acc[r][i] = floats(0);
  bool whole = d + VECTORS * LANES <= pool.dim;
  for (int64_t t = first; t < end; ++t) {
    int64_t value = pool.at(table, t, g) + d;
    alignas(64) float rest[VECTORS * LANES];
    if (!whole) {
      std::fill(rest, rest + VECTORS * LANES, 0.0f);
      copy_floats(rest, pool.v, value, pool.dim - d, NUMBER);
    }
    for (int i = 0; i < VECTORS; ++i) {
      Floats vv = whole ? wide_of(pool.v, value + i * LANES, NUMBER) : load(rest + i * LANES);
      for (int r = 0; r < HEADS; ++r) acc[r][i] = fma(floats(weights[r * stride + t - first]), vv, acc[r][i]);
    }
  }
  for (int r = 0; r < HEADS; ++r)
    for (int i = 0; i < VECTORS; ++i) store(out + r * padded + d + i * LANES, acc[r][i]);
}

// HEADS query heads from `head` on, of row b: `first` .. `end` are the positions they see.
template <int NUMBER, int HEADS>
static void attend_heads(const Pool& pool, const int64_t* table, int64_t g, const void* q, void* o, int64_t place,
                         int64_t first, int64_t end, float scale, const float* slopes, std::vector<float>& room) {
  constexpr int VECTORS = 2;
  int64_t step = VECTORS * LANES, padded = (pool.dim + step - 1) / step * step;
  int64_t n = end - first, stride = (n + LANES - 1) / LANES * LANES;
  room.assign(HEADS * (2 * padded + stride), 0.0f);
  float *rows = room.data(), *out = rows + HEADS * padded, *scores = out + HEADS * padded;
  for (int r = 0; r < HEADS; ++r) {
    copy_floats(rows + r * padded, q, place + r * pool.dim, pool.dim, NUMBER);
    for (int64_t d = 0; d < pool.dim; ++d) rows[r * padded + d] *= scale;
  }
  scores_of<NUMBER, HEADS>(pool, table, g, rows, padded, first, end, scores, stride);
  float sums[HEADS];
  for (int r = 0; r < HEADS; ++r) {
    if (slopes)
      for (int64_t t = 0; t < n; ++t) scores[r * stride + t] += slopes[r] * (float)(first + t - end + 1);
    sums[r] = exponents(scores + r * stride, n);
  }
  for (int64_t d = 0; d < pool.dim; d += step)
    sum_values<NUMBER, HEADS, VECTORS>(pool, table, g, scores, stride, first, end, d, out, padded);
  for (int r = 0; r < HEADS; ++r)
    for (int64_t d = 0; d < pool.dim; ++d) put(o, place + r * pool.dim + d, NUMBER, out[r * padded + d] / sums[r]);
}

// tables [B, columns]; ends [B]: tokens of each row, the query's own the last; window 0: all are seen.
template <int NUMBER>
static void attend_rows(const Pool& pool, const void* q, void* o, const int64_t* tables, const int64_t* ends, int64_t B,
                        int64_t H, int64_t columns, int64_t window, float scale, const float* slopes, int threads) {
  int64_t rep = H / pool.groups;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> room;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < B * pool.groups; ++i) {
      int64_t b = i / pool.groups, g = i % pool.groups, end = ends[b], r = 0;
      int64_t first = window && end > window ? end - window : 0;
      auto heads = [&](auto run, int64_t count) {
        int64_t head = g * rep + r;
        run(pool, tables + b * columns, g, q, o, (b * H + head) * pool.dim, first, end, scale,
            slopes ? slopes + head : nullptr, room);
        r += count;
      };
      while (rep - r >= 4) heads(attend_heads<NUMBER, 4>, 4);
      while (rep - r >= 2) heads(attend_heads<NUMBER, 2>, 2);
      while (r < rep) heads(attend_heads<NUMBER, 1>, 1);
    }
  }
}
