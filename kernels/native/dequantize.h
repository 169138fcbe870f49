// Rows of a quantised weight as values, for the many rows of x that a dense product is best at.
#pragma once
#include <vector>

#include "panel.h"

#if WIDE
// Rounded as `put_eight` does.
static inline __m256i sixteen_of(Floats v, int64_t dtype) {
  if (dtype == FLOAT16) return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(v);
#else
  const __m512i word = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(word, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(word, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_set1_epi32(up, nan, 0x7fc00000), 16));
#endif
}

// The values of all codes below 8 bits in 16 bits, over and over.
static inline __m512i values_of(int64_t bits, float scale, float zero, int64_t dtype) {
  const __m512i word = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512 code = _mm512_cvtepi32_ps(_mm512_and_si512(word, _mm512_set1_epi32((1 << bits) - 1)));
  return _mm512_broadcast_i64x4(sixteen_of(mul(sub(code, floats(zero)), floats(scale)), dtype));
}

// 32 words of four codes as values of 16 bits, 32 of them, then 32 `apart` bytes on; s and z: of their parts. A group
// has at most 16 values, each computed once: a permutation of words looks them up by the words' low bits.
template <int BITS>
static inline void values_of_words(__m512i w, const float* s, const float* z, bool fine, int64_t dtype, int64_t apart, uint8_t* to) {
  __m512i values = values_of(BITS, *s, *z, dtype);
  for (int64_t v = 0; v < 4; ++v) {
    if (fine && v) values = values_of(BITS, s[v], z[v], dtype);
    _mm512_storeu_si512(to + v * apart, _mm512_permutexvar_epi16(_mm512_srli_epi16(w, BITS * v), values));
  }
}

// The same of a row's k-group as it lies.
template <int BITS>
static inline void values_of_group(const uint8_t* p, const float* s, const float* z, bool fine, int64_t dtype,
                                    int64_t apart, uint8_t* to) {
  constexpr int64_t TOGETHER = 32, TIMES = GROUP / TOGETHER;
  if constexpr (BITS == 8) {
    for (int64_t v = 0; v < TIMES; ++v) {
      const Floats scale = floats(s[fine ? v : 0]), zero = floats(z[fine ? v : 0]);
      auto half = [&](int64_t at) {
        const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(p + v * TOGETHER + at)));
        return mul(sub(_mm512_cvtepi32_ps(codes), zero), scale);
      };
#ifdef __AVX512BF16__
      if (dtype == BFLOAT16) {
        _mm512_storeu_si512(to + v * apart, (__m512i)_mm512_cvtne2ps_pbh(half(16), half(0)));
        continue;
      }
#endif
      for (int64_t i = 0; i < 2; ++i) _mm256_storeu_si256((__m256i*)(to + v * apart) + i, sixteen_of(half(16 * i), dtype));
    }
  } else {
    values_of_words<BITS>(BITS == 4 ? _mm512_loadu_si512(p) : words_of_threes(p), s, z, fine, dtype, apart, to);
  }
}
#endif

// out[k] = (code - zero) scale for k < K, computed in float32 and rounded once; p: the row by itself.
template <int BITS>
static void dequantize_row(const Weight& w, const uint8_t* p, void* out, int64_t at, int64_t dtype, const float* s, const float* z) {
  for (int64_t g = 0; g < w.k_groups; ++g, p += 16 * BITS) {
    int64_t count = w.K - g * GROUP < GROUP ? w.K - g * GROUP : GROUP;
#if WIDE
    if (dtype != FLOAT32 && count == GROUP) {
      const int64_t part = g * w.parts();
      values_of_group<BITS>(p, s + part, z + part, w.fine(), dtype, 64, (uint8_t*)out + 2 * (at + g * GROUP));
      continue;
    }
#endif
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
    int64_t k = 0, to = at + g * GROUP;
    for (; k + 8 <= count; k += 8) put_eight(out, to + k, dtype, eight(k));
    alignas(32) float rest[8];
    if (k < count) _mm256_store_ps(rest, eight(k));
    for (int64_t i = 0; k < count; ++k, ++i) put(out, to + k, dtype, rest[i]);
  }
}

// What a thread works in: a panel's rows by themselves, a row's grid.
struct DequantizeRoom {
  std::vector<uint8_t> rows;
  std::vector<float> grid;
  explicit DequantizeRoom(const Weight& w)
      : rows(w.panels ? PANEL * w.k_groups * GROUP + 64 : 0), grid(2 * PANEL * w.grid_size()) {}
};

// Those of rows n .. n + 16 that are among n0 .. n1, which `out` begins with.
template <int BITS>
static void dequantize_rows(const Weight& w, int64_t n, int64_t n0, int64_t n1, void* out, int64_t dtype, DequantizeRoom& room) {
  const int64_t end = std::min(n1, n + PANEL), pitch = w.grid_size();
  float *s = room.grid.data(), *z = s + PANEL * pitch;
  w.grids(n, std::min(w.N, n + PANEL), s, z);
#if HAS_BYTE_DOT
  constexpr int64_t BYTES = FORM_BYTES<BITS>;
  for (int64_t g = 0; w.panels && g < w.k_groups; ++g)
    rows_of_unit<BITS>(w, n, PANEL, g, [&](int64_t r, int half, Ints words) {
      _mm512_storeu_si512(room.rows.data() + (r * w.k_groups + g) * BYTES + half * 64, words);
    });
#endif
  for (int64_t row = std::max(n, n0); row < end; ++row) {
    const float *scale = s + (row - n) * pitch, *zero = z + (row - n) * pitch;
    const int64_t to = (row - n0) * w.K;
#if HAS_BYTE_DOT
    const uint8_t* p = room.rows.data() + (row - n) * w.k_groups * BYTES;
    if (w.panels) { dequantize_row<BITS == 3 ? 4 : BITS>(w, p, out, to, dtype, scale, zero); continue; }
#endif
    dequantize_row<BITS>(w, w.row(row), out, to, dtype, scale, zero);
  }
}
