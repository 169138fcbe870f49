// Attention of single queries over keys and values where they lie, each read once; sums in float32.
// Here: tokens of one number, of which a `Place` says where they begin; packed_attend.h: blocks of codes.
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

// scores[r, t - first] of HEADS query rows q [HEADS, padded D] (scaled).
template <int DTYPE, int HEADS, class Place>
static void scores_of(const Place& at, const float* q, int64_t padded, int64_t first, int64_t end, float* scores,
                      int64_t stride) {
  int64_t whole = at.dim / LANES * LANES;
  for (int64_t t0 = first; t0 < end; t0 += 16) {
    int64_t count = end - t0 < 16 ? end - t0 : 16;
    Floats sums[HEADS][16];
    for (int64_t i = 0; i < count; ++i) {
      int64_t key = at(t0 + i);
      Floats acc[HEADS];
      for (int r = 0; r < HEADS; ++r) acc[r] = floats(0);
      for (int64_t d = 0; d < whole; d += LANES) {
        Floats kv = wide_of(at.k, key + d, DTYPE);
        for (int r = 0; r < HEADS; ++r) acc[r] = fma(kv, load(q + r * padded + d), acc[r]);
      }
      if (whole < at.dim) {
        alignas(64) float rest[LANES] = {};
        copy_floats(rest, at.k, key + whole, at.dim - whole, DTYPE);
        for (int r = 0; r < HEADS; ++r) acc[r] = fma(load(rest), load(q + r * padded + whole), acc[r]);
      }
      for (int r = 0; r < HEADS; ++r) sums[r][i] = acc[r];
    }
    for (int r = 0; r < HEADS; ++r) {
      alignas(64) float found[16];
      for (int64_t i = count; i < 16; ++i) sums[r][i] = floats(0);
      totals(sums[r], found);
      std::memcpy(scores + r * stride + t0 - first, found, count * sizeof(float));
    }
  }
}

// Values of `n` scores become e^(score - largest), zeros up to a multiple of LANES; returns their sum.
static inline float exponents(float* scores, int64_t n, float largest) {
  int64_t padded = (n + LANES - 1) / LANES * LANES;
  Floats sum = floats(0);
  for (int64_t t = n; t < padded; ++t) scores[t] = -INFINITY;
  for (int64_t t = 0; t < padded; t += LANES) {
    Floats e = exp_of(sub(load(scores + t), floats(largest)));
    store(scores + t, e);
    sum = add(sum, e);
  }
  float found = total(sum);
  for (int64_t t = n; t < padded; ++t) { found -= scores[t]; scores[t] = 0; }
  return found;
}

// out[r, d] += sum over t of weights[r, t - first] * v[t, d], VECTORS * LANES channels from d on.
template <int DTYPE, int HEADS, int VECTORS, class Place>
static void sum_values(const Place& at, const float* weights, int64_t stride, int64_t first, int64_t end, int64_t d,
                       float* out, int64_t padded) {
  Floats acc[HEADS][VECTORS];
  for (int r = 0; r < HEADS; ++r)
    for (int i = 0; i < VECTORS; ++i) acc[r][i] = load(out + r * padded + d + i * LANES);
  bool whole = d + VECTORS * LANES <= at.dim;
  for (int64_t t = first; t < end; ++t) {
    int64_t value = at(t) + d;
    alignas(64) float rest[VECTORS * LANES];
    if (!whole) {
      std::fill(rest, rest + VECTORS * LANES, 0.0f);
      copy_floats(rest, at.v, value, at.dim - d, DTYPE);
    }
    for (int i = 0; i < VECTORS; ++i) {
      Floats vv = whole ? wide_of(at.v, value + i * LANES, DTYPE) : load(rest + i * LANES);
      for (int r = 0; r < HEADS; ++r) acc[r][i] = fma(floats(weights[r * stride + t - first]), vv, acc[r][i]);
    }
  }
  for (int r = 0; r < HEADS; ++r)
    for (int i = 0; i < VECTORS; ++i) store(out + r * padded + d + i * LANES, acc[r][i]);
}

// Row b's query heads of key/value head g over part of its keys, before they are put together.
struct Partials {
  int64_t parts, dim, padded;
  std::vector<float> values;  // [B, H, parts, 2 + padded]: largest score, sum, sum of values
  Partials(int64_t rows, int64_t parts, int64_t dim)
      : parts(parts), dim(dim), padded((dim + 31) / 32 * 32), values(rows * parts * (2 + padded)) {}
  float* of(int64_t row, int64_t part) { return values.data() + (row * parts + part) * (2 + padded); }

  // o [rows, D]; sinks (or null): a score of each of H heads that brings no value.
  void join(void* o, int64_t rows, int64_t H, const float* sinks, int64_t dtype, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; ++row) {
      float largest = sinks ? sinks[row % H] : -INFINITY, sum = 0;
      for (int64_t i = 0; i < parts; ++i) largest = std::max(largest, of(row, i)[0]);
      if (sinks) sum = std::exp(sinks[row % H] - largest);
      float* first = of(row, 0);
      for (int64_t i = 0; i < parts; ++i) {
        float* p = of(row, i);
        float share = p[1] > 0 ? std::exp(p[0] - largest) : 0;
        sum += share * p[1];
        for (int64_t d = 0; d < dim; ++d) first[2 + d] = (i ? first[2 + d] : 0) + share * p[2 + d];
      }
      for (int64_t d = 0; d < dim; ++d) put(o, row * dim + d, dtype, sum > 0 ? first[2 + d] / sum : 0);
    }
  }
};

// Into how many parts the keys of a row go: so that all threads have some, of 1024 or more.
static inline int64_t parts_for(int64_t tasks, int64_t keys, int64_t threads) {
  int64_t wanted = (2 * threads + tasks - 1) / tasks, most = keys / 1024;
  return std::max<int64_t>(1, std::min(wanted, most));
}

// Tokens in blocks of a pool [places, G, D]: t lies at table[t / 128] * 128 + t % 128.
struct BlockPlace {
  const void *k, *v;
  int64_t dim, groups;
  const int64_t* table;
  int64_t g;
  int64_t operator()(int64_t t) const { return ((table[t / BLOCK] * BLOCK + t % BLOCK) * groups + g) * dim; }
};

// HEADS query heads, whose q (scaled) [HEADS, padded], over the keys first .. end; slopes of the heads.
template <int DTYPE, int HEADS>
static void attend_heads(const BlockPlace& at, const float* q, int64_t padded, int64_t first, int64_t end, int64_t last,
                         const float* slopes, float* const* out, std::vector<float>& room) {
  constexpr int VECTORS = 32 / LANES;
  int64_t n = end - first, stride = (n + LANES - 1) / LANES * LANES;
  room.assign(HEADS * (padded + stride), 0.0f);
  float *sums = room.data(), *scores = sums + HEADS * padded;
  scores_of<DTYPE, HEADS>(at, q, padded, first, end, scores, stride);
  for (int r = 0; r < HEADS; ++r) {
    float* own = scores + r * stride;
    if (slopes)
      for (int64_t t = 0; t < n; ++t) own[t] += slopes[r] * (float)(first + t - last);
    out[r][0] = *std::max_element(own, own + n);
    out[r][1] = exponents(own, n, out[r][0]);
  }
  for (int64_t d = 0; d < at.dim; d += 32)
    sum_values<DTYPE, HEADS, VECTORS>(at, scores, stride, first, end, d, sums, padded);
  for (int r = 0; r < HEADS; ++r) std::memcpy(out[r] + 2, sums + r * padded, padded * sizeof(float));
}

// Rows of q [B, H, D] as floats, scaled, padded with zeros.
static inline std::vector<float> scaled_rows(const void* q, int64_t rows, int64_t dim, int64_t padded, float scale,
                                             int64_t dtype) {
  std::vector<float> out(rows * padded);
  for (int64_t i = 0; i < rows; ++i) {
    copy_floats(out.data() + i * padded, q, i * dim, dim, dtype);
    for (int64_t d = 0; d < dim; ++d) out[i * padded + d] *= scale;
  }
  return out;
}

// tables [B, columns]; ends [B]: tokens of each row, the query's own the last; window 0: all are seen.
template <int DTYPE>
static void attend_rows(const void* k, const void* v, const void* q, void* o, const int64_t* tables,
                        const int64_t* ends, int64_t B, int64_t H, int64_t G, int64_t D, int64_t columns,
                        int64_t window, float scale, const float* slopes, int threads) {
  int64_t rep = H / G, longest = 0;
  for (int64_t b = 0; b < B; ++b) longest = std::max(longest, window ? std::min(window, ends[b]) : ends[b]);
  Partials partials(B * H, parts_for(B * G, longest, threads), D);
  std::vector<float> rows = scaled_rows(q, B * H, D, partials.padded, scale, DTYPE);
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> room;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < B * G * partials.parts; ++i) {
      int64_t part = i % partials.parts, g = i / partials.parts % G, b = i / partials.parts / G, r = 0;
      int64_t begin = window && ends[b] > window ? ends[b] - window : 0, n = ends[b] - begin;
      int64_t first = begin + n * part / partials.parts, end = begin + n * (part + 1) / partials.parts;
      BlockPlace at{k, v, D, G, tables + b * columns, g};
      auto heads = [&](auto run, int count) {
        int64_t row = b * H + g * rep + r;
        float* out[4];
        for (int j = 0; j < count; ++j) out[j] = partials.of(row + j, part);
        if (end > first)
          run(at, rows.data() + row * partials.padded, partials.padded, first, end, ends[b] - 1,
              slopes ? slopes + g * rep + r : nullptr, out, room);
        else
          for (int j = 0; j < count; ++j) { out[j][0] = -INFINITY; out[j][1] = 0; }
        r += count;
      };
      while (rep - r >= 4) heads(attend_heads<DTYPE, 4>, 4);
      while (rep - r >= 2) heads(attend_heads<DTYPE, 2>, 2);
      while (r < rep) heads(attend_heads<DTYPE, 1>, 1);
    }
  }
  partials.join(o, B * H, H, nullptr, DTYPE, threads);
}
