// Panels: 16 rows of a weight whose k-groups lie word by word in turn, so that a line of 64 bytes has a word of each
// row: dot products of bytes add up 16 rows at once, and 8-bit codes are AMX's right operand as they lie.
//
// A unit is a k-group of a panel, its words those of a row's form (cpu_layout.py draws it); scales and zeros of a
// group are 16 neighbours. Words of codes, `u` of 32: bytes 4u .. 4u + 3 of a row in the order of x (`put_bytes`,
// rounded_rows.h). Rows past the last 16 lie one after the other and are made a panel when they are multiplied.
#pragma once
#include <omp.h>

#include <vector>

#include "weight.h"

#if HAS_BYTE_DOT
// The words of a unit as codes, in turn: take(u, codes), u known when compiled. AS_IT_LIES: of 4 bits the upper 16
// words' codes 16 times.
template <int BITS, bool AS_IT_LIES = false, class Take>
static inline __attribute__((always_inline)) void for_codes(const uint8_t* p, Take take) {
  auto line = [&](int i) { return _mm512_loadu_si512(p + 64 * i); };
  if constexpr (BITS == 8) {
#pragma GCC unroll 32
    for (int u = 0; u < 32; ++u) take(u, line(u));
  } else if constexpr (BITS == 4) {
    const Ints low = _mm512_set1_epi8(15);
#pragma GCC unroll 16
    for (int u = 0; u < 16; ++u) {
      const Ints w = line(u);
      take(u, _mm512_and_si512(w, low));
      take(u + 16, AS_IT_LIES ? _mm512_andnot_si512(low, w) : _mm512_and_si512(_mm512_srli_epi16(w, 4), low));
    }
  } else {
    const Ints two = _mm512_set1_epi8(3), third = _mm512_set1_epi8(4);
#pragma GCC unroll 4
    for (int h = 0; h < 4; ++h) {
      const Ints top = line(8 + h);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const Ints w = line(h + 4 * i);
#pragma GCC unroll 4
        for (int f = 0; f < 4; ++f) {
          const int bit = 2 * f + i;  // of `top`, to be the third
          const Ints bits = bit < 2 ? _mm512_slli_epi16(top, 2 - bit) : _mm512_srli_epi16(top, bit - 2);
          const Ints pair = _mm512_and_si512(f ? _mm512_srli_epi16(w, 2 * f) : w, two);
          take(h + 4 * i + 8 * f, _mm512_ternarylogic_epi32(pair, bits, third, 0xf8));  // pair | bits & third
        }
      }
    }
  }
}

// Asks for the unit that begins so many bytes on.
template <int BITS>
static inline __attribute__((always_inline)) void ask_ahead(const uint8_t* p, int64_t bytes) {
#pragma GCC unroll 32
  for (int64_t at = 0; at < 256 * BITS; at += 64) _mm_prefetch((const char*)p + bytes + at, _MM_HINT_T1);
}

// A panel, its grids one group after the other; `count` rows of it are w's.
struct Panel {
  const uint8_t* codes;
  const void *scale, *zero;
  int64_t first, count;
};

// A panel's memory where w has none: of the rows past the last 16.
struct Tail {
  std::vector<uint8_t> codes, scale, zero;
  Panel of(const Weight& w) {
    const int64_t first = w.in_panels(), count = w.N - first, words = 4 * w.bits, size = size_of(w.dtype);
    codes.assign(PANEL * w.k_groups * w.group_bytes(), 0);
    scale.assign(PANEL * w.groups * size, 0);
    if (w.zero) zero.assign(scale.size(), 0);
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t i = 0; i < w.k_groups * words; ++i)
        std::memcpy(codes.data() + (i * PANEL + r) * 4, w.row(first + r) + i * 4, 4);
      for (int64_t g = 0; g < w.groups; ++g) {
        const int64_t to = (g * PANEL + r) * size, from = ((first + r) * w.groups + g) * size;
        std::memcpy(scale.data() + to, (const uint8_t*)w.scale + from, size);
        if (w.zero) std::memcpy(zero.data() + to, (const uint8_t*)w.zero + from, size);
      }
    }
    return {codes.data(), scale.data(), w.zero ? zero.data() : nullptr, first, count};
  }
};

static inline Panel panel_of(const Weight& w, int64_t panel, Tail& tail) {
  const int64_t first = panel * PANEL, at = first * w.groups * size_of(w.dtype);
  if (first >= w.in_panels()) return tail.of(w);
  const void* zero = w.zero ? (const uint8_t*)w.zero + at : nullptr;
  return {w.row(first), (const uint8_t*)w.scale + at, zero, first, PANEL};
}

// Scales and zeros of a panel's k-groups.
struct PanelGrid {
  const void *scale, *zero;
  int64_t dtype, step;  // groups to a k-group: one, or one for all
  Floats none;
  PanelGrid(const Weight& w, const Panel& p)
      : scale(p.scale), zero(p.zero), dtype(w.dtype), step(w.groups == w.k_groups ? PANEL : 0), none(floats((float)(1 << (w.bits - 1)))) {}
  Floats scales(int64_t g) const { return sixteen_floats(scale, g * step, dtype); }
  Floats zeros(int64_t g) const { return zero ? sixteen_floats(zero, g * step, dtype) : none; }
};

// Panels that a thread takes at a time: half a MB of codes, a part of what each thread has. What is asked for behind
// the last is lost: one row, two cores, 4 and 8 bits 22.1 and 24.0 GB/s 128 KB at a time, 22.3 and 24.9 so.
static inline int64_t panels_together(const Weight& w, int64_t panels, int64_t threads) {
  const int64_t most = std::max<int64_t>(1, (512 << 10) / (PANEL * w.k_groups * w.group_bytes()));
  return std::max<int64_t>(1, std::min(most, panels / (4 * threads)));
}

// y of 16 rows of w from `first` on, `count` of them there, of a row of x.
static inline void put_sixteen(const Output& out, int64_t m, int64_t N, int64_t first, int64_t count, Floats y) {
  const int64_t to = m * N + first;
  if (count == PANEL) {
    if (out.bias) y = add(y, sixteen_floats(out.bias, first, out.dtype));
    put_eight(out.y, to, out.dtype, _mm512_castps512_ps256(y));
    put_eight(out.y, to + 8, out.dtype, _mm512_extractf32x8_ps(y, 1));
    return;
  }
  alignas(64) float flat[PANEL];
  store(flat, y);
  for (int64_t i = 0; i < count; ++i)
    put(out.y, to + i, out.dtype, flat[i] + (out.bias ? float_of(out.bias, first + i, out.dtype) : 0));
}

// A row of words of 2 bits, then of third bits, as the words of 4 bits that `unpack<4>` knows: 8 and 4 words there.
static inline void four_bits_of_three(const Ints* low, const Ints* top, Ints* to) {
  const Ints two = _mm512_set1_epi8(3), one = _mm512_set1_epi8(1);
  for (int u = 0; u < 16; ++u) {
    auto codes = [&](int at) {
      const int j = at % 8, bit = at / 8 * 2 + j / 4;
      const Ints pair = _mm512_and_si512(_mm512_srli_epi16(low[j], at / 8 * 2), two);
      const Ints up = _mm512_and_si512(_mm512_srli_epi16(top[j % 4], bit), one);
      return _mm512_or_si512(pair, _mm512_slli_epi16(up, 2));
    };
    to[u] = _mm512_or_si512(codes(u), _mm512_slli_epi16(codes(u + 16), 4));
  }
}

// Bytes of a row's k-group as `rows_of_unit` writes it.
template <int BITS>
constexpr int64_t FORM_BYTES = BITS == 8 ? GROUP : GROUP / 2;

// 16 lines of 16 words as columns 4 part .. 4 part + 3: words of four lines meet as they are loaded.
static inline void four_columns(const uint8_t* lines, int part, Ints* column) {
  Ints w[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    auto words = [&](int line) { return _mm_loadu_si128((const __m128i*)(lines + 64 * (line + j) + 16 * part)); };
    w[j] = _mm512_maskz_broadcast_i32x4(0x000f, words(0));
    w[j] = _mm512_mask_broadcast_i32x4(w[j], 0x00f0, words(4));
    w[j] = _mm512_mask_broadcast_i32x4(w[j], 0x0f00, words(8));
    w[j] = _mm512_mask_broadcast_i32x4(w[j], 0xf000, words(12));
  }
  const Ints a = _mm512_unpacklo_epi32(w[0], w[1]), b = _mm512_unpackhi_epi32(w[0], w[1]);
  const Ints c = _mm512_unpacklo_epi32(w[2], w[3]), d = _mm512_unpackhi_epi32(w[2], w[3]);
  column[0] = _mm512_unpacklo_epi64(a, c), column[1] = _mm512_unpackhi_epi64(a, c);
  column[2] = _mm512_unpacklo_epi64(b, d), column[3] = _mm512_unpackhi_epi64(b, d);
}

// A k-group of `count` (8 or 16) rows from n0 on, each by itself, as `unpack<BITS>` knows them, those of 3 bits in
// the form of 4; behind the last row that row's again. take(r, half, words): 64 bytes of row n0 + r.
template <int BITS, class Take>
static inline __attribute__((always_inline)) void rows_of_unit(const Weight& w, int64_t n0, int64_t count, int64_t g, Take take) {
  constexpr int LINES = 4 * BITS;
  alignas(64) uint8_t held[BITS == 3 ? 16 : LINES][64];
  const uint8_t* lines = w.row(n0 / PANEL * PANEL) + g * PANEL * w.group_bytes();
  if (n0 >= w.in_panels()) {
    for (int64_t r = 0; r < PANEL; ++r) {
      const uint8_t* p = w.row(std::min(n0 / PANEL * PANEL + r, w.N - 1)) + g * w.group_bytes();
      for (int i = 0; i < LINES; ++i) std::memcpy(held[i] + 4 * r, p + 4 * i, 4);
    }
    lines = held[0];
  }
  if constexpr (BITS == 3) {
    Ints three[12], four[16];
    for (int i = 0; i < 12; ++i) three[i] = _mm512_loadu_si512(lines + 64 * i);
    four_bits_of_three(three, three + 8, four);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(held[i], four[i]);
    lines = held[0];
  }
  for (int half = 0; half < FORM_BYTES<BITS> / 64; ++half)
    for (int64_t r = 0; r < count; r += 4) {
      Ints row[4];
      four_columns(lines + half * 1024, (int)(n0 % PANEL + r) / 4, row);
#pragma GCC unroll 4
      for (int64_t i = 0; i < 4; ++i) take(r + i, half, row[i]);
    }
}
#endif

// A row's k-group of codes, in the order of `put_bytes`, as panels have its words, 16 or 3 x 16 bits: fields of four bits, or of two and one.
static inline void words_of_three(const uint8_t* codes, uint8_t* p) {
  std::memset(p, 0, 48);
  for (int at = 0; at < GROUP; ++at) {
    const int u = at / 4, byte = at % 4, j = u % 8, code = codes[at];
    p[4 * j + byte] |= (uint8_t)((code & 3) << u / 8 * 2);
    p[32 + 4 * (j % 4) + byte] |= (uint8_t)((code >> 2) << (u / 8 * 2 + j / 4));
  }
}
