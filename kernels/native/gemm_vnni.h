// Many rows of x times a quantised weight without AMX: codes of 64 rows of w and a k-group are unpacked once into a
// sheet in a core's L1, columns side by side, where they meet all rows of x, six at a time.
//
// The values are gemv_int16.h's: x rounded to 16 bits a k-group, codes as they are, sums of a k-group (or of 32 k with
// finer grids) integers. Rounded to 8 bits, x and codes meet as bytes.
//
// GMAC/s of one core of a Xeon held to AVX-512, 4 bits, K 2048, 128 rows, unpacking included (most of the instruction):
// words 95 to 125 (149), two planes of bytes 124 (146), float32 77 (88), bfloat16 pairs 42 (29 to 57), one plane of x in
// 8 bits 152 to 204 (292). By rows of x, sheets / panel_rows.h on another: 16 118 / 115, 24 124 / 115, 64 147 / 125, 128
// 147 / 111; 8-bit x 16 181 / 203, 32 210 / 203, 128 241 / 196.
// Where x is more than a megabyte, one sheet after the other through all of it took half as long again (K 8192, 128 rows:
// 83 where 150 stayed in L2), so neighbours meet a part of k first, and x is asked for from far ahead.
#pragma once
#include "panel.h"
#include "rounded_rows.h"

#if HAS_BYTE_DOT
constexpr int64_t COLUMNS = 4, WIDTH = COLUMNS * LANES;  // of a sheet: vectors, rows of w
constexpr int64_t LEAST_WORDS = 20, LEAST_BYTES = 32;    // rows of x from which this is sooner than panel_rows.h
constexpr int64_t ROWS_AT_ONCE = 6;                      // 24 sums, 4 vectors of w and one of x are 29 registers

// How x lies: [k_groups, M, a k-group's words], a word two or four neighbours in the order of a sheet's steps.
struct SheetRows {
  int64_t steps = 0, parts = 0;  // of a k-group: words; grids
  Lined<int32_t> held;
  void reset(const Weight& w, int64_t M, const RoundedRows& r) {
    steps = r.bytes.empty() ? GROUP / 2 : GROUP / 4, parts = w.parts();
    held.resize(w.k_groups * M * steps);
  }
  int32_t* at(int64_t M, int64_t g, int64_t m) { return held.data() + (g * M + m) * steps; }
};

static void to_sheet_row(const RoundedRows& r, const Weight& w, int64_t M, int64_t m, int64_t g, SheetRows& x) {
  const int64_t from = (m * w.k_groups + g) * GROUP;
  int32_t* to = x.at(M, g, m);
  if (!r.bytes.empty()) {
    std::memcpy(to, r.bytes.data() + from, GROUP);
    return;
  }
  const int16_t* q = r.q.data() + from;
  if (w.bits < 8) {
    std::memcpy(to, q, 2 * GROUP);
    return;
  }
  // Even ones of 64, then odd ones: as 32 k each, for finer grids.
  for (int64_t half = 0; half < GROUP; half += 64)
    for (int64_t i = 0; i < 4; ++i) std::memcpy(to + half / 2 + i * 8, q + half + (i % 2 * 2 + i / 2) * 16, 32);
}

// 16 words of as many rows of w, as what meets x: vectors of a sheet, COLUMNS apart.
template <int BITS, bool BYTES>
static inline void put_codes(Ints w, int64_t part, int64_t i, Ints* to) {
  auto put_step = [&](int64_t step, Ints v) { _mm512_store_si512(to + step * COLUMNS, v); };
  if constexpr (BITS == 8 && BYTES) {
    put_step(16 * part + i, w);
  } else if constexpr (BITS == 8) {
    const int64_t step = 32 * part + i / 8 * 16 + i % 8;
    put_step(step, _mm512_and_si512(w, _mm512_set1_epi16(255)));
    put_step(step + 8, _mm512_srli_epi16(w, 8));
  } else if constexpr (BYTES) {
    const Ints mask = _mm512_set1_epi8((1 << BITS) - 1);
    if (BITS == 3) {  // (a, b, c, d) of 3 bits: a + 8 b in a byte, c + 8 d in the next
      const Ints low = _mm512_set1_epi16(0x3f), high = _mm512_set1_epi16(0x3f00);
      w = _mm512_or_si512(_mm512_and_si512(w, low), _mm512_and_si512(_mm512_slli_epi16(w, 2), high));
    }
    put_step(i, _mm512_and_si512(w, mask));
    put_step(16 + i, _mm512_and_si512(_mm512_srli_epi16(w, BITS), mask));
  } else {
    const Ints mask = _mm512_set1_epi16((1 << BITS) - 1);
    for (int64_t v = 0; v < 4; ++v) put_step(16 * v + i, _mm512_and_si512(_mm512_srli_epi16(w, BITS * v), mask));
  }
}

// A k-group of WIDTH rows of w from n0 on; behind the last row that row's again. What comes next is asked for.
template <int BITS, bool BYTES>
static void unpack_rows_of_sheet(const Weight& w, int64_t n0, int64_t g, const uint8_t* const*, Ints* sheet) {
  constexpr int64_t PARTS = BITS == 8 ? 2 : 1;
  for (int64_t column = 0; column < COLUMNS; ++column)
    for (int64_t part = 0; part < PARTS; ++part) {
      Ints row[LANES], words[LANES];
      for (int64_t i = 0; i < LANES; ++i) {
        const uint8_t* p = w.row(std::min(n0 + column * LANES + i, w.N - 1)) + g * 16 * BITS + part * 64;
        _mm_prefetch((const char*)p + 16 * BITS, _MM_HINT_T0);
        row[i] = BITS == 3 ? words_of_threes(p) : _mm512_loadu_si512(p);
      }
      transpose(row, words);
      for (int64_t i = 0; i < LANES; ++i) put_codes<BITS, BYTES>(words[i], part, i, sheet + column);
    }
}

// The same of panels, whose memory has columns: a line's codes are bytes 4u .. of x in the order of `put_bytes`.
template <int BITS, bool BYTES>
static void unpack_panels(const Weight&, int64_t, int64_t g, const uint8_t* const* panels, Ints* sheet) {
  constexpr int64_t UNIT = PANEL * 16 * BITS;
  for (int64_t column = 0; column < COLUMNS; ++column) {
    const uint8_t* p = panels[column] + g * UNIT;
    ask_ahead<BITS>(p, UNIT);
    for_codes<BITS>(p, [&](int u, Ints codes) __attribute__((always_inline)) {
      auto put_step = [&](int64_t step, Ints v) { _mm512_store_si512(sheet + step * COLUMNS + column, v); };
      if (BYTES) return put_step(u, codes);
      const int64_t step = BITS == 8 ? u / 8 * 16 + u % 8 : u;
      put_step(step, _mm512_and_si512(codes, _mm512_set1_epi16(255)));
      put_step(step + (BITS == 8 ? 8 : 32), _mm512_srli_epi16(codes, 8));
    });
  }
}

using Unpack = void (*)(const Weight&, int64_t, int64_t, const uint8_t* const*, Ints*);

template <int BITS>
static Unpack unpack_of(bool panels, bool bytes) {
  if (panels) return bytes ? unpack_panels<BITS, true> : unpack_panels<BITS, false>;
  return bytes ? unpack_rows_of_sheet<BITS, true> : unpack_rows_of_sheet<BITS, false>;
}

// What a thread works in: a sheet, and of `most` neighbours the sums [sheets, M, WIDTH] and the grids [sheets, parts of
// all k-groups, WIDTH].
struct SheetRoom {
  int64_t rows, grids;
  std::vector<const uint8_t*> places;  // of panels
  Tail tail;
  Lined<int32_t> codes;
  Lined<float> all_sums, scales, zeros;
  std::vector<float> grid;
  void reset(const Weight& w, int64_t M, int64_t most) {
    rows = M, grids = w.parts() * w.k_groups, places.resize(most * COLUMNS);
    codes.resize(GROUP / 2 * WIDTH), all_sums.resize(most * M * WIDTH);
    scales.resize(most * grids * WIDTH), zeros.resize(most * grids * WIDTH), grid.resize(2 * w.grid_size());
  }
  const uint8_t* const* codes_of(int64_t sheet) { return places.data() + sheet * COLUMNS; }
  Ints* sheet() { return (Ints*)codes.data(); }
  float* sums(int64_t sheet) { return all_sums.data() + sheet * rows * WIDTH; }
  float* s(int64_t sheet) { return scales.data() + sheet * grids * WIDTH; }
  float* z(int64_t sheet) { return zeros.data() + sheet * grids * WIDTH; }
  void begin(const Weight& w, int64_t sheet, int64_t n0) {
    float *scale = grid.data(), *zero = scale + w.grid_size(), *to_s = s(sheet), *to_z = z(sheet);
    for (int64_t i = 0; i < WIDTH; ++i) {
      if (n0 + i < w.N) w.grid(n0 + i, scale, zero);
      for (int64_t g = 0; g < grids; ++g) to_s[g * WIDTH + i] = scale[g], to_z[g * WIDTH + i] = zero[g];
    }
    std::memset(sums(sheet), 0, rows * WIDTH * sizeof(float));
    for (int64_t column = 0; w.panels && column < COLUMNS; ++column)
      places[sheet * COLUMNS + column] = panel_of(w, std::min(n0 / PANEL + column, (w.N - 1) / PANEL), tail).codes;
  }
};

// The instruction by name: g++ 12 copies every sum and stores it, each step, where it is given the intrinsic.
template <bool BYTES>
static inline void add_products(Ints& sum, Ints w, Ints x) {
  if constexpr (BYTES) asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
  else asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
}

// ROWS rows of x from m on times a sheet: sums += s (x's scale d - z x's sum).
template <int ROWS, bool BYTES, int PARTS>
static void add_sheet(const RoundedRows& r, SheetRows& x, int64_t m, int64_t g, int64_t sheet, SheetRoom& room) {
  constexpr int64_t STEPS = (BYTES ? GROUP / 4 : GROUP / 2) / PARTS, PITCH = STEPS * PARTS;
  constexpr int64_t LINES = ROWS * PITCH / LANES / PARTS, FAR = 16 << 10;  // of x, asked for from far ahead
  const int32_t *from = x.at(room.rows, g, m), *next = from + FAR / 4;
  const Ints* w = room.sheet();
  const float *s = room.s(sheet) + g * PARTS * WIDTH, *z = room.z(sheet) + g * PARTS * WIDTH;
  for (int part = 0; part < PARTS; ++part, from += STEPS, next += LINES * LANES, s += WIDTH, z += WIDTH) {
    Ints d[ROWS][COLUMNS];  // in registers only where every loop over them is unrolled
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
      for (int c = 0; c < COLUMNS; ++c) d[i][c] = zero_ints();
    for (int64_t step = 0; step < STEPS; ++step, w += COLUMNS) {
      if (step % 2 == 0 && step / 2 < LINES) _mm_prefetch((const char*)(next + step / 2 * LANES), _MM_HINT_T1);
      Ints v[COLUMNS];
#pragma GCC unroll 4
      for (int c = 0; c < COLUMNS; ++c) v[c] = _mm512_load_si512(w + c);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) {
        Ints xv = _mm512_set1_epi32(from[i * PITCH + step]);
        asm("" : "+v"(xv));  // loaded once, not by each product
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; ++c)
          add_products<BYTES>(d[i][c], v[c], xv);
      }
    }
    float* sums = room.sums(sheet) + m * WIDTH;
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const int64_t at = (m + i) * r.padded + g;
      const Floats step = floats(r.scale[at]), sum = floats(r.sum[at * PARTS + part]);
#pragma GCC unroll 4
      for (int c = 0; c < COLUMNS; ++c, sums += LANES) {
        const Floats y = _mm512_fnmadd_ps(load(z + c * LANES), sum, mul(to_floats(d[i][c]), step));
        store(sums, fma(load(s + c * LANES), y, load(sums)));
      }
    }
  }
}

using AddSheet = void (*)(const RoundedRows&, SheetRows&, int64_t, int64_t, int64_t, SheetRoom&);

template <bool BYTES, int PARTS>
static AddSheet add_sheet_of(int64_t rows) {
  static constexpr AddSheet run[ROWS_AT_ONCE] = {add_sheet<1, BYTES, PARTS>, add_sheet<2, BYTES, PARTS>,
                                                 add_sheet<3, BYTES, PARTS>, add_sheet<4, BYTES, PARTS>,
                                                 add_sheet<5, BYTES, PARTS>, add_sheet<6, BYTES, PARTS>};
  return run[rows - 1];
}

static void put_sheet_rows(const Weight& w, const float* sums, const Output& out, int64_t M, int64_t n0) {
  const int64_t count = std::min(WIDTH, w.N - n0);
  alignas(64) float bias[WIDTH] = {};
  if (out.bias) copy_floats(bias, out.bias, n0, count, out.dtype);
  for (int64_t m = 0; m < M; ++m, sums += WIDTH) {
    int64_t i = 0, to = m * w.N + n0;
    for (; i + 8 <= count; i += 8)
      put_eight(out.y, to + i, out.dtype, _mm256_add_ps(_mm256_loadu_ps(sums + i), _mm256_load_ps(bias + i)));
    for (; i < count; ++i) put(out.y, to + i, out.dtype, sums[i] + bias[i]);
  }
}

// Sheets that meet the same part of x, which stays in a core's L2 beside their sums.
constexpr int64_t MOST_SHEETS = 8, SHEET_PART = 512 << 10;

// y = x w^T + bias of rows that were rounded to one row each; called by every thread of a team.
static void gemm_vnni(const Weight& w, const RoundedRows& r, SheetRows& x, const Output& out, int64_t M) {
#pragma omp for schedule(static)
  for (int64_t i = 0; i < M * w.k_groups; ++i) to_sheet_row(r, w, M, i % M, i / M, x);
  const bool bytes = !r.bytes.empty();
  const Unpack unpack = (w.bits == 3 ? unpack_of<3> : w.bits == 4 ? unpack_of<4> : unpack_of<8>)(w.panels, bytes);
  auto add = bytes ? add_sheet_of<true, 1> : w.fine() ? add_sheet_of<false, FINE_PARTS> : add_sheet_of<false, 1>;
  const int64_t blocks = (M + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;  // of rows, about equal in size
  const int64_t all = (w.N + WIDTH - 1) / WIDTH, fit = std::min(MOST_SHEETS, SHEET_PART / (M * WIDTH * 4));
  const int64_t most = std::max<int64_t>(1, std::min(fit, all / (4 * omp_get_num_threads())));
  const int64_t part = std::max<int64_t>(1, SHEET_PART / (M * x.steps * 4));  // k-groups
  static thread_local SheetRoom room;
  room.reset(w, M, most);
#pragma omp for schedule(dynamic)
  for (int64_t first = 0; first < all; first += most) {
    const int64_t sheets = std::min(most, all - first);
    for (int64_t sheet = 0; sheet < sheets; ++sheet) room.begin(w, sheet, (first + sheet) * WIDTH);
    for (int64_t g0 = 0; g0 < w.k_groups; g0 += part)
      for (int64_t sheet = 0; sheet < sheets; ++sheet)
        for (int64_t g = g0; g < std::min(w.k_groups, g0 + part); ++g) {
          unpack(w, (first + sheet) * WIDTH, g, room.codes_of(sheet), room.sheet());
          for (int64_t b = 0; b < blocks; ++b) {
            const int64_t m = b * M / blocks, end = (b + 1) * M / blocks;
            add(end - m)(r, x, m, g, sheet, room);
          }
        }
    for (int64_t sheet = 0; sheet < sheets; ++sheet)
      put_sheet_rows(w, room.sums(sheet), out, M, (first + sheet) * WIDTH);
  }
}

// Whether rows, rounded to one row each, are so many that unpacking once for all of them pays.
static bool takes_gemm_vnni(const Weight& w, int64_t rows, int64_t x_bits) {
  return rows >= (x_bits == 8 && as_bytes(w) ? LEAST_BYTES : LEAST_WORDS);
}
#else
struct SheetRows {
  void reset(const Weight&, int64_t, const RoundedRows&) {}
};
static bool takes_gemm_vnni(const Weight&, int64_t, int64_t) { return false; }
static void gemm_vnni(const Weight&, const RoundedRows&, SheetRows&, const Output&, int64_t) {}
#endif
