// Several rows of x by AMX: codes and x meet as bytes in tiles, 16 rows of w x 16 rows of x x 64 of k.
//
// The numbers are those of few_rows.h: x rounded to 16 bits a k-group is 256 hi + lo, bytes with and without
// a sign, and a k-group's sums are whole numbers below 2^31. Up to 8 rows of x (16 bits) have both in one tile, lo
// with a sign, too. Codes are unpacked for 16 rows at a time, x is written as tiles once a product.
// Tiles are loaded from memory only once stores have left the core for it: what a k-group needs is unpacked two
// k-groups ahead and its sums are taken two behind, or every step would wait for all of the one before it.
// Cost of a k-group of 16 rows of w, 8 rows of x: 4 loads of tiles, 2 products of 16 cycles, a store, and 4 vector
// operations for each row of w; 16 rows of x twice that and 7 operations. Two panels to a load of x's tiles are slower
// (8 rows of x, in cache: 6.9 ns a row of w and k-group where one takes 6.4): what both work in leaves L1.
#pragma once
#include "few_rows.h"

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

// How x lies in tiles: its high bytes alone, high and low ones in a tile each, or side by side.
enum class Halves { HIGH, APART, BESIDE };

struct TiledRows {
  int64_t tiles = 0, k_groups, columns;  // of 16 rows; of a tile: 8 if there are no more
  Halves halves;
  std::vector<uint8_t> held;
  std::vector<float> scale, sum;     // [tiles, k_groups, 16]
  void reset(int64_t rows, const Weight& w, const RoundedRows& of) {
    // float32's second row of bytes is what the first left: there a shift by one (`to_tiles`) would lose a bit.
    const bool beside = rows <= BESIDE_ROWS && of.parts == 1;
    halves = of.x_bits == 8 ? Halves::HIGH : beside ? Halves::BESIDE : Halves::APART;
    tiles = (rows + TILE - 1) / TILE, k_groups = w.k_groups;
    columns = rows > BESIDE_ROWS || halves == Halves::BESIDE ? 16 : 8;
    held.resize(tiles * k_groups * slot() + 64);
    if (rows % TILE) std::memset(held.data(), 0, held.size());
    scale.assign(tiles * k_groups * TILE, 0);
    sum.assign(tiles * k_groups * TILE, 0);
  }
  int64_t bytes() const { return 64 * columns; }
  int64_t slot() const { return (halves == Halves::APART ? 4 : 2) * bytes(); }
  // The tiles of a k-group: of its halves, each high, then low bytes.
  uint8_t* at(int64_t tile, int64_t g) {
    return held.data() + (64 - (uintptr_t)held.data() % 64) % 64 + (tile * k_groups + g) * slot();
  }
  static constexpr int64_t BESIDE_ROWS = TILE / 2;
};

// The order in which codes are unpacked, of 16-bit numbers q; low ones with a sign, or as they are.
static void split_bytes(const int16_t* q, int64_t bits, bool has_sign, int64_t shift, uint32_t* high, uint32_t* low) {
  uint16_t highs[64], lows[64];
  for (int half = 0; half < 2; ++half) {
    const int16_t* a = q + half * (bits == 8 ? 64 : 32);
    const int16_t* b = a + (bits == 8 ? 32 : 64);
    for (int i = 0; i < 32; ++i) {
      const int32_t u = (a[i] + shift) >> shift, v = (b[i] + shift) >> shift, carry = has_sign ? 128 : 0;
      highs[32 * half + i] = (uint16_t)(((u + carry) >> 8 & 0xff) | ((v + carry) & 0xff00));
      lows[32 * half + i] = (uint16_t)((u & 0xff) | v << 8);
    }
  }
  std::memcpy(high, highs, sizeof highs);
  std::memcpy(low, lows, sizeof lows);
}

// Takes k-group g of a row of x from where few_rows.h has rounded it.
static void to_tiles(const RoundedRows& r, const Weight& w, int64_t row, int64_t g, TiledRows& t) {
  uint32_t high[32], low[32] = {};
  const int64_t from = (row * w.k_groups + g) * GROUP;
  const int64_t tile = row / TILE, column = row % TILE, at = (tile * w.k_groups + g) * TILE + column;
  const bool beside = t.halves == Halves::BESIDE;
  t.scale[at] = r.scale[row * r.padded + g];
  t.sum[at] = r.sum[row * r.padded + g];
  if (!r.bytes.empty()) {
    std::memcpy(high, r.bytes.data() + from, GROUP);
  } else {
    const int16_t* q = r.q.data() + from;
    int64_t shift = 0;
    if (beside && *std::max_element(q, q + GROUP) > 0x7f7f) {  // 127 in both bytes: then a bit less
      int64_t sum = 0;
      for (int64_t i = 0; i < GROUP; ++i) sum += (q[i] + 1) >> 1;
      shift = 1, t.scale[at] *= 2, t.sum[at] = t.scale[at] * (float)sum;
    }
    split_bytes(q, w.bits, beside, shift, high, low);
    if (beside) t.scale[at + TILE / 2] = t.scale[at], t.scale[at] *= 256;
  }
  uint32_t* to = (uint32_t*)t.at(tile, g) + column;
  const int64_t half = t.slot() / 8, other = beside ? TILE / 2 : half / 2;
  for (int64_t i = 0; i < 32; ++i) {
    const int64_t place = i / 16 * half + i % 16 * t.columns;
    to[place] = high[i];
    if (t.halves != Halves::HIGH) to[place + other] = low[i];
  }
}

// Panels of 16 rows of w that are multiplied together: where x has several tiles, as many of its k-groups as stay in
// a core's L1 meet all of them before the next ones do. ns a row and k-group, one core of a Xeon, so / all k-groups
// of a panel first: 32 rows 14.0 / 15.5 (4 bits), 20.6 / 21.9 (8 bits); one tile gains nothing from it (7.0 / 6.6).
constexpr int64_t PANELS = 8, X_BYTES = 16 << 10;

// A k-group of a panel, and which comes next.
struct TileUnit {
  int64_t panels, k_groups, together;  // of the work; k-groups that stay
  int64_t panel = 0, g = 0, first = 0;
  TileUnit(int64_t panels, const TiledRows& x)
      : panels(panels), k_groups(x.k_groups), together(x.tiles == 1 ? x.k_groups : std::max<int64_t>(1, X_BYTES / (x.slot() * x.tiles))) {}
  void next() {
    const int64_t end = first + together < k_groups ? first + together : k_groups;
    if (++g < end) return;
    if (++panel == panels) panel = 0, first = end;
    g = first;
  }
};

// What a thread works in: grids and sums of its panels, codes and products of a few steps.
struct TileRoom {
  static constexpr int64_t CODES = 2 * TILE_BYTES, PRODUCTS = 2 * TILE_BYTES, RING = 4;
  int64_t pitch, tiles;
  std::vector<float> grids, summed;
  std::vector<uint8_t> held;
  TileRoom(const Weight& w, int64_t tiles)
      : pitch(w.grid_size()), tiles(tiles), grids(PANELS * 2 * TILE * pitch), summed(PANELS * tiles * TILE * TILE),
        held(RING * (CODES + PRODUCTS) + 64) {}
  float* scales(int64_t panel) { return grids.data() + panel * 2 * TILE * pitch; }
  float* zeros(int64_t panel) { return scales(panel) + TILE * pitch; }
  float* sums(int64_t panel) { return summed.data() + panel * tiles * TILE * TILE; }
  uint8_t* codes(int64_t unit) { return held.data() + (64 - (uintptr_t)held.data() % 64) % 64 + unit % RING * CODES; }
  int32_t* products(int64_t step) { return (int32_t*)(codes(0) + RING * CODES + step % RING * PRODUCTS); }
};

// Codes of a k-group of 16 rows as bytes, [2 halves, 16, 64]; what comes two panels later is asked for.
template <int BITS>
static inline void unpack_rows(const Weight& w, int64_t n0, int64_t g, uint8_t* to) {
  const int64_t apart = w.k_groups * 16 * BITS;
  const uint8_t* p = w.row(n0) + g * 16 * BITS;
  for (int64_t i = 0; i < TILE; ++i, p += n0 + i < w.N ? apart : 0) {
    Ints c[2];
    _mm_prefetch((const char*)p + 2 * TILE * apart, _MM_HINT_T1);
    if (BITS == 8) _mm_prefetch((const char*)p + 2 * TILE * apart + 64, _MM_HINT_T1);
    unpack_bytes<BITS>(p, c);
    _mm512_store_si512(to + i * 64, c[0]);
    _mm512_store_si512(to + (TILE + i) * 64, c[1]);
  }
}

template <Halves HALVES>
static inline void multiply_tiles(const uint8_t* codes, const uint8_t* x, int64_t columns, int32_t* products) {
  const int64_t bytes = 64 * columns;
  _tile_zero(0);
  _tile_loadd(4, codes, 64);
  _tile_loadd(6, x, 4 * columns);
  _tile_dpbusd(0, 4, 6);
  _tile_loadd(5, codes + TILE_BYTES, 64);
  if constexpr (HALVES == Halves::APART) {
    _tile_zero(1);
    _tile_loadd(7, x + bytes, 4 * columns);
    _tile_dpbuud(1, 4, 7);
    _tile_loadd(6, x + 2 * bytes, 4 * columns);
    _tile_dpbusd(0, 5, 6);
    _tile_loadd(7, x + 3 * bytes, 4 * columns);
    _tile_dpbuud(1, 5, 7);
    _tile_stored(1, products + 256, 64);
  } else {
    _tile_loadd(7, x + bytes, 4 * columns);
    _tile_dpbusd(0, 5, 7);
  }
  _tile_stored(0, products, 64);
}

// sums [16, 16] += scales (x's scale products - zeros x's sum) of one k-group.
template <Halves HALVES>
static inline void add_products(const int32_t* products, const float* s, const float* z, int64_t pitch,
                                const float* scale, const float* sum, float* sums) {
  const Floats step = load(scale), total = load(sum);
  for (int64_t i = 0; i < TILE; ++i, s += pitch, z += pitch, sums += TILE) {
    Ints d = _mm512_load_si512(products + i * TILE);
    if (HALVES == Halves::APART) d = _mm512_add_epi32(_mm512_slli_epi32(d, 8), _mm512_load_si512(products + i * TILE + 256));
    Floats y = _mm512_fnmadd_ps(floats(*z), total, mul(to_floats(d), step));
    store(sums, fma(floats(*s), y, load(sums)));
  }
}

// y of 16 rows of w from their sums, `parts` columns to each of its rows.
static void put_panel(const float* sums, int64_t M, int64_t parts, int64_t n0, int64_t N, const Output& out) {
  const __m512i rows = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                          _mm512_set1_epi32(TILE));
  for (int64_t m = 0; m < M; ++m) {
    const int64_t column = m * parts, count = N - n0 < TILE ? N - n0 : TILE;
    const float* from = sums + column / TILE * TILE * TILE + column % TILE;
    Floats y = _mm512_i32gather_ps(rows, from, 4);
    if (parts == 2) y = add(y, _mm512_i32gather_ps(rows, from + 1, 4));
    alignas(64) float flat[TILE], bias[TILE] = {};
    if (out.bias) copy_floats(bias, out.bias, n0, count, out.number);
    y = add(y, load(bias));
    if (count == TILE) {
      put_eight(out.y, m * N + n0, out.number, _mm512_castps512_ps256(y));
      put_eight(out.y, m * N + n0 + 8, out.number, _mm512_extractf32x8_ps(y, 1));
      continue;
    }
    store(flat, y);
    for (int64_t k = 0; k < count; ++k) put(out.y, m * N + n0 + k, out.number, flat[k]);
  }
}

// Panels first .. last of 16 rows of w (at most `PANELS`) times all rows of x.
template <int BITS, Halves HALVES>
static void tile_panels(const Weight& w, TiledRows& x, const Output& out, int64_t M, int64_t parts, int64_t first,
                        int64_t last, TileRoom& room) {
  const int64_t panels = last - first, units = panels * w.k_groups, steps = units * x.tiles, pitch = w.grid_size();
  for (int64_t panel = 0; panel < panels; ++panel)
    w.grids((first + panel) * TILE, (first + panel + 1) * TILE, room.scales(panel), room.zeros(panel));
  std::memset(room.sums(0), 0, room.summed.size() * sizeof(float));
  TileUnit ahead(panels, x), now = ahead, behind = ahead;
  int64_t unpacked = 0, tile_behind = 0;
  auto unpack = [&] {
    if (unpacked == units) return;
    unpack_rows<BITS>(w, (first + ahead.panel) * TILE, ahead.g, room.codes(unpacked++));
    ahead.next();
  };
  auto add_step = [&](int64_t step) {
    const int64_t at = (tile_behind * w.k_groups + behind.g) * TILE;
    const float *s = room.scales(behind.panel) + behind.g, *z = room.zeros(behind.panel) + behind.g;
    add_products<HALVES>(room.products(step), s, z, pitch, x.scale.data() + at, x.sum.data() + at,
                         room.sums(behind.panel) + tile_behind * TILE * TILE);
    if (++tile_behind == x.tiles) tile_behind = 0, behind.next();
  };
  for (int64_t unit = 0; unit < AHEAD; ++unit) unpack();
  for (int64_t unit = 0, step = 0; unit < units; ++unit, now.next())
    for (int64_t tile = 0; tile < x.tiles; ++tile, ++step) {
      multiply_tiles<HALVES>(room.codes(unit), x.at(tile, now.g), x.columns, room.products(step));
      if (step >= AHEAD) add_step(step - AHEAD);
      if (tile == 0) unpack();
    }
  for (int64_t step = std::max<int64_t>(0, steps - AHEAD); step < steps; ++step) add_step(step);
  for (int64_t panel = 0; panel < panels; ++panel) {
    float* sums = room.sums(panel);
    if (HALVES == Halves::BESIDE)
      for (int64_t i = 0; i < TILE; ++i)
        _mm256_storeu_ps(sums + i * TILE, _mm256_add_ps(_mm256_loadu_ps(sums + i * TILE), _mm256_loadu_ps(sums + i * TILE + 8)));
    put_panel(sums, M, parts, (first + panel) * TILE, w.N, out);
  }
}

// Whether tiles are what multiplies these rows.
static bool takes_tiles(const Weight& w, int64_t rows) { return rows >= 3 && !w.fine() && tiles_allowed(); }

template <Halves HALVES>
static auto tile_panels_of(int64_t bits) {
  return bits == 3 ? tile_panels<3, HALVES> : bits == 4 ? tile_panels<4, HALVES> : tile_panels<8, HALVES>;
}

// y = x w^T + bias of rows that were rounded; called by every thread of a team.
static void multiply_by_tiles(const Weight& w, const RoundedRows& r, TiledRows& x, const Output& out, int64_t M) {
  const int64_t rows = M * r.parts;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < rows * w.k_groups; ++i) to_tiles(r, w, i % rows, i / rows, x);  // a tile after the other
  auto run = x.halves == Halves::HIGH ? tile_panels_of<Halves::HIGH>(w.bits)
           : x.halves == Halves::APART ? tile_panels_of<Halves::APART>(w.bits) : tile_panels_of<Halves::BESIDE>(w.bits);
  TileRoom room(w, x.tiles);
  const TileShape shape(x.columns);
  asm volatile("" : : "m"(shape));  // g++ 12 takes the shape for unread
  _tile_loadconfig(&shape);
  const int64_t panels = (w.N + TILE - 1) / TILE;
#pragma omp for schedule(dynamic)
  for (int64_t n = 0; n < panels; n += PANELS)
    run(w, x, out, M, r.parts, n, n + PANELS < panels ? n + PANELS : panels, room);
  _tile_release();
}
#endif
