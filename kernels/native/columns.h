// 16 rows of 16 words as columns.
#pragma once
#include "vectors.h"

#if WIDE
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
