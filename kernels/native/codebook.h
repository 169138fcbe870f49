// Codes of 4 bits that stand for 16 values (kernels/weights/codebook_weight.py, ROWS): few rows of x, rows as values.
//
//   y[m,n] = factor[n] sum_g scale[n,g] sum_k table[code[n,k]] x[m,k],  k of group g
//
//   k-group of 128      16 words of 4 bytes; word l holds k = 4 l + b and, in its bytes' upper halves, 64 further on
//   vector v = 4 h + b  number (word >> 8 b + 4 h) & 15 of every word: k = 64 h + 4 l + b, which x is put in order for
//
// Exact in float32 but for the sums. Cost 16 codes (AVX-512): a shift, a permutation, a product a row of x.
#pragma once
#include <algorithm>
#include <vector>

#include "vectors.h"

constexpr int64_t TABLE_GROUP = 128, TABLE_BYTES = 64, TABLE_ROWS = 4;  // of x at a time
constexpr int64_t EXPONENT = 3, FLOAT8 = 4;  // scales of a byte, beside Number
constexpr int TABLE_HALVES = 16 / LANES;     // vectors of the 16 words

struct Codebook {
  const uint8_t* codes;  // [N, k_groups, 64]
  const void* scale;     // [N, 128 / group k_groups]
  const float* factor;   // [N] or null
  const float* values;  // [16]
  int64_t N, K, group, kind;
  int64_t k_groups() const { return (K + TABLE_GROUP - 1) / TABLE_GROUP; }
  int64_t parts() const { return TABLE_GROUP / group; }
  const uint8_t* row(int64_t n) const { return codes + n * k_groups() * TABLE_BYTES; }
  int64_t scales() const { return k_groups() * parts() + 16; }  // of a row, and room behind it

  void scales_of(int64_t n, float* s) const {
    const int64_t count = k_groups() * parts();
    if (kind < EXPONENT) return copy_floats(s, scale, n * count, count, kind);
    const uint8_t* p = (const uint8_t*)scale + n * count;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t word = kind == FLOAT8 ? (uint32_t)(p[i] & 0x80) << 24 | (uint32_t)(p[i] & 0x7f) << 20
                            : p[i]         ? (uint32_t)p[i] << 23
                                           : 1u << 22;
      std::memcpy(s + i, &word, 4);
      if (kind == FLOAT8) s[i] *= 0x1p120f;
    }
  }
};

struct CodebookValues {
#if WIDE
  Floats all;
  explicit CodebookValues(const float* p) : all(load(p)) {}
  Floats of(__m512i word) const { return _mm512_permutexvar_ps(word, all); }
  static __m512i words(const uint8_t* p, int) { return _mm512_loadu_si512(p); }
  static __m512i shifted(__m512i word, int by) { return _mm512_srli_epi32(word, by); }
  static __m512i bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
  static Floats spread(const float* s, __m512i lane) { return _mm512_permutexvar_ps(lane, load(s)); }
#else
  Floats low, high;
  explicit CodebookValues(const float* p) : low(load(p)), high(load(p + 8)) {}
  Floats of(__m256i word) const {
    const Floats upper = _mm256_castsi256_ps(_mm256_slli_epi32(word, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, word), _mm256_permutevar8x32_ps(high, word), upper);
  }
  static __m256i words(const uint8_t* p, int half) { return _mm256_loadu_si256((const __m256i*)(p + 32 * half)); }
  static __m256i shifted(__m256i word, int by) { return _mm256_srli_epi32(word, by); }
  static __m256i bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
  static Floats spread(const float* s, __m256i lane) { return _mm256_permutevar8x32_ps(load(s), lane); }
#endif
};

// Which scale of a k-group every lane has, [2 (h), TABLE_HALVES].
static inline void table_lanes(int64_t group, Ints* lanes) {
  alignas(64) int32_t at[LANES];
  for (int h = 0; h < 2; ++h)
    for (int half = 0; half < TABLE_HALVES; ++half) {
      for (int i = 0; i < LANES; ++i) at[i] = (int32_t)((64 * h + 4 * (half * LANES + i)) / group);
      std::memcpy(lanes + h * TABLE_HALVES + half, at, sizeof(Ints));
    }
}

// x of a row in the order of vectors, zeros behind K.
static void codebook_order(const void* x, int64_t start, int64_t K, int64_t dtype, float* to) {
  float flat[TABLE_GROUP];
  for (int64_t k0 = 0; k0 < K; k0 += TABLE_GROUP, to += TABLE_GROUP) {
    const int64_t count = std::min(TABLE_GROUP, K - k0);
    std::fill(flat + count, flat + TABLE_GROUP, 0.0f);
    copy_floats(flat, x, start + k0, count, dtype);
    for (int v = 0; v < 8; ++v)
      for (int l = 0; l < 16; ++l) to[v * 16 + l] = flat[64 * (v / 4) + 4 * l + v % 4];
  }
}

// Row n of w times ROWS rows of x in order, `pitch` floats apart, into sums; s: scales of the row.
template <int ROWS>
static void codebook_row(const Codebook& w, const CodebookValues& values, const Ints* lanes, int64_t n, const float* x,
                      int64_t pitch, const float* s, float* sums) {
  const uint8_t* p = w.row(n);
  const int64_t parts = w.parts(), k_groups = w.k_groups();
  Floats whole[2][ROWS];
  for (int m = 0; m < ROWS; ++m) whole[0][m] = whole[1][m] = floats(0);
  for (int64_t g = 0; g < k_groups; ++g, p += TABLE_BYTES, x += TABLE_GROUP) {
    _mm_prefetch((const char*)(p + 2048), _MM_HINT_T0);
    for (int half = 0; half < TABLE_HALVES; ++half) {
      const auto word = CodebookValues::words(p, half);
      for (int h = 0; h < 2; ++h) {
        Floats acc[ROWS];
        for (int b = 0; b < 4; ++b) {
          const Floats value = values.of(CodebookValues::shifted(word, 8 * b + 4 * h));
          const float* at = x + (4 * h + b) * 16 + half * LANES;
          for (int m = 0; m < ROWS; ++m)
            acc[m] = b ? fma(value, load(at + m * pitch), acc[m]) : mul(value, load(at + m * pitch));
        }
        const Floats scale = CodebookValues::spread(s + g * parts, lanes[h * TABLE_HALVES + half]);
        for (int m = 0; m < ROWS; ++m) whole[h][m] = fma(acc[m], scale, whole[h][m]);
      }
    }
  }
  const float factor = w.factor ? w.factor[n] : 1;
  for (int m = 0; m < ROWS; ++m) sums[m] = total(add(whole[0][m], whole[1][m])) * factor;
}

// Row n of w as out[k], k < K, computed in float32 and rounded once; s: scales of the row.
static void codebook_dequantize_row(const Codebook& w, const CodebookValues& values, int64_t n, void* out, int64_t at,
                                 int64_t dtype, const float* s) {
  const uint8_t* p = w.row(n);
  const Floats factor = floats(w.factor ? w.factor[n] : 1);
  alignas(64) float made[TABLE_GROUP];
  for (int64_t g = 0; g < w.k_groups(); ++g, p += TABLE_BYTES) {
    const float* scale = s + g * w.parts();
    for (int64_t j = 0; j < 64; j += 16)
      for (int half = 0; half < 16; half += LANES) {
        const auto word = CodebookValues::bytes(p + j + half);
        const int64_t low = j + half, high = 64 + low;
        for (int64_t k : {low, high}) {
          Floats value = values.of(k < 64 ? word : CodebookValues::shifted(word, 4));
          value = mul(value, floats(scale[k / w.group]));
          store(made + k, w.factor ? mul(value, factor) : value);
        }
      }
    const int64_t k0 = g * TABLE_GROUP, count = std::min(TABLE_GROUP, w.K - k0);
    int64_t k = 0;
    for (; k + 8 <= count; k += 8) put_eight(out, at + k0 + k, dtype, _mm256_load_ps(made + k));
    for (; k < count; ++k) put(out, at + k0 + k, dtype, made[k]);
  }
}
