// Several rows of x by AMX: codes and x meet as bytes in tiles, 16 rows of w x 16 rows of x x 64 of k.
//
// The numbers are those of few_rows.h: x rounded to 16 bits a k-group is 256 hi + lo, bytes with and without
// a sign, and a k-group's sums are whole numbers below 2^31. Codes are a tile's rows as they lie (8 bits) or
// unpacked for 32 rows at a time, which share the tiles of x; x is written as tiles once a product.
// Cost of a k-group of 16 rows of w: 8 loads of tiles, 4 products of 16 cycles, 2 stores, and 6 vector
// operations for each row of w, whether x has one row or 16.
#pragma once
#include "few_rows.h"

#if defined(__AMX_INT8__) && WIDE
#include <sys/syscall.h>
#include <unistd.h>

constexpr int64_t TILE = 16, PANEL = 32, TILE_BYTES = 1024;

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

struct TiledRows {
  int64_t tiles = 0, k_groups, columns;  // of 16 rows; of x's rows in a tile: 8 if there are no more
  bool low;                          // whether there are low bytes
  std::vector<uint8_t> held;
  std::vector<float> scale, sum;     // [tiles, k_groups, 16]
  void reset(int64_t rows, const Weight& w, int64_t x_bits) {
    tiles = (rows + TILE - 1) / TILE, k_groups = w.k_groups, columns = rows > 8 ? 16 : 8, low = x_bits == 16;
    held.resize(tiles * k_groups * 4 * TILE_BYTES + 64);
    scale.assign(tiles * k_groups * TILE, 0);
    sum.assign(tiles * k_groups * TILE, 0);
  }
  // The tiles of a k-group: of its halves, each high, then low bytes.
  uint8_t* at(int64_t tile, int64_t g) {
    uint8_t* p = held.data() + (64 - (uintptr_t)held.data() % 64) % 64;
    return p + (tile * k_groups + g) * 4 * TILE_BYTES;
  }
};

// Takes k-group g of a row of x from where few_rows.h has rounded it.
static void to_tiles(const RoundedRows& r, const Weight& w, int64_t row, int64_t g, TiledRows& t) {
  uint32_t high[32], low[32] = {};
  const int64_t from = (row * w.k_groups + g) * GROUP;
  if (!r.bytes.empty()) {
    std::memcpy(high, r.bytes.data() + from, GROUP);
  } else {
    uint16_t highs[64], lows[64];
    const uint16_t* q = (const uint16_t*)r.q.data() + from;
    for (int half = 0; half < 2; ++half) {
      const uint16_t* a = q + half * (w.bits == 8 ? 64 : 32);
      const uint16_t* b = a + (w.bits == 8 ? 32 : 64);
      for (int i = 0; i < 32; ++i) {
        highs[32 * half + i] = (uint16_t)(a[i] >> 8 | (b[i] & 0xff00));
        lows[32 * half + i] = (uint16_t)((a[i] & 0xff) | b[i] << 8);
      }
    }
    std::memcpy(high, highs, sizeof high);
    std::memcpy(low, lows, sizeof low);
  }
  const int64_t tile = row / TILE, column = row % TILE, at = (tile * w.k_groups + g) * TILE + column;
  t.scale[at] = r.scale[row * r.padded + g];
  t.sum[at] = r.sum[row * r.padded + g];
  uint32_t* to = (uint32_t*)t.at(tile, g) + column;
  for (int64_t i = 0; i < 32; ++i) {
    to[i / 16 * (TILE_BYTES / 2) + i % 16 * t.columns] = high[i];
    to[i / 16 * (TILE_BYTES / 2) + TILE_BYTES / 4 + i % 16 * t.columns] = low[i];
  }
}

// What a thread works in.
struct TileRoom {
  static constexpr int64_t CODES = 2 * PANEL * 64, PRODUCTS = 4 * TILE_BYTES;
  std::vector<float> grids, sums;
  std::vector<uint8_t> held;
  TileRoom(const Weight& w, int64_t tiles)
      : grids(2 * PANEL * w.grid_size()), sums(tiles * PANEL * TILE), held(2 * (CODES + PRODUCTS) + 64) {}
  // Of every second k-group; of every second product of tiles.
  uint8_t* codes(int64_t g) { return held.data() + (64 - (uintptr_t)held.data() % 64) % 64 + g % 2 * CODES; }
  int32_t* products(int64_t step) { return (int32_t*)(codes(0) + 2 * CODES + step % 2 * PRODUCTS); }
};

// Codes of a k-group of `PANEL` rows as bytes, [2 halves, PANEL, 64]; what comes later is asked for.
template <int BITS>
static void unpack_panel(const Weight& w, int64_t n0, int64_t g, uint8_t* to) {
  // The next panel, of which each step asks for a piece in the order of memory: rows of this one are apart.
  const char* next = (const char*)w.row(n0 + PANEL) + g * PANEL * 16 * BITS;
  for (int64_t i = 0; i < PANEL; ++i) {
    const int64_t n = n0 + i < w.N ? n0 + i : w.N - 1;
    const uint8_t* p = w.row(n) + g * 16 * BITS;
    Ints c[2];
    if (BITS > 3 || i % 4) _mm_prefetch(next, _MM_HINT_T1), next += 64;
    if (BITS == 8) _mm_prefetch(next, _MM_HINT_T1), next += 64;
    unpack_bytes<BITS>(p, c);
    _mm512_store_si512(to + i * 64, c[0]);
    _mm512_store_si512(to + (PANEL + i) * 64, c[1]);
  }
}

template <bool LOW>
static inline void multiply_tiles(const uint8_t* codes, const uint8_t* x, int64_t columns, int32_t* products) {
  _tile_zero(0);
  _tile_zero(2);
  if (LOW) { _tile_zero(1); _tile_zero(3); }
  for (int half = 0; half < 2; ++half, codes += PANEL * 64, x += 2 * TILE_BYTES) {
    _tile_loadd(4, codes, 64);
    _tile_loadd(6, x, 4 * columns);
    _tile_dpbusd(0, 4, 6);
    _tile_loadd(5, codes + TILE_BYTES, 64);
    _tile_dpbusd(2, 5, 6);
    if (LOW) {
      _tile_loadd(7, x + TILE_BYTES, 4 * columns);
      _tile_dpbuud(1, 4, 7);
      _tile_dpbuud(3, 5, 7);
    }
  }
  _tile_stored(0, products, 64);
  _tile_stored(2, products + 512, 64);
  if (LOW) { _tile_stored(1, products + 256, 64); _tile_stored(3, products + 768, 64); }
}

// sums [PANEL, 16] += scales (x's scale products - zeros x's sum) of one k-group.
template <bool LOW>
static inline void add_products(const int32_t* products, const float* s, const float* z, int64_t pitch,
                                const float* scale, const float* sum, float* sums) {
  const Floats step = load(scale), total = load(sum);
  for (int64_t tile = 0; tile < PANEL / TILE; ++tile, products += 512)
    for (int64_t i = 0; i < TILE; ++i, s += pitch, z += pitch, sums += TILE) {
      Ints d = _mm512_load_si512(products + i * TILE);
      if (LOW) d = _mm512_add_epi32(_mm512_slli_epi32(d, 8), _mm512_load_si512(products + i * TILE + 256));
      Floats y = _mm512_fnmadd_ps(floats(*z), total, mul(to_floats(d), step));
      store(sums, fma(floats(*s), y, load(sums)));
    }
}

// y of PANEL rows of w from their sums, `parts` columns to each of its rows.
static void put_panel(const float* sums, int64_t M, int64_t parts, int64_t n0, int64_t N, const Output& out) {
  const __m512i rows = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                          _mm512_set1_epi32(TILE));
  for (int64_t m = 0; m < M; ++m)
    for (int64_t i = 0; i < PANEL && n0 + i < N; i += TILE) {
      const int64_t column = m * parts, n = n0 + i, count = N - n < TILE ? N - n : TILE;
      const float* from = sums + (column / TILE * PANEL + i) * TILE + column % TILE;
      Floats y = _mm512_i32gather_ps(rows, from, 4);
      if (parts == 2) y = add(y, _mm512_i32gather_ps(rows, from + 1, 4));
      alignas(64) float flat[TILE], bias[TILE] = {};
      if (out.bias) copy_floats(bias, out.bias, n, count, out.number);
      y = add(y, load(bias));
      if (count == TILE) {
        put_eight(out.y, m * N + n, out.number, _mm512_castps512_ps256(y));
        put_eight(out.y, m * N + n + 8, out.number, _mm512_extractf32x8_ps(y, 1));
        continue;
      }
      store(flat, y);
      for (int64_t k = 0; k < count; ++k) put(out.y, m * N + n + k, out.number, flat[k]);
    }
}

// Rows n0 .. n0 + PANEL of w, as far as there are, times all rows of x.
template <int BITS, bool LOW>
static void tile_panel(const Weight& w, TiledRows& x, const Output& out, int64_t M, int64_t parts, int64_t n0,
                       TileRoom& room) {
  const int64_t pitch = w.grid_size();
  float *s = room.grids.data(), *z = s + PANEL * pitch;
  w.grids(n0, n0 + PANEL, s, z);
  std::memset(room.sums.data(), 0, room.sums.size() * sizeof(float));
  // While tiles multiply, vectors unpack what comes next and add up what came before.
  unpack_panel<BITS>(w, n0, 0, room.codes(0));
  const int64_t steps = w.k_groups * x.tiles;
  auto add_step = [&](int64_t step) {
    const int64_t g = step / x.tiles, tile = step % x.tiles, at = (tile * w.k_groups + g) * TILE;
    add_products<LOW>(room.products(step), s + g, z + g, pitch, x.scale.data() + at, x.sum.data() + at,
                      room.sums.data() + tile * PANEL * TILE);
  };
  for (int64_t g = 0, step = 0; g < w.k_groups; ++g)
    for (int64_t tile = 0; tile < x.tiles; ++tile, ++step) {
      multiply_tiles<LOW>(room.codes(g), x.at(tile, g), x.columns, room.products(step));
      if (tile == 0 && g + 1 < w.k_groups) unpack_panel<BITS>(w, n0, g + 1, room.codes(g + 1));
      if (step) add_step(step - 1);
    }
  add_step(steps - 1);
  put_panel(room.sums.data(), M, parts, n0, w.N, out);
}

// Whether tiles are what multiplies these rows.
static bool takes_tiles(const Weight& w, int64_t rows) { return rows >= 3 && !w.fine() && tiles_allowed(); }

// y = x w^T + bias of rows that were rounded; called by every thread of a team.
static void multiply_by_tiles(const Weight& w, const RoundedRows& r, TiledRows& x, const Output& out, int64_t M) {
  const int64_t rows = M * r.parts;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < rows * w.k_groups; ++i) to_tiles(r, w, i % rows, i / rows, x);  // a tile after the other
  auto run = x.low ? (w.bits == 3 ? tile_panel<3, true> : w.bits == 4 ? tile_panel<4, true> : tile_panel<8, true>)
                   : (w.bits == 3 ? tile_panel<3, false> : w.bits == 4 ? tile_panel<4, false> : tile_panel<8, false>);
  TileRoom room(w, x.tiles);
  const TileShape shape(x.columns);
  asm volatile("" : : "m"(shape));  // g++ 12 takes the shape for unread
  _tile_loadconfig(&shape);
#pragma omp for schedule(dynamic, 8)
  for (int64_t n = 0; n < (w.N + PANEL - 1) / PANEL; ++n) run(w, x, out, M, r.parts, n * PANEL, room);
  _tile_release();
}
#endif
