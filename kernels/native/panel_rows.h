// Few rows of x times a weight in panels, by dot products of bytes in registers: a line of codes meets four bytes of
// each row of x, and a k-group's sums of 16 rows of w are made values together.
//
// The values are those of gemv_int16.h: x of 16 bits is 256 high + low, bytes with a sign each; where a group's largest
// were more than 127 in both its step is twice as long.
// Cost of a line of 64 bytes at 4 bits: 2 operations to unpack it (8 rows: 3), 4 dot products for each row of x (8 bits: 0
// and 2); of a k-group of 16 rows about 10 more.
#pragma once
#include "panel.h"
#include "rounded_rows.h"

#if HAS_BYTE_DOT
// sum + products of codes with four bytes that all 16 rows meet; g++ 12 loads those by themselves, a step more.
static inline __attribute__((always_inline)) void add_dot(Ints& sum, Ints codes, const int8_t* four) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*(const int32_t*)four));
}

// A k-group of 16 rows of w times ROWS of x, PLANES bytes to a number: whole sums.
template <int BITS, int ROWS, int PLANES>
static inline __attribute__((always_inline)) void dot_unit(const uint8_t* p, const int8_t* x, Ints* sums) {
  constexpr bool UPPER = BITS == 4 && ROWS <= 4;           // upper codes as they lie, 16 times, in a chain of their own
  constexpr int CHAINS = ROWS == 1 || UPPER ? 2 : 1;       // one row's alone would wait for itself
  constexpr int64_t NEAR = 2048, FAR = 6144;
  Ints d[PLANES][ROWS][CHAINS];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m)
    for (int c = 0; c < CHAINS; ++c)
      for (int plane = 0; plane < PLANES; ++plane) d[plane][m][c] = zero_ints();
  for_codes<BITS, UPPER>(p, [&](int u, Ints codes) __attribute__((always_inline)) {
    if (u < 4 * BITS) prefetch_twice(p + 64 * u, NEAR, FAR);
    const int c = CHAINS == 1 ? 0 : BITS == 4 ? u / 16 : u % 2;
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 2
      for (int plane = 0; plane < PLANES; ++plane)
        add_dot(d[plane][m][c], codes, x + (m * PLANES + plane) * GROUP + 4 * u);
  });
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; ++m) {
    Ints both[PLANES];
#pragma GCC unroll 2
    for (int plane = 0; plane < PLANES; ++plane) {
      const Ints last = d[plane][m][CHAINS - 1];
      both[plane] = CHAINS == 1 ? last : _mm512_add_epi32(d[plane][m][0], UPPER ? _mm512_srai_epi32(last, 4) : last);
    }
    sums[m] = PLANES == 2 ? _mm512_add_epi32(_mm512_slli_epi32(both[0], 8), both[PLANES - 1]) : both[0];
  }
}

// Rows first .. first + ROWS of the rounded x (PARTS to a row of y) times a panel.
template <int BITS, int ROWS, int PLANES, int PARTS>
static void panel_rows(const Weight& w, const Panel& panel, const RoundedRows& x, const Output& out, int64_t first) {
  // ms for 700 MB of codes, two cores of a Xeon with AMX, 4 and 8 bits in turn: asked for near to L1 and far to L2
  // (`dot_unit`), both bytes of x signed, 30.3 and 29.9; to L2 alone 31.7 and 32.7; plain reads 26.4 and 27.6. Before, to
  // L2 alone 34.9 and 30.4, to L1 alone 39.2 and 34.0, without 46.7 and 38.3; two panels at once 37.0 and 30.7.
  constexpr int64_t UNIT = PANEL * 16 * BITS;
  const PanelGrid grid(w, panel);
  const uint8_t* p = panel.codes;
  const int64_t next = x.rows * PLANES * GROUP;
  const int8_t* q = x.bytes.data() + first * PLANES * GROUP;
  const float *step = x.scale.data() + first * x.padded, *sum = x.sum.data() + first * x.padded;
  Floats acc[ROWS];
  for (Floats& a : acc) a = floats(0);
  for (int64_t g = 0; g < w.k_groups; ++g, p += UNIT, q += next) {
    Ints d[ROWS];
    dot_unit<BITS, ROWS, PLANES>(p, q, d);
    const Floats scale = grid.scales(g), zero = grid.zeros(g);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      Floats y = mul(to_floats(d[m]), floats(step[m * x.padded + g]));
      y = _mm512_fnmadd_ps(zero, floats(sum[m * x.padded + g]), y);
      acc[m] = fma(y, scale, acc[m]);
    }
  }
  for (int m = 0; m < ROWS; m += PARTS)
    put_sixteen(out, (first + m) / PARTS, w.N, panel.first, panel.count, PARTS == 2 ? add(acc[m], acc[m + PARTS - 1]) : acc[m]);
}

template <int BITS, int PLANES, int PARTS>
static void all_rows(const Weight& w, const Panel& panel, const RoundedRows& x, const Output& out, int64_t M) {
  int64_t first = 0, rows = M * PARTS;
  for (; rows - first >= 8; first += 8) panel_rows<BITS, 8, PLANES, PARTS>(w, panel, x, out, first);
  for (; rows - first >= 4; first += 4) panel_rows<BITS, 4, PLANES, PARTS>(w, panel, x, out, first);
  for (; rows - first >= 2; first += 2) panel_rows<BITS, 2, PLANES, PARTS>(w, panel, x, out, first);
  if constexpr (PARTS == 1)
    if (first < rows) panel_rows<BITS, 1, PLANES, PARTS>(w, panel, x, out, first);
}

template <int BITS>
static auto all_rows_of(const RoundedRows& x) {
  return x.planes == 0 ? all_rows<BITS, 1, 1> : x.parts == 1 ? all_rows<BITS, 2, 1> : all_rows<BITS, 2, 2>;
}

// y = x w^T + bias of rows that were rounded; called by every thread of a team.
static void multiply_panels(const Weight& w, const RoundedRows& x, const Output& out, int64_t M) {
  auto run = w.bits == 3 ? all_rows_of<3>(x) : w.bits == 4 ? all_rows_of<4>(x) : all_rows_of<8>(x);
  const int64_t panels = (w.N + PANEL - 1) / PANEL, together = panels_together(w, panels, omp_get_num_threads());
  static thread_local Tail tail;
#pragma omp for schedule(dynamic)
  for (int64_t n = 0; n < panels; n += together)
    for (int64_t p = n; p < n + together && p < panels; ++p) run(w, panel_of(w, p, tail), x, out, M);
}
#else
static void multiply_panels(const Weight&, const RoundedRows&, const Output&, int64_t) {}
#endif
