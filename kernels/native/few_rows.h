// Few rows of x: integer dot products of codes with x rounded to 16 bits a k-group.
//
//   y[m,n] = sum_g s[n,g] (xs[m,g] sum_k c[n,k] xq[m,k] - z[n,g] xsum[m,g])
//
// Groups of 32 or 64 weights: s, z and xsum of each 32 weights, xs of the whole k-group.
//
// xs is a power of two, so that bfloat16 numbers down to 1/128 of their group's largest are exact and
// smaller ones are off by at most 2^-16 of it (products: 3e-5, where rounding y to bfloat16 costs
// 1e-3). float32 x takes two such rows, the second what the first left: 30 bits.
// Rounded to 8 bits (`--cpu-activations int8`): xs is the group's largest / 127, one row whatever x is; codes
// and x meet as bytes where the instructions take them and groups are of 128 or more, else as above.
// Cost a k-group of 128 weights: 16 bits bytes read, 4-bit codes by 6 shifts and masks (AVX-512); for
// each row of x 4 dot products (of bytes 2), a conversion and an fma.
#pragma once
#include <vector>

#include "weight.h"

// Whether rows rounded to 8 bits meet w as bytes: AVX2's sums of two products of bytes hold 4-bit codes.
static inline bool as_bytes(const Weight& w) { return !w.fine() && (HAS_BYTE_DOT || w.bits < 8); }

struct RoundedRows {
  std::vector<int16_t> q;        // [R, k_groups, 128], R = M * parts
  std::vector<int8_t> bytes;     // or these
  std::vector<float> scale;      // [R, padded groups]
  std::vector<float> sum;        // [R, padded groups, parts of the weight's k-groups]
  int64_t parts, padded, x_bits;
  // A thread's calls follow one another in the same memory: new pages would cost more than the rounding.
  void reset(int64_t M, int64_t of, const Weight& w, int64_t bits) {
    parts = of, padded = w.padded_groups(), x_bits = bits;
    scale.assign(M * parts * padded, 0);
    sum.assign(M * parts * w.grid_size(), 0);
    const int64_t numbers = M * parts * w.k_groups * GROUP;
    const bool short_ones = x_bits == 8 && as_bytes(w);
    bytes.resize(short_ones ? numbers : 0);
    q.resize(short_ones ? 0 : numbers);
  }
};

static inline int exponent_of(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return (int)(bits >> 23 & 255) - 127;
}
static inline float power_of_two(int exponent) {
  const uint32_t bits = (uint32_t)(exponent + 127) << 23;
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}
static inline float lanes_total(__m256 v) {
  __m128 h = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  h = _mm_add_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}
static inline int32_t lanes_total(__m256i v) {
  __m128i h = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(h, _mm_shuffle_epi32(h, 0xb1)));
}

// Numbers that 8 bits hold, in the order of `unpack_bytes`.
static inline void put_bytes(const int16_t* flat, int64_t bits, int8_t* to) {
  if (bits == 8) {
    for (int k = 0; k < GROUP; ++k) to[k] = (int8_t)flat[k];
    return;
  }
  uint16_t words[64];
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 32; ++i)
      words[32 * half + i] = (uint16_t)((flat[32 * half + i] & 0xff) | flat[32 * half + i + 64] << 8);
  std::memcpy(to, words, sizeof words);
}

// Numbers in the order of `unpack<8>`: even ones of 64, then odd ones.
static inline void put_halves(const int16_t* flat, int16_t* to) {
  for (int half = 0; half < GROUP; half += 64)
    for (int i = 0; i < 32; ++i) {
      to[half + i] = flat[half + 2 * i];
      to[half + 32 + i] = flat[half + 2 * i + 1];
    }
}

static inline void round_group(const float* x, const Weight& w, int64_t row, int64_t g, RoundedRows& r) {
  __m256 top = _mm256_setzero_ps(), wrong = top;
  const __m256 sign = _mm256_set1_ps(-0.0f);
  for (int i = 0; i < GROUP; i += 8) {
    __m256 v = _mm256_loadu_ps(x + i);
    top = _mm256_max_ps(top, _mm256_andnot_ps(sign, v));
    wrong = _mm256_fmadd_ps(v, _mm256_setzero_ps(), wrong);  // NaN where x is not finite
  }
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  const float most = _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four))), not_finite = lanes_total(wrong);
  const int exponent = most > 1e-30f && std::isfinite(most) ? exponent_of(most) : -100;
  float step = power_of_two(exponent - 14);
  if (r.x_bits == 8) step = exponent > -100 ? most / 127 : 1;
  alignas(32) float rest[GROUP];
  std::memcpy(rest, x, sizeof rest);
  for (int64_t part = 0; part < r.parts; ++part, step *= 0x1p-15f) {
    int64_t at = row * r.parts + part;
    __m256 inverse = _mm256_set1_ps(1 / step), back = _mm256_set1_ps(step);
    __m256i sum[FINE_PARTS] = {};
    alignas(32) int16_t flat[GROUP];
    for (int i = 0; i < GROUP; i += 8) {
      __m256 v = _mm256_load_ps(rest + i);
      __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(v, inverse));
      __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
      whole = _mm256_cvtepi16_epi32(half);
      sum[i / 32] = _mm256_add_epi32(sum[i / 32], whole);
      _mm256_store_ps(rest + i, _mm256_fnmadd_ps(_mm256_cvtepi32_ps(whole), back, v));
      _mm_store_si128((__m128i*)(flat + i), half);
    }
    const int64_t to_q = (at * w.k_groups + g) * GROUP;
    if (!r.bytes.empty()) put_bytes(flat, w.bits, r.bytes.data() + to_q);
    else if (w.bits == 8) put_halves(flat, r.q.data() + to_q);
    else std::memcpy(r.q.data() + to_q, flat, sizeof flat);
    r.scale[at * r.padded + g] = step + not_finite;
    float* to = r.sum.data() + (at * r.padded + g) * w.parts();
    if (w.fine()) {
      for (int64_t of = 0; of < FINE_PARTS; ++of) to[of] = step * (float)lanes_total(sum[of]);
      continue;
    }
    to[0] = step * (float)lanes_total(_mm256_add_epi32(_mm256_add_epi32(sum[0], sum[1]), _mm256_add_epi32(sum[2], sum[3])));
  }
}

// Rounds k-group g of row m of x [M, K]; what lies past K is zero.
static void round_row_group(const void* x, int64_t number, const Weight& w, int64_t m, int64_t g, RoundedRows& r) {
  float values[GROUP] = {};
  int64_t count = w.K - g * GROUP < GROUP ? w.K - g * GROUP : GROUP;
  copy_floats(values, x, m * w.K + g * GROUP, count, number);
  round_group(values, w, m, g, r);
}

struct Output {
  void* y;           // [M, N]
  const void* bias;  // [N] or null
  int64_t number;
};

// How codes and x meet: as 16-bit integers, the same with a grid each 32 weights, as bytes.
enum class Meet { WHOLE, FINE, BYTES };

// Rows first .. first + ROWS of the rounded x (PARTS to a row of y) times rows n0 .. n1 of w, whose grids are s, z.
template <int BITS, int ROWS, int PARTS, Meet MEET>
static void few_rows(const Weight& w, const RoundedRows& x, const Output& out, int64_t first, int64_t n0,
                     int64_t n1, const float* s, const float* z) {
  for (int64_t n = n0; n < n1; ++n, s += w.grid_size(), z += w.grid_size()) {
    const uint8_t* p = w.row(n);
    Floats acc[ROWS], off[ROWS];
    for (int m = 0; m < ROWS; ++m) acc[m] = off[m] = floats(0);
    for (int64_t g0 = 0; g0 < w.k_groups; g0 += LANES) {
      alignas(64) float factor[ROWS][LANES];
      constexpr bool FINE = MEET == Meet::FINE;
      constexpr int64_t GRIDS = FINE ? FINE_PARTS : 1;
      for (int m = 0; m < ROWS; ++m) {
        int64_t at = (first + m) * x.padded + g0;
        Floats step = load(x.scale.data() + at);
        store(factor[m], FINE ? step : mul(load(s + g0), step));
        for (int64_t i = 0; i < GRIDS * LANES; i += LANES) {
          Floats scaled_zero = mul(load(s + g0 * GRIDS + i), load(z + g0 * GRIDS + i));
          off[m] = fma(scaled_zero, load(x.sum.data() + at * GRIDS + i), off[m]);
        }
      }
      int64_t g1 = g0 + LANES < w.k_groups ? g0 + LANES : w.k_groups;
      for (int64_t g = g0; g < g1; ++g, p += 16 * BITS) {
        Ints c[VECTORS];
        if constexpr (MEET == Meet::BYTES) unpack_bytes<BITS>(p, c);
        else unpack<BITS>(p, c);
        _mm_prefetch((const char*)(p + 2048), _MM_HINT_T0);
        if (BITS == 8) _mm_prefetch((const char*)(p + 2048 + 64), _MM_HINT_T0);
        for (int m = 0; m < ROWS; ++m) {
          const int64_t at = ((first + m) * w.k_groups + g) * GROUP;
          const int16_t* q = x.q.data() + at;
          if constexpr (MEET == Meet::BYTES) {
            acc[m] = fma(to_floats(dot_bytes(c, x.bytes.data() + at)), floats(factor[m][g - g0]), acc[m]);
          } else if constexpr (FINE) {
            Floats d = floats(0);
            for (int v = 0; v < VECTORS; ++v) {
              Ints part = dot(no_ints(), c[v], load(q + v * 2 * LANES));
              d = fma(to_floats(part), part_scales<BITS>(s + g * FINE_PARTS, v), d);
            }
            acc[m] = fma(d, floats(factor[m][g - g0]), acc[m]);
          } else {
            Ints d = no_ints();
            for (int v = 0; v < VECTORS; ++v) d = dot(d, c[v], load(q + v * 2 * LANES));
            acc[m] = fma(to_floats(d), floats(factor[m][g - g0]), acc[m]);
          }
        }
      }
    }
    float bias = out.bias ? float_of(out.bias, n, out.number) : 0;
    for (int m = 0; m < ROWS; m += PARTS) {
      Floats sum = sub(acc[m], off[m]);
      if (PARTS == 2) sum = add(sum, sub(acc[m + PARTS - 1], off[m + PARTS - 1]));
      put(out.y, (first + m) / PARTS * w.N + n, out.number, total(sum) + bias);
    }
  }
}

template <int BITS, int PARTS, Meet MEET>
static void few_rows_of(const Weight& w, const RoundedRows& x, const Output& out, int64_t M, int64_t n0,
                     int64_t n1, const float* s, const float* z) {
  int64_t first = 0, rows = M * PARTS;
  for (; rows - first >= 8; first += 8) few_rows<BITS, 8, PARTS, MEET>(w, x, out, first, n0, n1, s, z);
  for (; rows - first >= 4; first += 4) few_rows<BITS, 4, PARTS, MEET>(w, x, out, first, n0, n1, s, z);
  for (; rows - first >= 2; first += 2) few_rows<BITS, 2, PARTS, MEET>(w, x, out, first, n0, n1, s, z);
  if constexpr (PARTS == 1)
    if (first < rows) few_rows<BITS, 1, 1, MEET>(w, x, out, first, n0, n1, s, z);
}

template <int BITS, int PARTS>
static void few_rows(const Weight& w, const RoundedRows& x, const Output& out, int64_t M, int64_t n0,
                     int64_t n1, const float* s, const float* z) {
  auto run = w.fine() ? few_rows_of<BITS, PARTS, Meet::FINE> : few_rows_of<BITS, PARTS, Meet::WHOLE>;
  if constexpr (PARTS == 1 && (HAS_BYTE_DOT || BITS < 8))
    if (!x.bytes.empty()) run = few_rows_of<BITS, 1, Meet::BYTES>;
  run(w, x, out, M, n0, n1, s, z);
}
