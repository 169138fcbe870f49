// Vectors of the level a build is for, AVX2 (8 floats) or AVX-512 (16), and element types in memory.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define WIDE 1
using Ints = __m512i;
using Floats = __m512;
constexpr int LANES = 16;
static inline Floats floats(float v) { return _mm512_set1_ps(v); }
static inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
static inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
static inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
static inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
static inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
static inline Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
static inline float total(Floats v) { return _mm512_reduce_add_ps(v); }
static inline Ints load(const int16_t* p) { return _mm512_loadu_si512(p); }
// acc + sums of neighbouring products of 16-bit integers.
static inline Ints dot(Ints acc, Ints a, Ints b) {
#ifdef __AVX512VNNI__
  return _mm512_dpwssd_epi32(acc, a, b);
#else
  return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b));
#endif
}
static inline Ints zero_ints() { return _mm512_setzero_si512(); }
#else
#define WIDE 0
using Ints = __m256i;
using Floats = __m256;
constexpr int LANES = 8;
static inline Floats floats(float v) { return _mm256_set1_ps(v); }
static inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
static inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
static inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
static inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
static inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
static inline Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }
static inline float total(Floats v) {
  __m128 h = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  h = _mm_add_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}
static inline Ints load(const int16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline Ints dot(Ints acc, Ints a, Ints b) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b));
}
static inline Ints zero_ints() { return _mm256_setzero_si256(); }
#endif

// Prefetches the line of codes `near` bytes ahead into L1, that `far` bytes ahead into L2.
static inline __attribute__((always_inline)) void prefetch_twice(const uint8_t* line, int64_t near, int64_t far) {
  _mm_prefetch((const char*)line + near, _MM_HINT_T0);
  _mm_prefetch((const char*)line + far, _MM_HINT_T1);
}

// Sums of each of 16 vectors, in order.
static inline void totals(const Floats* a, float* sums) {
#if WIDE
  Floats t[8], u[4];
  for (int i = 0; i < 8; ++i)
    t[i] = add(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    __m512d x = _mm512_castps_pd(t[2 * i]), y = _mm512_castps_pd(t[2 * i + 1]);
    u[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  for (int i = 0; i < 2; ++i)
    t[i] = add(_mm512_shuffle_f32x4(u[2 * i], u[2 * i + 1], 0x88), _mm512_shuffle_f32x4(u[2 * i], u[2 * i + 1], 0xdd));
  store(sums, add(_mm512_shuffle_f32x4(t[0], t[1], 0x88), _mm512_shuffle_f32x4(t[0], t[1], 0xdd)));
#else
  for (int i = 0; i < 16; i += 8, a += 8) {
    Floats x = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    Floats y = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
    store(sums + i, add(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31)));
  }
#endif
}

#if WIDE
// 16 rows of 16 words as columns.
static inline void transpose(const __m512i* row, __m512i* column) {
  __m512i t[16], u[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(row[2 * i], row[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(row[2 * i], row[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j) {
      u[4 * i + 2 * j] = _mm512_unpacklo_epi64(t[4 * i + j], t[4 * i + 2 + j]);
      u[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(t[4 * i + j], t[4 * i + 2 + j]);
    }
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i32x4(u[j], u[4 + j], 0x88), b = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(u[j], u[4 + j], 0xdd), d = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0xdd);
    column[j] = _mm512_shuffle_i32x4(a, b, 0x88);
    column[8 + j] = _mm512_shuffle_i32x4(a, b, 0xdd);
    column[4 + j] = _mm512_shuffle_i32x4(c, d, 0x88);
    column[12 + j] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
}
#endif

// Whether one instruction multiplies unsigned bytes by signed ones and adds four products (VNNI).
#if WIDE && defined(__AVX512VNNI__)
#define HAS_BYTE_DOT 1
#else
#define HAS_BYTE_DOT 0
#endif

// Element types of arrays; the same values as `DTYPE_CODES` of library.py.
enum Number : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
static inline int64_t size_of(int64_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

static inline float float_of(const void* p, int64_t i, int64_t dtype) {
  if (dtype == FLOAT32) return ((const float*)p)[i];
  uint16_t half = ((const uint16_t*)p)[i];
  if (dtype == FLOAT16) return _cvtsh_ss(half);
  uint32_t word = (uint32_t)half << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

static inline __m256 eight_of(const void* p, int64_t i, int64_t dtype) {
  if (dtype == FLOAT32) return _mm256_loadu_ps((const float*)p + i);
  __m128i half = _mm_loadu_si128((const __m128i*)((const uint16_t*)p + i));
  if (dtype == FLOAT16) return _mm256_cvtph_ps(half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

#if WIDE
static inline Floats sixteen_floats(const void* p, int64_t i, int64_t dtype) {
  if (dtype == FLOAT32) return load((const float*)p + i);
  const __m256i half = _mm256_loadu_si256((const __m256i*)((const uint16_t*)p + i));
  if (dtype == FLOAT16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
#endif

// Rounded to nearest, halves to even; NaN stays NaN.
static inline uint16_t bfloat16_of(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  if (value != value) return (uint16_t)(word >> 16 | 0x40);
  return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

static inline void put(void* p, int64_t i, int64_t dtype, float value) {
  if (dtype == FLOAT32) ((float*)p)[i] = value;
  else if (dtype == FLOAT16) ((uint16_t*)p)[i] = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
  else ((uint16_t*)p)[i] = bfloat16_of(value);
}

static inline void put_eight(void* p, int64_t i, int64_t dtype, __m256 v) {
  if (dtype == FLOAT32) { _mm256_storeu_ps((float*)p + i, v); return; }
  __m128i half;
  if (dtype == FLOAT16) {
    half = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
  } else {
#ifdef __AVX512BF16__
    half = (__m128i)_mm256_cvtneps_pbh(v);
#else
    __m256i word = _mm256_castps_si256(v), one = _mm256_set1_epi32(1);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(word, 16), one);
    __m256i up = _mm256_add_epi32(word, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    up = _mm256_srli_epi32(_mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), nan), 16);
    half = _mm_packus_epi32(_mm256_castsi256_si128(up), _mm256_extracti128_si256(up, 1));
#endif
  }
  _mm_storeu_si128((__m128i*)((uint16_t*)p + i), half);
}

// out[0..n) as floats.
static inline void copy_floats(float* out, const void* p, int64_t start, int64_t n, int64_t dtype) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, eight_of(p, start + i, dtype));
  for (; i < n; ++i) out[i] = float_of(p, start + i, dtype);
}
