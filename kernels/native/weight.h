// A quantised weight as kernels/formats/cpu_layout.py draws it, and its codes as 16-bit integers.
#pragma once
#include <algorithm>

#include "vectors.h"

constexpr int64_t GROUP = 128, PANEL = 16;
constexpr int64_t FINE_PARTS = 4;  // parts of 32 weights
constexpr int VECTORS = GROUP / (2 * LANES);  // of 16-bit integers, a k-group

struct Weight {
  const uint8_t* codes;  // [N, Kp/128, 16 bits bytes]
  const void* scale;     // [N, groups]: one, a k-group's, or two or four of each k-group
  const void* zero;      // the same, or null: 2^(bits-1)
  int64_t N, K, k_groups, groups, bits, dtype;
  bool panels;  // 16 rows' k-groups lie word by word in turn (panel.h), the rows past the last 16 by themselves
  int64_t in_panels() const { return panels ? N / PANEL * PANEL : 0; }
  int64_t group_bytes() const { return 16 * bits; }
  const uint8_t* row(int64_t n) const { return codes + n * k_groups * group_bytes(); }
  int64_t padded_groups() const { return (k_groups + 15) / 16 * 16; }
  bool fine() const { return groups > k_groups; }              // groups of 32 or 64 weights
  int64_t parts() const { return fine() ? FINE_PARTS : 1; }    // of a k-group, each with its grid
  int64_t grid_size() const { return parts() * padded_groups(); }

  // Where the scale of group g of row n is.
  int64_t grid_at(int64_t n, int64_t g) const {
    return n < in_panels() ? (n / PANEL * groups + g) * PANEL + n % PANEL : n * groups + g;
  }

  // scale and zero of row n for every part of every k-group; from there to grid_size() 0.
  void grid(int64_t n, float* s, float* z) const {
    int64_t count = groups, whole = parts() * k_groups;
    for (int64_t g = 0; panels && g < count; ++g) s[g] = float_of(scale, grid_at(n, g), dtype);
    for (int64_t g = 0; panels && zero && g < count; ++g) z[g] = float_of(zero, grid_at(n, g), dtype);
    if (!panels) copy_floats(s, scale, n * groups, count, dtype);
    if (!panels && zero) copy_floats(z, zero, n * groups, count, dtype);
    for (int64_t g = 0; !zero && g < count; ++g) z[g] = (float)(1 << (bits - 1));
    if (count < whole)
      for (int64_t g = whole - 1, each = whole / count; g > 0; --g) { s[g] = s[g / each]; z[g] = z[g / each]; }
    for (int64_t g = whole; g < grid_size(); ++g) s[g] = z[g] = 0;
  }

  // The same of rows n0 .. n1, `grid_size()` apart; behind the last row that row's again, up to n1.
  void grids(int64_t n0, int64_t n1, float* s, float* z) const {
    const int64_t pitch = grid_size();
#if WIDE
    for (; panels && groups == k_groups && n0 % PANEL == 0 && n0 + PANEL <= n1 && n0 < in_panels(); n0 += PANEL) {
      sixteen_grids(scale, n0, 0, s);
      sixteen_grids(zero, n0, (float)(1 << (bits - 1)), z);
      s += PANEL * pitch, z += PANEL * pitch;
    }
#endif
    if (!panels && groups == pitch && n1 <= N) {  // they lie as they are wanted
      copy_floats(s, scale, n0 * groups, (n1 - n0) * groups, dtype);
      if (zero) copy_floats(z, zero, n0 * groups, (n1 - n0) * groups, dtype);
      else std::fill(z, z + (n1 - n0) * groups, (float)(1 << (bits - 1)));
      return;
    }
    for (int64_t n = n0; n < n1; ++n) grid(n < N ? n : N - 1, s + (n - n0) * pitch, z + (n - n0) * pitch);
  }

#if WIDE
  // Those of a panel from row n0 on, a row after the other; `none` where there are none.
  void sixteen_grids(const void* from, int64_t n0, float none, float* to) const {
    for (int64_t g0 = 0; g0 < grid_size(); g0 += LANES, to += LANES) {
      Ints row[PANEL], column[PANEL];
      for (int64_t g = 0; g < PANEL; ++g)
        row[g] = g0 + g >= groups ? zero_ints() : _mm512_castps_si512(from ? sixteen_floats(from, grid_at(n0, g0 + g), dtype) : floats(none));
      transpose(row, column);
      for (int64_t n = 0; n < PANEL; ++n) _mm512_storeu_si512(to + n * grid_size(), column[n]);
    }
  }
#endif
};

// The scales of a k-group's four parts `s`, as the lanes of dot products of `unpack`'s vector v need them.
template <int BITS>
static inline Floats part_scales(const float* s, int v) {
#if WIDE
  if constexpr (BITS == 8) {
    const float* h = s + v / 2 * 2;
    return _mm512_insertf32x8(floats(h[0]), _mm256_set1_ps(h[1]), 1);
  }
  return floats(s[v]);
#else
  return floats(BITS == 8 ? s[v / 4 * 2 + v % 2] : s[v / 2]);
#endif
}

#if WIDE
// Codes of 3 bits as bytes, in the order of `put_bytes`.
static inline void bytes_of_three(const uint8_t* p, Ints* c) {
  const __m512i pairs = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p));
  const __m512i rest = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(p + 32)));
  const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5);
  const __m512i kept = _mm512_inserti64x4(_mm512_set1_epi8(4), _mm256_set1_epi8(7), 0);
  const __m512i two = _mm512_inserti64x4(_mm512_set1_epi8(3), _mm256_setzero_si256(), 0);
  c[0] = _mm512_and_si512(_mm512_srlv_epi32(pairs, halves), _mm512_set1_epi8(7));
  const __m512i low = _mm512_and_si512(_mm512_srli_epi16(pairs, 6), two);
  c[1] = _mm512_ternarylogic_epi32(low, _mm512_srlv_epi32(rest, lanes), kept, 0xf8);  // low | rest & kept
}
// 32 words of four codes each, those of 4 bits with three.
static inline __m512i words_of_threes(const uint8_t* p) {
  Ints c[2];
  bytes_of_three(p, c);
  const __m512i w = _mm512_or_si512(c[0], _mm512_slli_epi16(c[1], 3));
  return _mm512_or_si512(_mm512_and_si512(w, _mm512_set1_epi16(0x3f)), _mm512_and_si512(_mm512_srli_epi16(w, 2), _mm512_set1_epi16(0xfc0)));
}
template <int BITS>
static inline void unpack(const uint8_t* p, Ints* c) {
  if constexpr (BITS == 8) {
    for (int h = 0; h < 2; ++h) {
      __m512i w = _mm512_loadu_si512(p + 64 * h);
      c[2 * h] = _mm512_and_si512(w, _mm512_set1_epi16(255));
      c[2 * h + 1] = _mm512_srli_epi16(w, 8);
    }
  } else if constexpr (BITS == 4) {
    const __m512i low = _mm512_set1_epi16(15), w = _mm512_loadu_si512(p);
    c[0] = _mm512_and_si512(w, low);
    c[1] = _mm512_and_si512(_mm512_srli_epi16(w, 4), low);
    c[2] = _mm512_and_si512(_mm512_srli_epi16(w, 8), low);
    c[3] = _mm512_srli_epi16(w, 12);
  } else {
    Ints bytes[2];
    bytes_of_three(p, bytes);
    for (int h = 0; h < 2; ++h) c[h] = _mm512_and_si512(bytes[h], _mm512_set1_epi16(255)), c[2 + h] = _mm512_srli_epi16(bytes[h], 8);
  }
}
#else
static inline void bytes_of_three(const uint8_t* p, Ints* c) {
  const __m256i pairs = _mm256_loadu_si256((const __m256i*)p), seven = _mm256_set1_epi8(7);
  const __m256i rest = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)(p + 32)));
  auto shifted = [&](int low, int high) {
    return _mm256_srlv_epi32(rest, _mm256_setr_epi32(low, low, low, low, high, high, high, high));
  };
  c[0] = _mm256_and_si256(pairs, seven);
  c[1] = _mm256_and_si256(_mm256_srli_epi16(pairs, 3), seven);
  c[2] = _mm256_and_si256(shifted(0, 3), seven);
  c[3] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(pairs, 6), _mm256_set1_epi8(3)),
                         _mm256_and_si256(shifted(4, 5), _mm256_set1_epi8(4)));
}
template <int BITS>
static inline void unpack(const uint8_t* p, Ints* c) {
  const __m256i byte = _mm256_set1_epi16(255), low = _mm256_set1_epi16(15);
  Ints bytes[4];
  if constexpr (BITS == 3) bytes_of_three(p, bytes);
  for (int j = 0; j < (BITS == 8 ? 4 : 2); ++j) {
    if constexpr (BITS == 8) {
      __m256i w = _mm256_loadu_si256((const __m256i*)(p + 32 * j));
      int at = 4 * (j / 2) + j % 2;
      c[at] = _mm256_and_si256(w, byte);
      c[at + 2] = _mm256_srli_epi16(w, 8);
    } else if constexpr (BITS == 4) {
      __m256i w = _mm256_loadu_si256((const __m256i*)(p + 32 * j));
      for (int f = 0; f < 3; ++f) c[2 * f + j] = _mm256_and_si256(_mm256_srli_epi16(w, 4 * f), low);
      c[6 + j] = _mm256_srli_epi16(w, 12);
    } else {
      for (int h = 0; h < 2; ++h) {
        c[2 * h + j] = _mm256_and_si256(bytes[2 * h + j], byte);
        c[4 + 2 * h + j] = _mm256_srli_epi16(bytes[2 * h + j], 8);
      }
    }
  }
}
#endif

// Where the k-th number of a k-group stands among the codes that `unpack` returns.
static inline int place(int64_t bits, int k) {
  return bits == 8 ? k / 64 * 64 + k % 2 * 32 + k % 64 / 2 : k;
}

// Codes as bytes, GROUP / (4 LANES) vectors: `unpack`'s words hold two of them after a shift and a mask.
template <int BITS>
static inline void unpack_bytes(const uint8_t* p, Ints* c) {
  constexpr int N = GROUP / (4 * LANES), HALF = N / 2;
  if constexpr (BITS == 8) {
    for (int v = 0; v < N; ++v) c[v] = load((const int16_t*)(p + v * 4 * LANES));
    return;
  }
  if constexpr (BITS == 3) return bytes_of_three(p, c);
  for (int v = 0; v < HALF; ++v) {
#if WIDE
    const __m512i w = _mm512_loadu_si512(p), low = _mm512_set1_epi8(15);
    c[v] = _mm512_and_si512(w, low);
    c[HALF + v] = _mm512_and_si512(_mm512_srli_epi16(w, 4), low);
#else
    const __m256i w = _mm256_loadu_si256((const __m256i*)(p + 32 * v)), low = _mm256_set1_epi8(15);
    c[v] = _mm256_and_si256(w, low);
    c[HALF + v] = _mm256_and_si256(_mm256_srli_epi16(w, 4), low);
#endif
  }
}

// Sums of products of a k-group's codes with bytes in their order.
static inline Ints dot_bytes(const Ints* c, const int8_t* x) {
  constexpr int N = GROUP / (4 * LANES);
  Ints sum = zero_ints();
#if HAS_BYTE_DOT
  for (int v = 0; v < N; ++v) sum = _mm512_dpbusd_epi32(sum, c[v], _mm512_loadu_si512(x + v * 64));
#elif WIDE
  for (int v = 0; v < N; ++v) sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(c[v], _mm512_loadu_si512(x + v * 64)));
  sum = _mm512_madd_epi16(sum, _mm512_set1_epi16(1));
#else
  for (int v = 0; v < N; ++v)
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(c[v], _mm256_loadu_si256((const __m256i*)(x + v * 32))));
  sum = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
#endif
  return sum;
}

// Where the k-th number of a k-group stands among the bytes that `unpack_bytes` returns.
static inline int byte_place(int64_t bits, int k) {
  return bits == 8 ? k : k / 32 % 2 * 64 + 2 * (k % 32) + k / 64;
}

struct Output {
  void* y;           // [M, N]
  const void* bias;  // [N] or null
  int64_t dtype;
};
