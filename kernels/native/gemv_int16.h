// Few rows of x: integer dot products of codes with x rounded to 16 bits a k-group.
//
//   y[m,n] = sum_g s[n,g] (xs[m,g] sum_k c[n,k] xq[m,k] - z[n,g] xsum[m,g])
//
// Groups of 32 or 64 weights: s, z and xsum of each 32 weights, xs of the whole k-group.
//
// xs is a power of two, so that bfloat16 values down to 1/128 of their group's largest are exact and
// smaller ones are off by at most 2^-16 of it (products: 3e-5, where rounding y to bfloat16 costs
// 1e-3). float32 x takes two such rows, the second what the first left: 30 bits.
// Rounded to 8 bits (`--cpu-activations int8`): xs is the group's largest / 127, one row whatever x is; codes
// and x meet as bytes where the instructions take them and groups are of 128 or more, else as above.
// With AVX512-VNNI groups of 128 or more are panel_rows.h's and tiles.h's.
// AVX2 has no instruction that adds up products of 16-bit integers: there codes of 3 and 4 bits meet x as two bytes,
// or float32 x as three (24 bits), each by four products of 32 bytes whose sums 16 bits hold.
// Cost a k-group of 128 weights: 16 bits bytes read, 4-bit codes by 6 shifts and masks (AVX-512); for
// each row of x 4 dot products (of bytes 2), a conversion and an fma.
#pragma once
#include "rounded_rows.h"

// How codes and x meet: as 16-bit integers, the same with a grid each 32 weights, as bytes; x's two or three bytes.
enum class Meet { WHOLE, FINE, BYTES, TWO_PLANES, THREE_PLANES };

// Sums of products of a k-group's codes with x as 16-bit integers.
static inline Ints dot_words(const Ints* codes, const int16_t* q) {
  Ints d = zero_ints();
  for (int v = 0; v < VECTORS; ++v) d = dot(d, codes[v], load(q + v * 2 * LANES));
  return d;
}

// The same with x in PLANES bytes, in units of its upper 16 bits; codes of up to 4 bits.
template <int64_t PLANES>
static inline Floats dot_planes(const Ints* codes, const int8_t* x) {
#if WIDE
  return floats(0);  // meets 16-bit integers
#else
  constexpr int N = GROUP / (4 * LANES);
  __m256i sums[PLANES] = {};
  for (int v = 0; v < N; ++v)
    for (int plane = 0; plane < PLANES; ++plane) {
      const __m256i bytes = _mm256_loadu_si256((const __m256i*)(x + plane * GROUP + v * 32));
      // The highest has signs; codes are the same with and without.
      const __m256i pairs = plane ? _mm256_maddubs_epi16(bytes, codes[v]) : _mm256_maddubs_epi16(codes[v], bytes);
      sums[plane] = _mm256_add_epi16(sums[plane], pairs);
    }
  const __m256i one = _mm256_set1_epi16(1);
  const __m256i upper = _mm256_add_epi32(_mm256_madd_epi16(sums[0], _mm256_set1_epi16(256)), _mm256_madd_epi16(sums[1], one));
  if constexpr (PLANES == 2) return to_floats(upper);
  return fma(to_floats(_mm256_madd_epi16(sums[PLANES - 1], one)), floats(0x1p-8f), to_floats(upper));
#endif
}

// Rows first .. first + ROWS of the rounded x (PARTS to a row of y) times rows n0 .. n1 of w, whose grids are s, z.
template <int BITS, int ROWS, int PARTS, Meet MEET>
static void gemv_int16(const Weight& w, const RoundedRows& x, const Output& out, int64_t first, int64_t n0,
                     int64_t n1, const float* s, const float* z) {
  for (int64_t n = n0; n < n1; ++n, s += w.grid_size(), z += w.grid_size()) {
    const uint8_t* p = w.row(n);
    Floats acc[ROWS], off[ROWS];
    for (int m = 0; m < ROWS; ++m) acc[m] = off[m] = floats(0);
    for (int64_t g0 = 0; g0 < w.k_groups; g0 += LANES) {
      alignas(64) float factor[ROWS][LANES];
      constexpr bool FINE = MEET == Meet::FINE;
      constexpr int64_t GRIDS = FINE ? FINE_PARTS : 1;
      for (int m = 0; m < ROWS; ++m) {
        int64_t at = (first + m) * x.padded + g0;
        Floats step = load(x.scale.data() + at);
        store(factor[m], FINE ? step : mul(load(s + g0), step));
        for (int64_t i = 0; i < GRIDS * LANES; i += LANES) {
          Floats scaled_zero = mul(load(s + g0 * GRIDS + i), load(z + g0 * GRIDS + i));
          off[m] = fma(scaled_zero, load(x.sum.data() + at * GRIDS + i), off[m]);
        }
      }
      int64_t g1 = g0 + LANES < w.k_groups ? g0 + LANES : w.k_groups;
      for (int64_t g = g0; g < g1; ++g, p += 16 * BITS) {
        Ints c[VECTORS];
        constexpr int64_t PLANES = MEET == Meet::TWO_PLANES ? 2 : MEET == Meet::THREE_PLANES ? 3 : 0;
        if constexpr (MEET == Meet::BYTES || PLANES) unpack_bytes<BITS>(p, c);
        else unpack<BITS>(p, c);
        // Near to L1 and far to L2 (panel_rows.h has figures). One request to L2 alone: one row, small pages, 4 and 8
        // bits on a busy thread 5.7 and 6.7 GB/s; to L1 alone, 2048 ahead 4.6 and 5.4, 4096 ahead 4.6 and 5.3; none 3.9
        // and 5.2. Two rows of w at once, 8 bits, two quiet cores: 19.8 and 21.5 where one took 20.0 and 22.1.
        constexpr int NEAR = BITS == 8 ? 2048 : 1024, FAR = 4096;
        for (int line = 0; line < (BITS == 8 ? 2 : 1); ++line) prefetch_twice(p + 64 * line, NEAR, FAR);
        for (int m = 0; m < ROWS; ++m) {
          const int64_t at = ((first + m) * w.k_groups + g) * GROUP;
          const int16_t* q = x.q.data() + at;
          if constexpr (MEET == Meet::BYTES) {
            acc[m] = fma(to_floats(dot_bytes(c, x.bytes.data() + at)), floats(factor[m][g - g0]), acc[m]);
          } else if constexpr (PLANES) {
            acc[m] = fma(dot_planes<PLANES>(c, x.bytes.data() + at * PLANES), floats(factor[m][g - g0]), acc[m]);
          } else if constexpr (FINE) {
            Floats d = floats(0);
            for (int v = 0; v < VECTORS; ++v) {
              Ints part = dot(zero_ints(), c[v], load(q + v * 2 * LANES));
              d = fma(to_floats(part), part_scales<BITS>(s + g * FINE_PARTS, v), d);
            }
            acc[m] = fma(d, floats(factor[m][g - g0]), acc[m]);
          } else {
            acc[m] = fma(to_floats(dot_words(c, q)), floats(factor[m][g - g0]), acc[m]);
          }
        }
      }
    }
    float bias = out.bias ? float_of(out.bias, n, out.dtype) : 0;
    for (int m = 0; m < ROWS; m += PARTS) {
      Floats sum = sub(acc[m], off[m]);
      if (PARTS == 2) sum = add(sum, sub(acc[m + PARTS - 1], off[m + PARTS - 1]));
      put(out.y, (first + m) / PARTS * w.N + n, out.dtype, total(sum) + bias);
    }
  }
}

// The same of two rows of codes: x is loaded once for both, which compilers take for two operands in memory else
// (24.8 cycles of the clock a k-group of eight rows, 20.0 so; the products alone take 17.8).
static inline void dot_words(const Ints (*codes)[VECTORS], const int16_t* q, Ints* d) {
  d[0] = d[1] = zero_ints();
  for (int v = 0; v < VECTORS; ++v) {
    Ints x = load(q + v * 2 * LANES);
    asm("" : "+v"(x));
    d[0] = dot(d[0], codes[0][v], x);
    d[1] = dot(d[1], codes[1][v], x);
  }
}

// The same for eight or four rows, COLUMNS rows of w at a time: x is read half as often, and in pieces of LANES
// k-groups, which stay in a core's L1 for all of n0 .. n1 (at most BLOCK_ROWS).
constexpr int64_t BLOCK_ROWS = 32;

template <int BITS, int ROWS, Meet MEET>
static inline void row_block(const Weight& w, const RoundedRows& x, int64_t first, const int64_t* n, int64_t g0,
                             const float* const* s, Floats (*acc)[ROWS]) {
  constexpr int COLUMNS = 2;
  const int8_t* bytes = x.bytes.data();
  const int16_t* q = x.q.data();
  alignas(64) float factor[COLUMNS][ROWS][LANES];
  for (int c = 0; c < COLUMNS; ++c) {
    const Floats scale = load(s[c] + g0);
    for (int m = 0; m < ROWS; ++m) store(factor[c][m], mul(scale, load(x.scale.data() + (first + m) * x.padded + g0)));
  }
  const int64_t g1 = g0 + LANES < w.k_groups ? g0 + LANES : w.k_groups;
  const uint8_t* p[COLUMNS] = {w.row(n[0]) + g0 * 16 * BITS, w.row(n[1]) + g0 * 16 * BITS};
  const int64_t ahead = COLUMNS * w.k_groups * 16 * BITS;  // the same of the next columns
  Floats sum[COLUMNS][ROWS];
  for (int c = 0; c < COLUMNS; ++c)
    for (int m = 0; m < ROWS; ++m) sum[c][m] = acc[c][m];
  for (int64_t g = g0; g < g1; ++g) {
    Ints codes[COLUMNS][VECTORS];
    for (int c = 0; c < COLUMNS; ++c, p[c - 1] += 16 * BITS) {
      if constexpr (MEET == Meet::BYTES) unpack_bytes<BITS>(p[c], codes[c]);
      else unpack<BITS>(p[c], codes[c]);
      _mm_prefetch((const char*)(p[c] + ahead), _MM_HINT_T0);
      if (BITS == 8) _mm_prefetch((const char*)(p[c] + ahead + 64), _MM_HINT_T0);
    }
#pragma GCC unroll 8  // or sums live in memory
    for (int m = 0; m < ROWS; ++m) {
      const int64_t at = ((first + m) * w.k_groups + g) * GROUP;
      Ints d[COLUMNS];
      if constexpr (MEET == Meet::BYTES)
        for (int c = 0; c < COLUMNS; ++c) d[c] = dot_bytes(codes[c], bytes + at);
      else
        dot_words(codes, q + at, d);
      for (int c = 0; c < COLUMNS; ++c) sum[c][m] = fma(to_floats(d[c]), floats(factor[c][m][g - g0]), sum[c][m]);
    }
  }
  for (int c = 0; c < COLUMNS; ++c)
    for (int m = 0; m < ROWS; ++m) acc[c][m] = sum[c][m];
}

// y and a bias to ROWS rows from m on of out, columns n0 .. n1.
template <int ROWS>
static void put_rows(float (*y)[BLOCK_ROWS], const Output& out, int64_t m, int64_t n0, int64_t n1, int64_t N) {
  alignas(64) float bias[BLOCK_ROWS] = {};
  if (out.bias) copy_floats(bias, out.bias, n0, n1 - n0, out.dtype);
  for (int r = 0; r < ROWS; ++r) {
    int64_t i = 0, to = (m + r) * N + n0;
    for (; i + 8 <= n1 - n0; i += 8)
      put_eight(out.y, to + i, out.dtype, _mm256_add_ps(_mm256_load_ps(y[r] + i), _mm256_load_ps(bias + i)));
    for (; i < n1 - n0; ++i) put(out.y, to + i, out.dtype, y[r][i] + bias[i]);
  }
}

template <int BITS, int ROWS, int PARTS, Meet MEET>
static void rows_in_blocks(const Weight& w, const RoundedRows& x, const Output& out, int64_t first, int64_t n0,
                           int64_t n1, const float* s, const float* z) {
  constexpr int COLUMNS = 2;
  Floats acc[BLOCK_ROWS][ROWS];
  for (auto& row : acc)
    for (Floats& a : row) a = floats(0);
  const int64_t pitch = w.grid_size();
  for (int64_t g0 = 0; g0 < w.k_groups; g0 += LANES)
    for (int64_t i = 0; i < n1 - n0; i += COLUMNS) {
      const int64_t other = n0 + i + 1 < n1 ? i + 1 : i, n[COLUMNS] = {n0 + i, n0 + other};
      const float* scales[COLUMNS] = {s + i * pitch, s + other * pitch};
      row_block<BITS, ROWS, MEET>(w, x, first, n, g0, scales, acc + i);
    }
  alignas(64) float y[ROWS][BLOCK_ROWS] = {};
  for (int64_t i = 0; i < n1 - n0; i += COLUMNS, s += COLUMNS * pitch, z += COLUMNS * pitch) {
    Floats ends[16];
    for (int e = 0; e < 16; ++e) ends[e] = e < COLUMNS * ROWS ? acc[i + e / ROWS][e % ROWS] : floats(0);
    for (int c = 0; c < COLUMNS && i + c < n1 - n0; ++c)
      for (int64_t g = 0; g < pitch; g += LANES) {
        const Floats scaled_zero = mul(load(s + c * pitch + g), load(z + c * pitch + g));
        for (int m = 0; m < ROWS; ++m) {
          Floats& end = ends[c * ROWS + m];
          end = sub(end, mul(scaled_zero, load(x.sum.data() + (first + m) * x.padded + g)));
        }
      }
    alignas(64) float found[16];
    totals(ends, found);
    for (int c = 0; c < COLUMNS; ++c)
      for (int m = 0; m < ROWS; m += PARTS)
        y[m / PARTS][i + c] = found[c * ROWS + m] + (PARTS == 2 ? found[c * ROWS + m + PARTS - 1] : 0);
  }
  put_rows<ROWS / PARTS>(y, out, first / PARTS, n0, n1, w.N);
}

template <int BITS, int PARTS, Meet MEET>
static void gemv_int16_of(const Weight& w, const RoundedRows& x, const Output& out, int64_t M, int64_t n0,
                     int64_t n1, const float* s, const float* z) {
  int64_t first = 0, rows = M * PARTS;
  if constexpr (WIDE && MEET != Meet::FINE) {
    for (; rows - first >= 8; first += 8) rows_in_blocks<BITS, 8, PARTS, MEET>(w, x, out, first, n0, n1, s, z);
    for (; rows - first >= 4; first += 4) rows_in_blocks<BITS, 4, PARTS, MEET>(w, x, out, first, n0, n1, s, z);
  }
  for (; rows - first >= 8; first += 8) gemv_int16<BITS, 8, PARTS, MEET>(w, x, out, first, n0, n1, s, z);
  for (; rows - first >= 4; first += 4) gemv_int16<BITS, 4, PARTS, MEET>(w, x, out, first, n0, n1, s, z);
  for (; rows - first >= 2; first += 2) gemv_int16<BITS, 2, PARTS, MEET>(w, x, out, first, n0, n1, s, z);
  if constexpr (PARTS == 1)
    if (first < rows) gemv_int16<BITS, 1, 1, MEET>(w, x, out, first, n0, n1, s, z);
}

template <int BITS, int PARTS>
static void gemv_int16(const Weight& w, const RoundedRows& x, const Output& out, int64_t M, int64_t n0,
                     int64_t n1, const float* s, const float* z) {
  auto run = w.fine() ? gemv_int16_of<BITS, PARTS, Meet::FINE> : gemv_int16_of<BITS, PARTS, Meet::WHOLE>;
  if constexpr (PARTS == 1 && (HAS_BYTE_DOT || BITS < 8))
    if (!x.bytes.empty()) run = gemv_int16_of<BITS, 1, Meet::BYTES>;
  if constexpr (PARTS == 1 && BITS < 8 && !WIDE) {
    if (x.planes == 2) run = gemv_int16_of<BITS, 1, Meet::TWO_PLANES>;
    if (x.planes == 3) run = gemv_int16_of<BITS, 1, Meet::THREE_PLANES>;
  }
  run(w, x, out, M, n0, n1, s, z);
}
