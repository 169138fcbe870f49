// Several rows of x by AMX: x and codes meet as bytes in tiles, 16 rows of bytes of x x 16 rows of w x 64 of k.
//
// The numbers are those of few_rows.h: x rounded to 16 bits a k-group is 256 hi + lo, bytes with and without
// a sign, and a k-group's sums are whole numbers below 2^31. Up to 8 rows of x (16 bits) have both in one tile, lo
// with a sign, too. Codes of 8 bits are tiles as they lie (panel.h), fewer bits are unpacked.
// Tiles are loaded from memory only once stores have left the core for it: what a k-group needs is unpacked two
// k-groups ahead and its sums are taken two behind, or every step would wait for all of the one before it.
// Cost of a k-group of 16 rows of w, 8 rows of x: 4 loads of tiles, 2 products of 16 cycles, a store, 5 vector
// operations for each row of x. ns a row of w and k-group, in cache, one core, 8 rows of x: 2.9 (4 bits), 2.6 (8 bits)
// where rows of w that lay by themselves, unpacked as the left operand, took 6.6 and 9.2.
#pragma once
#include "panel.h"
#include "rounded_rows.h"

#if defined(__AMX_INT8__) && WIDE
#include <sys/syscall.h>
#include <unistd.h>

constexpr int64_t TILE = 16, TILE_BYTES = 1024, AHEAD = 2;

// Linux gives a process the registers if it asks.
static bool tiles_allowed() {
  static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return allowed;
}

struct TileShape {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  explicit TileShape(int64_t columns) {  // 0-3: sums, 4 and 5: codes, 6 and 7: x
    for (int i = 0; i < 8; ++i) { rows[i] = TILE; bytes[i] = (uint16_t)(i == 4 || i == 5 ? 64 : 4 * columns); }
  }
};

// How x lies in tiles: its high bytes alone, high and low ones in a tile each, or eight rows of each in one.
enum class Halves { HIGH, APART, BESIDE };

struct TiledRows {
  int64_t tiles = 0, k_groups;
  Halves halves;
  std::vector<uint8_t> held;
  std::vector<float> scale, sum;     // [tiles, k_groups, 16]
  void reset(int64_t rows, const Weight& w, const RoundedRows& of) {
    // float32's second row of bytes is what the first left: there a shift by one (`to_tiles`) would lose a bit.
    const bool beside = rows <= BESIDE_ROWS && of.parts == 1;
    halves = of.planes == 0 ? Halves::HIGH : beside ? Halves::BESIDE : Halves::APART;
    tiles = (rows + TILE - 1) / TILE, k_groups = w.k_groups;
    // What rows that are not there hold is never read out.
    if ((int64_t)held.size() < tiles * k_groups * slot() + 64) held.resize(tiles * k_groups * slot() + 64);
    scale.resize(tiles * k_groups * TILE);
    sum.resize(tiles * k_groups * TILE);
  }
  int64_t slot() const { return (halves == Halves::APART ? 4 : 2) * TILE_BYTES; }
  // The tiles of a k-group: of its halves high, then both of low bytes.
  uint8_t* at(int64_t tile, int64_t g) {
    return held.data() + (64 - (uintptr_t)held.data() % 64) % 64 + (tile * k_groups + g) * slot();
  }
  static constexpr int64_t BESIDE_ROWS = TILE / 2;
};

// Bytes of a k-group of a row as high and low ones, the latter with a sign; less one bit where 127 in both is too
// little: whether so, and the sum of what is then to be multiplied by twice the step.
static inline bool sign_low(const uint8_t* from, uint8_t* high, uint8_t* low, int64_t* sum) {
  const Ints h[2] = {_mm512_loadu_si512(from), _mm512_loadu_si512(from + 64)};
  const Ints l[2] = {_mm512_loadu_si512(from + GROUP), _mm512_loadu_si512(from + GROUP + 64)};
  const Ints most = _mm512_set1_epi8(127), one = _mm512_set1_epi8(1);
  __mmask64 over = 0;
  for (int i = 0; i < 2; ++i) {
    const __mmask64 carry = _mm512_movepi8_mask(l[i]);
    over |= carry & _mm512_cmpeq_epi8_mask(h[i], most);
    _mm512_storeu_si512(high + i * 64, _mm512_mask_add_epi8(h[i], carry, h[i], one));
    _mm512_storeu_si512(low + i * 64, l[i]);
  }
  if (!over) return false;
  *sum = 0;
  for (int i = 0; i < GROUP; ++i) {
    const int32_t number = ((int8_t)from[i] * 256 + from[GROUP + i] + 1) >> 1;
    high[i] = (uint8_t)((number + 128) >> 8), low[i] = (uint8_t)number;
    *sum += number;
  }
  return true;
}

// Takes k-group g of a row of x from where it was rounded to.
static void to_tiles(const RoundedRows& r, int64_t row, int64_t g, TiledRows& t) {
  const int64_t tile = row / TILE, line = row % TILE, at = (tile * t.k_groups + g) * TILE + line;
  const uint8_t* from = (const uint8_t*)r.bytes.data() + (row * t.k_groups + g) * GROUP * (r.planes ? 2 : 1);
  uint8_t* to = t.at(tile, g) + line * 64;
  t.scale[at] = r.scale[row * r.padded + g];
  t.sum[at] = r.sum[row * r.padded + g];
  uint8_t high[GROUP], low[GROUP];
  const uint8_t *upper = from, *lower = from + GROUP;
  if (t.halves == Halves::BESIDE) {
    int64_t sum;
    if (sign_low(from, high, low, &sum)) t.scale[at] *= 2, t.sum[at] = t.scale[at] * (float)sum;
    upper = high, lower = low;
  }
  for (int64_t half = 0; half < 2; ++half) {
    std::memcpy(to + half * TILE_BYTES, upper + half * 64, 64);
    if (t.halves == Halves::BESIDE) std::memcpy(to + half * TILE_BYTES + TILE_BYTES / 2, lower + half * 64, 64);
    if (t.halves == Halves::APART) std::memcpy(to + (2 + half) * TILE_BYTES, lower + half * 64, 64);
  }
}

// Codes and products of a few steps.
struct alignas(64) TileRing {
  static constexpr int64_t UNITS = 4;
  uint8_t codes[UNITS][2 * TILE_BYTES];
  int32_t products[UNITS][2 * TILE * TILE];
};

template <int BITS>
static inline void unpack_unit(const uint8_t* p, uint8_t* to) {
  for_codes<BITS>(p, [&](int u, Ints codes) __attribute__((always_inline)) { _mm512_store_si512(to + u * 64, codes); });
}

// Sums of a k-group: tiles of x times those of codes.
template <Halves HALVES>
static inline void multiply_tiles(const uint8_t* codes, const uint8_t* x, int32_t* products) {
  _tile_zero(0);
  _tile_loadd(4, x, 64);
  _tile_loadd(6, codes, 64);
  _tile_dpbsud(0, 4, 6);
  _tile_loadd(5, x + TILE_BYTES, 64);
  _tile_loadd(7, codes + TILE_BYTES, 64);
  _tile_dpbsud(0, 5, 7);
  if constexpr (HALVES == Halves::APART) {
    _tile_zero(1);
    _tile_loadd(4, x + 2 * TILE_BYTES, 64);
    _tile_dpbuud(1, 4, 6);
    _tile_loadd(5, x + 3 * TILE_BYTES, 64);
    _tile_dpbuud(1, 5, 7);
    _tile_stored(1, products + TILE * TILE, 64);
  }
  _tile_stored(0, products, 64);
}

// A panel times a tile of x's rows, y as sums [16 (8 of BESIDE), 16 rows of w].
template <int BITS, Halves HALVES>
static void tile_panel(const Weight& w, const Panel& panel, TiledRows& x, int64_t tile, TileRing& ring, float* y) {
  // 8 rows, the same (panel_rows.h): 50.5 and 34.2 so, 50.4 and 35.2 2048 ahead, 56.7 and 39.0 without; two panels to a
  // load of x's tiles 53.5 and 34.5; each product a step behind its loads 52.7 and 35.2.
  constexpr int64_t UNIT = PANEL * 16 * BITS, FAR = 4096, ROWS = HALVES == Halves::BESIDE ? TILE / 2 : TILE;
  const PanelGrid grid(w, panel);
  Floats acc[ROWS];
  for (Floats& a : acc) a = floats(0);
  auto add_products = [&](int64_t g) __attribute__((always_inline)) {
    const int64_t at = (tile * x.k_groups + g) * TILE;
    const float *step = x.scale.data() + at, *sum = x.sum.data() + at;
    const int32_t* d = ring.products[g % TileRing::UNITS];
    const Floats scale = grid.scales(g), zero = grid.zeros(g);
#pragma GCC unroll 16
    for (int64_t m = 0; m < ROWS; ++m) {
      Ints v = _mm512_load_si512(d + m * TILE);
      if (HALVES != Halves::HIGH)
        v = _mm512_add_epi32(_mm512_slli_epi32(v, 8), _mm512_load_si512(d + m * TILE + (HALVES == Halves::APART ? TILE : TILE / 2) * TILE));
      acc[m] = fma(_mm512_fnmadd_ps(zero, floats(sum[m]), mul(to_floats(v), floats(step[m]))), scale, acc[m]);
    }
  };
  auto unpack = [&](int64_t g) __attribute__((always_inline)) {
    if (g >= w.k_groups) return;
    ask_ahead<BITS>(panel.codes + g * UNIT, FAR);
    if constexpr (BITS < 8) unpack_unit<BITS>(panel.codes + g * UNIT, ring.codes[g % TileRing::UNITS]);
  };
  for (int64_t g = 0; g < AHEAD; ++g) unpack(g);
  for (int64_t g = 0; g < w.k_groups; ++g) {
    asm volatile("" : : : "memory");  // tiles are read from what was written, and the other way about
    multiply_tiles<HALVES>(BITS == 8 ? panel.codes + g * UNIT : ring.codes[g % TileRing::UNITS], x.at(tile, g), ring.products[g % TileRing::UNITS]);
    asm volatile("" : : : "memory");
    if (g >= AHEAD) add_products(g - AHEAD);
    unpack(g + AHEAD);
  }
  asm volatile("" : : : "memory");
  for (int64_t g = std::max<int64_t>(0, w.k_groups - AHEAD); g < w.k_groups; ++g) add_products(g);
#pragma GCC unroll 16
  for (int64_t m = 0; m < ROWS; ++m) store(y + m * PANEL, acc[m]);
}

// y of 16 rows of w from sums with a column for each of M rows of x (dense_tiles.h).
static void put_panel(const float* sums, int64_t M, int64_t n0, int64_t N, const Output& out) {
  const __m512i rows = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                          _mm512_set1_epi32(TILE));
  for (int64_t m = 0; m < M; ++m)
    put_sixteen(out, m, N, n0, std::min(TILE, N - n0), _mm512_i32gather_ps(rows, sums + m / TILE * TILE * TILE + m % TILE, 4));
}

// Whether tiles are what multiplies these rows.
static bool takes_tiles(const Weight& w, int64_t rows) { return rows >= 3 && w.panels && tiles_allowed(); }

template <Halves HALVES>
static auto tile_panel_of(int64_t bits) {
  return bits == 3 ? tile_panel<3, HALVES> : bits == 4 ? tile_panel<4, HALVES> : tile_panel<8, HALVES>;
}

// y = x w^T + bias of rows that were rounded; called by every thread of a team.
static void multiply_by_tiles(const Weight& w, TiledRows& x, int64_t parts, const Output& out, int64_t M) {
  auto run = x.halves == Halves::HIGH ? tile_panel_of<Halves::HIGH>(w.bits)
           : x.halves == Halves::APART ? tile_panel_of<Halves::APART>(w.bits) : tile_panel_of<Halves::BESIDE>(w.bits);
  TileRing ring;
  static thread_local Tail tail;
  const TileShape shape(TILE);
  asm volatile("" : : "m"(shape));  // g++ 12 takes the shape for unread
  _tile_loadconfig(&shape);
  const int64_t panels = (w.N + PANEL - 1) / PANEL, together = panels_together(w, panels, omp_get_num_threads());
#pragma omp for schedule(dynamic)
  for (int64_t n = 0; n < panels; n += together)
    for (int64_t p = n; p < n + together && p < panels; ++p) {
      const Panel panel = panel_of(w, p, tail);
      for (int64_t tile = 0; tile < x.tiles; ++tile) {
        alignas(64) float y[TILE][PANEL];
        run(w, panel, x, tile, ring, y[0]);
        for (int64_t r = 0; r < TILE && tile * TILE + r < M * parts; r += parts)
          put_sixteen(out, (tile * TILE + r) / parts, w.N, panel.first, panel.count, parts == 2 ? add(load(y[r]), load(y[r + 1])) : load(y[r]));
      }
    }
  _tile_release();
}
#endif
