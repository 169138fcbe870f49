// Rounding a weight to few bits: the search of kernels/weights/round_to_nearest.py, a k-group at a time.
//
// The same float32 operations in the same order, its quotients and sums of squares included (torch adds 128 values
// as four columns of vectors, then the lanes one by one), so that codes, scales and zeros are the same.
// Built with -ffp-contract=off. Cost: some 12 vector operations a weight and clip, 17 clips at 4 bits.
#pragma once
#include "panel.h"
#include "rounded_rows.h"

struct Search {
  int64_t bits, symmetric, clips, sum_lanes;
  const float* clip;     // as tried, 1 first
  const float* factor;   // clip / (levels - 1 or so): range to scale
  float least_scale;
  int64_t scale_dtype;
};

// torch's sum of 128 float32 values with vectors of `lanes`.
static inline float sum_as_torch(const float* e, int64_t lanes) {
  alignas(64) float t[16];
  if (lanes == 16) {
#if WIDE
    auto at = [&](int v) { return _mm512_load_ps(e + 16 * v); };
    __m512 a = _mm512_add_ps(at(0), at(4)), b = _mm512_add_ps(at(1), at(5));
    __m512 c = _mm512_add_ps(at(2), at(6)), d = _mm512_add_ps(at(3), at(7));
    _mm512_store_ps(t, _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(a, b), c), d));
#else
    for (int l = 0; l < 16; ++l) {
      auto at = [&](int v) { return e[16 * v + l]; };
      t[l] = (((at(0) + at(4)) + (at(1) + at(5))) + (at(2) + at(6))) + (at(3) + at(7));
    }
#endif
  } else {
    auto at = [&](int v) { return _mm256_load_ps(e + 8 * v); };
    __m256 column[4];
    for (int k = 0; k < 4; ++k)
      column[k] = _mm256_add_ps(_mm256_add_ps(_mm256_add_ps(at(k), at(4 + k)), at(8 + k)), at(12 + k));
    _mm256_store_ps(t, _mm256_add_ps(_mm256_add_ps(_mm256_add_ps(column[0], column[1]), column[2]), column[3]));
  }
  float all = 0;
  for (int l = 0; l < lanes; ++l) all += t[l];
  return all;
}

#if WIDE
static inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
static inline Floats least_of(Floats a, Floats b) { return _mm512_min_ps(a, b); }
static inline Floats most_of(Floats a, Floats b) { return _mm512_max_ps(a, b); }
static inline Floats minus_fma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
static inline Floats nearest(Floats v) { return _mm512_roundscale_ps(v, 8); }
static inline Floats between(Floats v, Floats low, Floats high) { return _mm512_min_ps(_mm512_max_ps(v, low), high); }
#else
static inline Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
static inline Floats least_of(Floats a, Floats b) { return _mm256_min_ps(a, b); }
static inline Floats most_of(Floats a, Floats b) { return _mm256_max_ps(a, b); }
static inline Floats minus_fma(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
static inline Floats nearest(Floats v) { return _mm256_round_ps(v, 8); }
static inline Floats between(Floats v, Floats low, Floats high) { return _mm256_min_ps(_mm256_max_ps(v, low), high); }
#endif

// v / s rounded as a division rounds it (Markstein 1990: from the rounded inverse and the exact rest).
static inline Floats quotient(Floats v, Floats s, Floats inverse) {
  Floats q = mul(v, inverse);
  return fma(minus_fma(q, s, v), inverse, q);
}

static inline float stored(float value, int64_t dtype) {
  alignas(4) uint8_t bytes[4];
  put(bytes, 0, dtype, value);
  return float_of(bytes, 0, dtype);
}

struct Grid {
  float scale, zero, levels;
  // Code of v as a number.
  Floats code(Floats v, Floats inverse) const {
    Floats step = floats(scale);
    Floats ratio = scale > 1e-30f && scale < 1e30f ? quotient(v, step, inverse) : divide(v, step);
    return between(add(nearest(ratio), floats(zero)), floats(0), floats(levels));
  }
};

static inline Grid grid_of(const Search& how, float low, float range, int64_t clip) {
  float s = stored(range * how.factor[clip], how.scale_dtype), levels = (float)((1 << how.bits) - 1);
  s = s < how.least_scale ? how.least_scale : s;
  if (how.symmetric) return {s, (float)(1 << (how.bits - 1)), levels};
  float z = _mm_cvtss_f32(_mm_round_ss(_mm_setzero_ps(), _mm_set_ss(-low * how.clip[clip] / s), 8));
  return {s, z < 0 ? 0 : z > levels ? levels : z, levels};
}

static inline float squares(const float* w, const Grid& grid, int64_t sum_lanes) {
  alignas(64) float error[GROUP];
  const Floats inverse = floats(1 / grid.scale), step = floats(grid.scale), offset = floats(grid.zero);
  for (int k = 0; k < GROUP; k += LANES) {
    Floats v = load(w + k);
    Floats left = sub(mul(sub(grid.code(v, inverse), offset), step), v);
    store(error + k, mul(left, left));
  }
  return sum_as_torch(error, sum_lanes);
}

// Codes of w[128] as values, and the grid that they mean.
static Grid search_group(const float* w, const Search& how, float* codes) {
  Floats lows = load(w), highs = lows;
  for (int k = LANES; k < GROUP; k += LANES) {
    lows = least_of(lows, load(w + k));
    highs = most_of(highs, load(w + k));
  }
  alignas(64) float l[LANES], h[LANES];
  store(l, lows);
  store(h, highs);
  float low = l[0], high = h[0];
  for (int k = 1; k < LANES; ++k) { low = l[k] < low ? l[k] : low; high = h[k] > high ? h[k] : high; }
  if (!how.symmetric) { low = low > 0 ? 0 : low; high = high < 0 ? 0 : high; }
  float range = how.symmetric ? std::fmax(std::fabs(low), std::fabs(high)) : high - low;
  Grid best = grid_of(how, low, range, 0);
  float least = INFINITY;
  for (int64_t i = 0; i < how.clips && how.clips > 1; ++i) {
    Grid grid = grid_of(how, low, range, i);
    float error = squares(w, grid, how.sum_lanes);
    if (error < least) { least = error; best = grid; }
  }
  for (int k = 0; k < GROUP; k += LANES) store(codes + k, best.code(load(w + k), floats(1 / best.scale)));
  return best;
}

// A k-group's codes, in the order of `put_bytes`, as a row of 3 bits by itself has them.
static void pack_threes(const uint8_t* codes, uint8_t* p) {
  for (int j = 0; j < 32; ++j) p[j] = (uint8_t)(codes[j] | codes[32 + j] << 3 | (codes[96 + j] & 3) << 6);
  for (int j = 0; j < 16; ++j)
    p[32 + j] = (uint8_t)(codes[64 + j] | codes[80 + j] << 3 | codes[96 + j] >> 2 << 6 | codes[112 + j] >> 2 << 7);
}

static void pack_group(const float* codes, int64_t bits, bool panels, uint8_t* p) {
  if (bits == 8) {
    for (int k = 0; k < GROUP; ++k) p[k] = (uint8_t)codes[k];
    return;
  }
  int16_t flat[GROUP];
  int8_t order[GROUP];
  for (int k = 0; k < GROUP; ++k) flat[k] = (int16_t)codes[k];
  put_bytes(flat, bits, order);
  const uint8_t* found = (const uint8_t*)order;
  if (bits == 3) return (panels ? words_of_three : pack_threes)(found, p);
  for (int j = 0; j < GROUP / 2; ++j) p[j] = (uint8_t)(found[j] | found[GROUP / 2 + j] << 4);
}

// k-group g of row n where a weight has it.
static void put_group(const float* found, const Weight& w, uint8_t* codes, int64_t n, int64_t g) {
  const int64_t bytes = w.group_bytes();
  uint8_t form[GROUP];
  pack_group(found, w.bits, w.panels, form);
  if (n >= w.in_panels()) { std::memcpy(codes + (n * w.k_groups + g) * bytes, form, bytes); return; }
  uint8_t* to = codes + ((n / PANEL * w.k_groups + g) * PANEL * bytes) + n % PANEL * 4;
  for (int64_t i = 0; i < bytes; i += 4) std::memcpy(to + i * PANEL, form + i, 4);
}
