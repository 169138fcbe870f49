// Rows of a quantised weight as numbers, for the many rows of x that a dense product is best at.
#pragma once
#include "weight.h"

// out[k] = (code - zero) scale for k < K, computed in float32 and rounded once.
template <int BITS>
static void dequantize_row(const Weight& w, int64_t n, void* out, int64_t at, int64_t number, float* s, float* z) {
  w.grid(n, s, z);
  const uint8_t* p = w.row(n);
  for (int64_t g = 0; g < w.k_groups; ++g, p += 16 * BITS) {
    alignas(64) int16_t codes[GROUP];
    if (BITS < 8) {
      Ints c[VECTORS];
      unpack<BITS>(p, c);
      std::memcpy(codes, c, sizeof codes);
    }
    const int64_t parts = w.parts();
    auto eight = [&](int64_t k) {
      const int64_t part = g * parts + k * parts / GROUP;
      const __m256 scale = _mm256_set1_ps(s[part]), zero = _mm256_set1_ps(z[part]);
      __m256i c = BITS == 8 ? _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + k)))
                            : _mm256_cvtepi16_epi32(_mm_load_si128((const __m128i*)(codes + k)));
      return _mm256_mul_ps(_mm256_sub_ps(_mm256_cvtepi32_ps(c), zero), scale);
    };
    int64_t count = w.K - g * GROUP < GROUP ? w.K - g * GROUP : GROUP;
    int64_t k = 0, to = at + g * GROUP;
    for (; k + 8 <= count; k += 8) put_eight(out, to + k, number, eight(k));
    alignas(32) float rest[8];
    if (k < count) _mm256_store_ps(rest, eight(k));
    for (int64_t i = 0; k < count; ++k, ++i) put(out, to + k, number, rest[i]);
  }
}
