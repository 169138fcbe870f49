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
    alignas(64) float values[GROUP];
    Ints c[VECTORS];
    unpack<BITS>(p, c);
    std::memcpy(codes, c, sizeof codes);
    __m256 scale = _mm256_set1_ps(s[g]), zero = _mm256_set1_ps(z[g]);
    int64_t count = w.K - g * GROUP < GROUP ? w.K - g * GROUP : GROUP;
    if (BITS == 8) for (int k = 0; k < GROUP; ++k) values[k] = codes[place(8, k)];
    else for (int k = 0; k < GROUP; ++k) values[k] = codes[k];
    for (int k = 0; k < GROUP; k += 8)
      _mm256_store_ps(values + k, _mm256_mul_ps(_mm256_sub_ps(_mm256_load_ps(values + k), zero), scale));
    int64_t k = 0, to = at + g * GROUP;
    for (; k + 8 <= count; k += 8) put_eight(out, to + k, number, _mm256_load_ps(values + k));
    for (; k < count; ++k) put(out, to + k, number, values[k]);
  }
}
