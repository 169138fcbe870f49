// A weight kept in E4M3 (kernels/weights/fp8_weight.py): few rows of x, and rows of w as values.
//
//   y[m,n] = sum_c s[n / rows, c] sum_k e4m3(code[n,k]) x[m,k],  k of columns c
//
// A byte with its sign carried on, shifted left by 7, is a float16 of 2^-8 the number, subnormals too.
// Cost 16 codes (AVX-512): 4 instructions, and a product a row of x in float32.
#pragma once
#include <algorithm>
#include <vector>

#include "vectors.h"

constexpr float FP8_FACTOR = 256;
constexpr int64_t FP8_ROWS = 8;  // of x at a time

struct Fp8 {
  const uint8_t* codes;  // [N, K]
  const float* scale;    // [N / rows, wide]
  int64_t N, K, rows, columns, wide;
  const uint8_t* row(int64_t n) const { return codes + n * K; }
  float scale_of(int64_t n, int64_t c) const { return scale[n / rows * wide + c] * FP8_FACTOR; }
};

// The values of LANES codes, but for FP8_FACTOR.
static inline Floats fp8_values(const uint8_t* p) {
#if WIDE
  __m256i w = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  return _mm512_cvtph_ps(_mm256_and_si256(w, _mm256_set1_epi16((int16_t)0xbf80)));
#else
  __m128i w = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)), 7);
  return _mm256_cvtph_ps(_mm_and_si128(w, _mm_set1_epi16((int16_t)0xbf80)));
#endif
}

static inline float fp8_value(uint8_t code) {
  return _cvtsh_ss((uint16_t)((code & 0x80) << 8 | (code & 0x7f) << 7));
}

// Row n of w times ROWS rows of x, `pitch` floats apart, into sums.
template <int ROWS>
static void fp8_row(const Fp8& w, int64_t n, const float* x, int64_t pitch, float* sums) {
  constexpr int WAYS = ROWS == 1 ? 4 : ROWS <= 4 ? 2 : 1;
  const uint8_t* p = w.row(n);
  Floats whole[ROWS];
  float rest[ROWS] = {};
  for (int m = 0; m < ROWS; ++m) whole[m] = floats(0);
  for (int64_t c = 0; c < w.wide; ++c) {
    const int64_t end = std::min(w.K, (c + 1) * w.columns);
    const float s = w.scale_of(n, c);
    Floats acc[WAYS][ROWS];
    for (int v = 0; v < WAYS; ++v)
      for (int m = 0; m < ROWS; ++m) acc[v][m] = floats(0);
    int64_t k = c * w.columns;
    for (; k + WAYS * LANES <= end; k += WAYS * LANES) {
      _mm_prefetch((const char*)(p + k + 4096), _MM_HINT_T1);
      for (int v = 0; v < WAYS; ++v) {
        const Floats value = fp8_values(p + k + v * LANES);
        for (int m = 0; m < ROWS; ++m) acc[v][m] = fma(value, load(x + m * pitch + k + v * LANES), acc[v][m]);
      }
    }
    for (; k < end; ++k) {
      const float value = fp8_value(p[k]) * s;
      for (int m = 0; m < ROWS; ++m) rest[m] += value * x[m * pitch + k];
    }
    for (int m = 0; m < ROWS; ++m) {
      Floats sum = acc[0][m];
      for (int v = 1; v < WAYS; ++v) sum = add(sum, acc[v][m]);
      whole[m] = fma(sum, floats(s), whole[m]);
    }
  }
  for (int m = 0; m < ROWS; ++m) sums[m] = total(whole[m]) + rest[m];
}

// Row n of w as out[k], k < K, computed in float32 and rounded once.
static void fp8_dequantize_row(const Fp8& w, int64_t n, void* out, int64_t at, int64_t dtype) {
  const uint8_t* p = w.row(n);
  for (int64_t c = 0; c < w.wide; ++c) {
    const int64_t end = std::min(w.K, (c + 1) * w.columns);
    const float s = w.scale_of(n, c);
    int64_t k = c * w.columns;
    for (; k + LANES <= end; k += LANES) {
      alignas(64) float made[LANES];
      store(made, mul(fp8_values(p + k), floats(s)));
      for (int i = 0; i < LANES; i += 8) put_eight(out, at + k + i, dtype, _mm256_load_ps(made + i));
    }
    for (; k < end; ++k) put(out, at + k, dtype, fp8_value(p[k]) * s);
  }
}
