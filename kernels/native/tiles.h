// Several rows of x by AMX: x and codes meet as bytes in tiles, 16 rows of bytes of x x 16 rows of w x 64 of k.
//
// The values are those of gemv_int16.h: x rounded to 16 bits a k-group is 256 hi + lo, bytes with and without
// a sign, and a k-group's sums are integers below 2^31. Up to 8 rows of x (16 bits) have both in one tile, lo
// with a sign, too. Codes of 8 bits are tiles as they lie (panel.h), fewer bits are unpacked.
// Tiles are loaded from memory only once stores have left the core for it: what a k-group needs is unpacked two
// k-groups ahead and its sums are taken two behind, or every step would wait for all of the one before it.
// Cost of a k-group of 16 rows of w, 8 rows of x: 4 loads of tiles, 2 products of 16 cycles, a store, 6 vector
// operations for each row of x. Of 700 MB of codes, two cores of a Xeon, 8 rows of x (kept as panels, all k-groups of one
// first), ms at 4 and 8 bits: 50.5 and 34.2 asking 4 KB ahead, 50.4 and 35.2 2 KB ahead, 56.7 and 39.0 without; two panels
// to a load of x's tiles 53.5 and 34.5; each product a step behind its loads 52.7 and 35.2; plain reads take 27.2 and 26.1.
// More than 16 rows meet codes two tiles of x at a time, sums are taken behind each product: 32 rows, ns of CPU time a row of
// w and k-group, one core, 4 MB of codes, one tile at a time / two / so: 8 bits 14.6, 13.4, 12.6; 4 bits 12.1, 11.7, 12.1.
// Of the 12.6 rounding x takes 1.2; without products 7.3 are left, without taking sums 10.9. One k-group ahead and behind
// takes what two take.
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
    const int32_t dtype = ((int8_t)from[i] * 256 + from[GROUP + i] + 1) >> 1;
    high[i] = (uint8_t)((dtype + 128) >> 8), low[i] = (uint8_t)dtype;
    *sum += dtype;
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

template <int I>
using Step = std::integral_constant<int, I>;

// Codes and products of a few steps, the latter of two tiles of x at most.
struct alignas(64) TileRing {
  static constexpr int64_t UNITS = 4;
  uint8_t codes[UNITS][2 * TILE_BYTES];
  int32_t products[UNITS][4 * TILE * TILE];
};

template <int BITS>
static inline void unpack_unit(const uint8_t* p, uint8_t* to) {
  for_codes<BITS>(p, [&](int u, Ints codes) __attribute__((always_inline)) { _mm512_store_si512(to + u * 64, codes); });
}

// Sums of a k-group: tiles of x, the second `apart` bytes from the first, times those of codes. A sum's second product
// waits for its first, so the others' lie between; behind each one `turn` does a part of what vectors have to do.
template <Halves HALVES, int TILES, class Turn>
static inline __attribute__((always_inline)) void multiply_tiles(const uint8_t* codes, const uint8_t* x, int64_t apart, int32_t* products, Turn turn) {
  constexpr bool LOW = HALVES == Halves::APART;
  constexpr int64_t SUMS = TILE * TILE, PLANES = LOW ? 2 : 1;
  constexpr int SECOND = PLANES * TILES;
  const uint8_t *low = x + 2 * TILE_BYTES, *other = x + apart, *other_low = other + 2 * TILE_BYTES;
  _tile_zero(0);
  _tile_loadd(6, codes, 64);
  _tile_loadd(4, x, 64);
  _tile_dpbsud(0, 4, 6);
  turn(Step<0>());
  if constexpr (LOW) { _tile_zero(1); _tile_loadd(5, low, 64); _tile_dpbuud(1, 5, 6); turn(Step<1>()); }
  if constexpr (TILES == 2) { _tile_zero(2); _tile_loadd(4, other, 64); _tile_dpbsud(2, 4, 6); turn(Step<PLANES>()); }
  if constexpr (LOW && TILES == 2) { _tile_zero(3); _tile_loadd(5, other_low, 64); _tile_dpbuud(3, 5, 6); turn(Step<3>()); }
  _tile_loadd(7, codes + TILE_BYTES, 64);
  _tile_loadd(4, x + TILE_BYTES, 64);
  _tile_dpbsud(0, 4, 7);
  turn(Step<SECOND>());
  if constexpr (LOW) { _tile_loadd(5, low + TILE_BYTES, 64); _tile_dpbuud(1, 5, 7); turn(Step<SECOND + 1>()); }
  if constexpr (TILES == 2) { _tile_loadd(4, other + TILE_BYTES, 64); _tile_dpbsud(2, 4, 7); turn(Step<SECOND + PLANES>()); }
  if constexpr (LOW && TILES == 2) { _tile_loadd(5, other_low + TILE_BYTES, 64); _tile_dpbuud(3, 5, 7); turn(Step<7>()); }
  _tile_stored(0, products, 64);
  if constexpr (LOW) _tile_stored(1, products + SUMS, 64);
  if constexpr (TILES == 2) _tile_stored(2, products + PLANES * SUMS, 64);
  if constexpr (LOW && TILES == 2) _tile_stored(3, products + 3 * SUMS, 64);
}

// Panels that are multiplied together: as many of x's k-groups as stay in a core's L1 meet all of them before the next
// ones do.
constexpr int64_t PANELS = 8, X_BYTES = 16 << 10;

// A k-group of a panel, and which comes next.
struct TileUnit {
  int64_t panels, k_groups, together;  // of the work; k-groups that stay
  int64_t panel = 0, g = 0, first = 0;
  TileUnit(int64_t panels, int64_t tiles, const TiledRows& x)
      : panels(panels), k_groups(x.k_groups), together(std::max<int64_t>(1, X_BYTES / (tiles * tiles * x.slot()))) {}
  int64_t end() const { return std::min(first + together, k_groups); }
  void next() {
    if (++g < end()) return;
    if (++panel == panels) panel = 0, first = end();
    g = first;
  }
};

// Panels times one or two tiles of x's rows, y as sums [panels, 16 (8 of BESIDE) a tile, 16 rows of w].
template <int BITS, Halves HALVES, int TILES>
static void tile_panels(const Weight& w, const Panel* panels, int64_t count, TiledRows& x, int64_t tile, TileRing& ring, float* y) {
  constexpr int64_t UNIT = PANEL * 16 * BITS, ROWS = HALVES == Halves::BESIDE ? TILE / 2 : TILE;
  constexpr int64_t ASKED = BITS == 8 ? 2 : 4;  // units ahead of what is unpacked
  constexpr int64_t PLANES = HALVES == Halves::APART ? 2 : 1, SUMS = PLANES * TILE * TILE;  // of a tile of x
  constexpr int64_t LOW = HALVES == Halves::APART ? TILE * TILE : TILE / 2 * TILE;          // from the high bytes' sums
  constexpr int STEPS = 2 * PLANES * TILES, PART = TILES * ROWS / STEPS;  // products of a k-group; sums taken behind each
  constexpr bool KEPT = TILES == 1;                                       // sums in registers
  const int64_t units = count * w.k_groups, apart = x.k_groups * x.slot();
  TileUnit asked(count, TILES, x), ahead = asked, now = asked, behind = asked;
  Floats acc[ROWS];
  for (Floats& a : acc) a = floats(0);
  struct {
    const int32_t* d;
    const float *step, *sum;
    Floats scale, zero;
    float* sums;
  } of;  // the unit whose products are added
  auto begin = [&](int64_t unit) __attribute__((always_inline)) {
    const int64_t at = (tile * x.k_groups + behind.g) * TILE;
    const PanelGrid grid(w, panels[behind.panel]);
    of = {ring.products[unit % TileRing::UNITS], x.scale.data() + at, x.sum.data() + at, grid.scales(behind.g), grid.zeros(behind.g),
          y + behind.panel * TILES * ROWS * PANEL};
    if (!KEPT || behind.g != behind.first) return;
#pragma GCC unroll 16
    for (int64_t m = 0; m < ROWS; ++m) acc[m] = behind.first ? load(of.sums + m * PANEL) : floats(0);
  };
  auto add = [&](auto dtype) __attribute__((always_inline)) {
    constexpr int64_t first = decltype(dtype)::value * PART, t = first / TILE;
    const float *step = of.step + t * x.k_groups * TILE, *sum = of.sum + t * x.k_groups * TILE;
#pragma GCC unroll 16
    for (int64_t m = first % TILE; m < first % TILE + PART; ++m) {
      const int32_t* d = of.d + t * SUMS + m * TILE;
      Ints v = _mm512_load_si512(d);
      if (HALVES != Halves::HIGH) v = _mm512_add_epi32(_mm512_slli_epi32(v, 8), _mm512_load_si512(d + LOW));
      const Floats p = _mm512_fnmadd_ps(of.zero, floats(sum[m]), mul(to_floats(v), floats(step[m])));
      float* to = of.sums + (t * TILE + m) * PANEL;
      if constexpr (KEPT) acc[m] = fma(p, of.scale, acc[m]);
      else store(to, fma(p, of.scale, behind.g ? load(to) : floats(0)));
    }
  };
  auto end = [&]() __attribute__((always_inline)) {
    if (KEPT && behind.g + 1 == behind.end()) {
#pragma GCC unroll 16
      for (int64_t m = 0; m < ROWS; ++m) store(of.sums + m * PANEL, acc[m]);
    }
    behind.next();
  };
  auto ask = [&](int64_t unit) __attribute__((always_inline)) {
    if (tile) return;  // the first has left them in L2
    if (unit >= units) return ask_ahead<BITS>(panels[0].codes, (count * w.k_groups + unit - units) * UNIT);  // what follows
    ask_ahead<BITS>(panels[asked.panel].codes + asked.g * UNIT, 0);
    asked.next();
  };
  auto unpack = [&](int64_t unit) __attribute__((always_inline)) {
    if (unit >= units) return;
    if constexpr (BITS < 8) unpack_unit<BITS>(panels[ahead.panel].codes + ahead.g * UNIT, ring.codes[unit % TileRing::UNITS]);
    ahead.next();
  };
  for (int64_t unit = 0; unit < AHEAD + ASKED; ++unit) ask(unit);
  for (int64_t unit = 0; unit < AHEAD; ++unit) unpack(unit);
  auto multiply = [&](int64_t unit, auto turn) __attribute__((always_inline)) {
    asm volatile("" : : : "memory");  // tiles are read from what was written, and the other way about
    const uint8_t* codes = BITS == 8 ? panels[now.panel].codes + now.g * UNIT : ring.codes[unit % TileRing::UNITS];
    multiply_tiles<HALVES, TILES>(codes, x.at(tile, now.g), apart, ring.products[unit % TileRing::UNITS], turn);
    asm volatile("" : : : "memory");
    now.next();
    ask(unit + AHEAD + ASKED);
    unpack(unit + AHEAD);
  };
  for (int64_t unit = 0; unit < std::min(AHEAD, units); ++unit) multiply(unit, [](auto) {});
  for (int64_t unit = AHEAD; unit < units; ++unit) {
    begin(unit - AHEAD);
    multiply(unit, add);
    end();
  }
  for (int64_t unit = std::max<int64_t>(0, units - AHEAD); unit < units; ++unit) {
    begin(unit);
    [&]<int... I>(std::integer_sequence<int, I...>) { (add(Step<I>()), ...); }(std::make_integer_sequence<int, STEPS>());
    end();
  }
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

template <Halves HALVES, int TILES>
static auto tile_panels_of(int64_t bits) {
  return bits == 3 ? tile_panels<3, HALVES, TILES> : bits == 4 ? tile_panels<4, HALVES, TILES> : tile_panels<8, HALVES, TILES>;
}

// y = x w^T + bias of rows that were rounded; called by every thread of a team.
static void multiply_by_tiles(const Weight& w, TiledRows& x, int64_t parts, const Output& out, int64_t M) {
  auto one = x.halves == Halves::HIGH ? tile_panels_of<Halves::HIGH, 1>(w.bits)
           : x.halves == Halves::APART ? tile_panels_of<Halves::APART, 1>(w.bits) : tile_panels_of<Halves::BESIDE, 1>(w.bits);
  auto two = x.halves == Halves::HIGH ? tile_panels_of<Halves::HIGH, 2>(w.bits) : tile_panels_of<Halves::APART, 2>(w.bits);
  TileRing ring;
  static thread_local Tail tail;
  const TileShape shape(TILE);
  asm volatile("" : : "m"(shape));  // g++ 12 takes the shape for unread
  _tile_loadconfig(&shape);
  const int64_t panels = (w.N + PANEL - 1) / PANEL, together = panels_together(w, panels, omp_get_num_threads());
  const int64_t most = x.tiles == 1 ? PANELS : PANELS / 2;
#pragma omp for schedule(dynamic)
  for (int64_t n = 0; n < panels; n += together)
    for (int64_t p = n; p < n + together && p < panels; p += most) {
      const int64_t count = std::min(most, std::min(n + together, panels) - p);
      Panel of[PANELS];
      for (int64_t i = 0; i < count; ++i) of[i] = panel_of(w, p + i, tail);
      for (int64_t tile = 0, tiles; tile < x.tiles; tile += tiles) {
        tiles = std::min<int64_t>(2, x.tiles - tile);
        alignas(64) float y[PANELS * TILE][PANEL];
        (tiles == 2 ? two : one)(w, of, count, x, tile, ring, y[0]);
        const int64_t lines = x.halves == Halves::BESIDE ? TILE / 2 : tiles * TILE;
        for (int64_t r = 0; r < tiles * TILE && tile * TILE + r < M * parts; r += parts)
          for (int64_t i = 0; i < count; ++i) {
            const float* sums = y[0] + (i * lines + r) * PANEL;
            put_sixteen(out, (tile * TILE + r) / parts, w.N, of[i].first, of[i].count, parts == 2 ? add(load(sums), load(sums + PANEL)) : load(sums));
          }
      }
    }
  _tile_release();
}
#endif
