// Rows of x as integers, a power of two (or a largest number's share) a k-group: what gemv_int16.h, panel_rows.h
// and tiles.h multiply codes by, and the first says how.
#pragma once
#include <vector>

#include "weight.h"

// Whether rows rounded to 8 bits meet w as bytes: AVX2's sums of two products of bytes hold 4-bit codes.
static inline bool as_bytes(const Weight& w) { return !w.fine() && (HAS_BYTE_DOT || w.bits < 8); }

// Whether rows of 16 bits or more meet w byte by byte: all of them where w is panels, those of AVX2.
static inline bool in_planes(const Weight& w) { return w.panels || (!WIDE && !w.fine() && w.bits < 8); }

// Values from the start of a cache line on: a load of 64 bytes that crosses lines takes two.
template <class Number>
struct Lined {
  std::vector<Number> held;
  int64_t size = 0;
  void resize(int64_t n) {
    size = n;
    if ((int64_t)held.size() < n + LINE) held.resize(n + LINE);
  }
  bool empty() const { return size == 0; }
  Number* data() { return (Number*)(((uintptr_t)held.data() + 63) / 64 * 64); }
  const Number* data() const { return (const Number*)(((uintptr_t)held.data() + 63) / 64 * 64); }
  static constexpr int64_t LINE = 64 / sizeof(Number);
};

struct RoundedRows {
  Lined<int16_t> q;              // [R, k_groups, 128], R = M * parts
  Lined<int8_t> bytes;           // or these
  std::vector<float> scale;      // [R, padded groups]
  std::vector<float> sum;        // [R, padded groups, parts of the weight's k-groups]
  int64_t parts, padded, x_bits;
  int64_t planes;                // bytes of a number, the highest first, each k-group's side by side; 0: not so
  // For panel_rows.h: rows of a k-group side by side, and the lower byte of two has a sign, too.
  bool together;
  int64_t rows;
  // A thread's calls follow one another in the same memory: new pages would cost more than the rounding.
  // `whole`: as 16-bit integers whatever the weight's layout; `tiles`: for tiles.h.
  void reset(int64_t M, int64_t of, const Weight& w, int64_t bits, bool whole = false, bool tiles = false) {
    parts = of, padded = w.padded_groups(), x_bits = bits;
    planes = x_bits < 16 || whole || !in_planes(w) ? 0 : w.panels ? 2 : parts + 1;
    if (planes && !w.panels) parts = 1;
    together = w.panels && !tiles && !whole, rows = M * parts;
    scale.assign(M * parts * padded, 0);
    sum.assign(M * parts * w.grid_size(), 0);
    const int64_t values = M * parts * w.k_groups * GROUP;
    const bool short_ones = planes || (x_bits == 8 && as_bytes(w));
    bytes.resize(short_ones ? values * std::max<int64_t>(planes, 1) : 0);
    q.resize(short_ones ? 0 : values);
  }
  bool low_signed() const { return together && planes == 2; }
  // Where k-group g of a row is, in k-groups.
  int64_t place_of(int64_t row, int64_t g, int64_t k_groups) const { return together ? g * rows + row : row * k_groups + g; }
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

// Values that 8 bits hold, in the order of `unpack_bytes`.
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

#if HAS_BYTE_DOT
// High and low bytes of values of 16 bits, GROUP each, in the order of `put_bytes`. The low ones with a sign, the high
// one more where that is set: values up to 0x7f7f.
static inline void put_planes(const int16_t* flat, int64_t bits, bool low_signed, int8_t* to) {
  const Ints half = _mm512_set1_epi16(low_signed ? 128 : 0), upper = _mm512_set1_epi16((short)0xff00);
  for (int part = 0; part < 2; ++part) {
    const int16_t* first = flat + part * (bits == 8 ? 64 : 32);
    const Ints a = load(first), b = load(first + (bits == 8 ? 32 : 64));
    const Ints above_a = _mm512_add_epi16(a, half), above_b = _mm512_add_epi16(b, half);
    Ints high, low;
    if (bits == 8) {
      auto both = [](Ints x, Ints y) {
        return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(x)), _mm512_cvtepi16_epi8(y), 1);
      };
      high = both(_mm512_srli_epi16(above_a, 8), _mm512_srli_epi16(above_b, 8)), low = both(a, b);
    } else {
      high = _mm512_or_si512(_mm512_srli_epi16(above_a, 8), _mm512_and_si512(above_b, upper));
      low = _mm512_or_si512(_mm512_andnot_si512(upper, a), _mm512_slli_epi16(b, 8));
    }
    _mm512_storeu_si512(to + part * 64, high);
    _mm512_storeu_si512(to + GROUP + part * 64, low);
  }
}
#endif

// Values in the order of `unpack<8>`: even ones of 64, then odd ones.
static inline void put_halves(const int16_t* flat, int16_t* to) {
  for (int half = 0; half < GROUP; half += 64)
    for (int i = 0; i < 32; ++i) {
      to[half + i] = flat[half + 2 * i];
      to[half + 32 + i] = flat[half + 2 * i + 1];
    }
}

// The exponent of a k-group's largest number, -100 for none to speak of; NaN in `not_finite` where one is not finite.
static inline int top_exponent(const float* x, float* largest, float* not_finite) {
  __m256 top = _mm256_setzero_ps(), wrong = top;
  const __m256 sign = _mm256_set1_ps(-0.0f);
  for (int i = 0; i < GROUP; i += 8) {
    __m256 v = _mm256_loadu_ps(x + i);
    top = _mm256_max_ps(top, _mm256_andnot_ps(sign, v));
    wrong = _mm256_fmadd_ps(v, _mm256_setzero_ps(), wrong);  // NaN where x is not finite
  }
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  *not_finite = lanes_total(wrong);
  *largest = _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
  return *largest > 1e-30f && std::isfinite(*largest) ? exponent_of(*largest) : -100;
}

// As integers of 16 or 24 bits, byte by byte; the step is that of the upper 16.
static inline void round_in_planes(const float* x, const Weight& w, int64_t row, int64_t g, RoundedRows& r) {
  float most, not_finite;
  const float step = power_of_two(top_exponent(x, &most, &not_finite) - 14), finest = r.planes == 3 ? step / 256 : step;
  const __m256i end = _mm256_set1_epi32(r.planes == 3 ? 0x7fffff : 0x7fff), one = _mm256_set1_epi32(1);
  const __m256i begin = _mm256_sub_epi32(_mm256_sub_epi32(_mm256_setzero_si256(), end), one);
  __m256i sum = _mm256_setzero_si256();
  alignas(32) int32_t whole[GROUP];
  for (int i = 0; i < GROUP; i += 8) {
    __m256i v = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(1 / finest)));
    v = _mm256_max_epi32(_mm256_min_epi32(v, end), begin);
    sum = _mm256_add_epi32(sum, v);
    _mm256_store_si256((__m256i*)(whole + i), v);
  }
  int8_t* to = r.bytes.data() + (row * w.k_groups + g) * r.planes * GROUP;
  for (int64_t plane = r.planes; plane-- > 0; to += GROUP) {
    int16_t flat[GROUP];
    for (int k = 0; k < GROUP; ++k) flat[k] = (int16_t)(whole[k] >> 8 * plane);
    put_bytes(flat, w.bits, to);
  }
  r.scale[row * r.padded + g] = step + not_finite;
  r.sum[row * r.padded + g] = finest * (float)lanes_total(sum);
}

static inline void round_group(const float* x, const Weight& w, int64_t row, int64_t g, RoundedRows& r) {
  float most, not_finite;
  const int exponent = top_exponent(x, &most, &not_finite);
  float step = power_of_two(std::max(exponent, r.parts == 2 ? -97 : -100) - 14);  // the second part's has an inverse
  if (r.low_signed() && most >= 32639.5f * step) step *= 2;  // or it would be more than 0x7f7f
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
    const int64_t to_q = r.place_of(at, g, w.k_groups) * GROUP;
#if HAS_BYTE_DOT
    if (r.planes) put_planes(flat, w.bits, r.low_signed(), r.bytes.data() + 2 * to_q);
    else
#endif
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
static void round_row_group(const void* x, int64_t dtype, const Weight& w, int64_t m, int64_t g, RoundedRows& r) {
  float values[GROUP] = {};
  int64_t count = w.K - g * GROUP < GROUP ? w.K - g * GROUP : GROUP;
  copy_floats(values, x, m * w.K + g * GROUP, count, dtype);
  (r.planes && !w.panels ? round_in_planes : round_group)(values, w, m, g, r);
}
