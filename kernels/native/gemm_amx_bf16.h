// Rows of bfloat16 x times a quantised weight, by AMX: the weight becomes bfloat16 tiles, a unit of 32 rows and some k
// at a time, in a core's L1, where it meets all rows of x. Up to 64 rows of x the unit is 256 of k and the next one is
// unpacked meanwhile, a few rows of it between two products of tiles, so that vectors and tiles work at the same time;
// with more rows it is 512, made at once: sums are taken up and put down half as often, and x passes L1 by, or w would
// leave it. Parts of x that meet eight units lie together, y is written 512 bytes of a row at a time: its rows are pages
// apart.
//
// A weight's values are dequantize.h's, sums are in float32.
//
// ns (of CPU time) a row of w and k-group, one core of a busy Xeon, 4 MB of codes, this / codes in tiles (tiles.h): 4
// bits, K 2048: 16 rows 7.9 / 6.4; 24 rows 10.1 / 11.4; 32 rows 10.3 / 11.3; 64 rows 16.8 / 21.8; K 8192: 32 rows 10.1 /
// 12.4. 8 bits, K 2048: 32 rows 15.8 / 10.7; 64 rows 23.8 / 21.0; 96 rows 29.3 / 27.7; 128 rows 35.7 / 38.9; K 8192: 64
// rows 29.7 / 30.4. 3 bits: 24 rows 12.1 / 10.1; 32 rows 13.2 / 11.5; 64 rows 19.5 / 22.8. `takes_blocks` says so.
// 128 and 512 rows at 4 bits: 28.7 and 117 (K 8192: 34.5 and 114), of which products of tiles take 16 and 80 (10.4 and
// 41.6 at the rate of tiles of zeros, a fifth more of values), unpacking 7 and 9, sums 4 and 18, y 2.5 and 15. Before, with
// units of 256 made meanwhile at any number of rows and y by halves of a line, 33 and 148. Unpacking alone takes 5.2 (4
// bits), 11.3 (8 bits), 7.5 (3 bits).
// Tried at 512 rows: units of 256 (132), parts of 256 with sixteen units (112 to 125), of 1024 (127 to 146), four units
// (129), asking for x's next part (126), for lines of y (as soon). All of K of a panel unpacked row by row, then multiplied
// (stores 2 KB apart leave L1: 15.6 at 32 rows, one core, where this took 10.3); tables of bytes instead of words (no
// sooner). The weight as the right operand, so that panels need no other order: each number is then computed, not looked up
// (a table is a row's, lanes are 16 rows): some 59 instructions a row and k-group at 4 bits by count, 27 as it is; not built.
#pragma once
#include "dense_tiles.h"
#include "dequantize.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && WIDE
constexpr int64_t PAIR = 2 * TILE, PAIR_BYTES = 2 * TILE_BYTES, PAIR_SUMS = 4 * TILE * TILE;
constexpr int64_t STEPS = GROUP / STEP;       // of a k-group
constexpr int64_t UNIT_STEPS = 4 * STEPS;     // of w's pair: all at once, or half while the next half is made
constexpr int64_t MANY_PAIRS = 3;             // of x, from which on units are made one by one
constexpr int64_t WIDE_PAIRS = 8;             // of w that meet the same part of x, which stays in L2:
constexpr int64_t PART_BYTES = 512 << 10;

// x [M, K] as pairs of tiles, one tile if there are no more rows: [parts, pairs, steps, 1 or 2, 16 pairs of k, 16
// rows], zeros past M and K.
struct PairedRows {
  int64_t pairs = 0, steps = 0, tiles = 0, unit = 0, part = 0;  // steps: of all of k; of a unit of w, of a part of k
  std::vector<uint8_t> held;
  void reset(int64_t M, int64_t groups) {
    pairs = (M + PAIR - 1) / PAIR, steps = groups * STEPS, tiles = M > TILE ? 2 : 1;
    unit = many() ? UNIT_STEPS : UNIT_STEPS / 2;
    part = pairs == 1 ? steps : std::min(steps, std::max<int64_t>(1, PART_BYTES / (pairs * bytes() * unit)) * unit);
    const int64_t size = pairs * steps * bytes() + 64;
    if ((int64_t)held.size() < size) held.resize(size);
  }
  bool many() const { return pairs >= MANY_PAIRS; }
  int64_t bytes() const { return tiles * TILE_BYTES; }
  uint8_t* at(int64_t pair, int64_t step) {
    const int64_t first = step / part * part, there = std::min(part, steps - first);
    return held.data() + (64 - (uintptr_t)held.data() % 64) % 64 + (first * pairs + pair * there + step - first) * bytes();
  }
};

static void to_pair(const uint16_t* x, int64_t M, int64_t K, int64_t pair, int64_t step, PairedRows& t) {
  const int64_t k = step * STEP, count = K - k;
  const __mmask32 there = count >= STEP ? ~0u : count > 0 ? (1u << count) - 1 : 0;
  for (int64_t tile = 0; tile < t.tiles; ++tile) {
    __m512i row[TILE], column[TILE];
    for (int64_t i = 0; i < TILE; ++i) {
      const int64_t m = pair * PAIR + tile * TILE + i;
      row[i] = m < M && there ? _mm512_maskz_loadu_epi16(there, x + m * K + k) : _mm512_setzero_si512();
    }
    transpose(row, column);
    for (int64_t i = 0; i < TILE; ++i) _mm512_store_si512(t.at(pair, step) + tile * TILE_BYTES + i * 64, column[i]);
  }
}

// The order of units: steps of a pair of w's tiles, all of a part of k, then the next pair's, then the next part.
struct Unit {
  int64_t pairs, steps, most, part;  // of the block; of all of k, of a unit, of a part
  int64_t pair = 0, step = 0, first = 0;
  Unit(int64_t pairs, const PairedRows& x) : pairs(pairs), steps(x.steps), most(x.unit), part(x.part) {}
  int64_t count() const { return std::min(most, std::min(steps, first + part) - step); }
  bool ended() const { return first >= steps; }
  void next() {
    step += count();
    if (step < std::min(steps, first + part)) return;
    if (++pair == pairs) pair = 0, first += part;
    step = first;
  }
};

// What a thread works in: two units of w as tiles [steps, 2, 16, 32], sums [pairs, pairs of x, 4, 16, 16], a pair's grids.
struct BlockRoom {
  int64_t x_pairs;
  std::vector<uint8_t> held;
  std::vector<float> grid;
  uint8_t rows[8 * GROUP];  // a k-group of a panel's rows by themselves
  void reset(const Weight& w, int64_t pairs, const PairedRows& x) {
    x_pairs = x.pairs;
    const int64_t size = UNIT_STEPS * PAIR_BYTES + pairs * x_pairs * PAIR_SUMS * 4 + 64;
    if ((int64_t)held.size() < size) held.resize(size);
    grid.resize(2 * PAIR * w.grid_size());
  }
  uint8_t* tiles(int64_t unit) {
    return held.data() + (64 - (uintptr_t)held.data() % 64) % 64 + unit % 2 * UNIT_STEPS / 2 * PAIR_BYTES;
  }
  float* sums(int64_t pair, int64_t x_pair) {
    return (float*)(tiles(0) + UNIT_STEPS * PAIR_BYTES) + (pair * x_pairs + x_pair) * PAIR_SUMS;
  }
};

// Makes a block's units of w, some rows of a k-group at a time; behind the last row that row's again.
template <int BITS>
struct Unpacker {
  static constexpr int64_t ROWS = BITS == 3 ? TILE : 8;  // all of a panel where its words are first made those of 4 bits
  const Weight& w;
  BlockRoom& room;
  Unit unit;
  const int64_t n0, pitch = w.grid_size(), parts = w.parts(), apart = w.k_groups * 16 * BITS;
  const bool many;
  int64_t made = 0, pair = -1, rows = 0, left = 0, g = 0, first_g = 0;  // rows: of the pair; left: of the unit's, each k-group by itself
  const uint8_t *p = nullptr, *next = nullptr;  // next: what is wanted a pair later, in the order of memory
  uint8_t* to = nullptr;
  bool whole = false;  // the pair's rows are in panels
  Unpacker(const Weight& w, BlockRoom& room, const Unit& first, int64_t n0, bool many) : w(w), room(room), unit(first), n0(n0), many(many) {}

  void begin() {
    if (unit.ended()) return;
    const int64_t from = n0 + unit.pair * PAIR;
    whole = from + PAIR <= w.in_panels();
    if (!whole && pair != unit.pair) w.grids(from, from + PAIR, room.grid.data(), room.grid.data() + PAIR * pitch);
    pair = unit.pair, rows = std::min(PAIR, w.N - from), g = first_g = unit.step / STEPS;
    left = unit.count() / STEPS * PAIR, to = room.tiles(many ? 0 : made++), p = w.row(from) + g * 16 * BITS;
    next = w.row(from + PAIR) + g * PAIR * 16 * BITS;
    unit.next();
  }
  inline void ask() {
    for (int64_t line = 0; line < 16 * BITS; line += 64) _mm_prefetch((const char*)next + line, _MM_HINT_T1);
    next += 16 * BITS;
  }
  // Rows of panels, their grids at s and z, `step` apart.
  inline void from_panels(int64_t first) {
    const int64_t n = n0 + pair * PAIR + first, half = first / TILE * TILE;
    const int64_t of = many ? unit.pair : pair + 1, at = many ? unit.step / STEPS + g - first_g : g;
    next = w.row(n0 + of * PAIR + half) + (at * TILE + first - half) * 16 * BITS;
    const float *s = room.grid.data() + first * pitch + g, *z = s + PAIR * pitch;
    int64_t step = pitch;
    alignas(64) float grid[2][PANEL];
    if (whole) {
      const int64_t place = w.grid_at(n / PANEL * PANEL, w.groups == w.k_groups ? g : 0);
      store(grid[0], sixteen_floats(w.scale, place, w.dtype));
      store(grid[1], w.zero ? sixteen_floats(w.zero, place, w.dtype) : floats((float)(1 << (BITS - 1))));
      s = grid[0] + first - half, z = grid[1] + first - half, step = 1;
    }
    rows_of_unit<BITS>(w, n, ROWS, g, [&](int64_t r, int half, Ints words) __attribute__((always_inline)) {
      if constexpr (BITS == 8) _mm512_storeu_si512(room.rows + r * GROUP + half * 64, words);
      else ask(), values_of_words<4>(words, s + r * step, z + r * step, false, BFLOAT16, PAIR_BYTES, to + r * 64);
    });
    for (int64_t r = 0; BITS == 8 && r < ROWS; ++r)
      ask(), values_of_group<8>(room.rows + r * GROUP, s + r * step, z + r * step, false, BFLOAT16, PAIR_BYTES, to + r * 64);
    to += ROWS * 64;
  }
  inline void some() {
    if (left == 0) return;
    const int64_t first = (PAIR - left % PAIR) % PAIR;
    if (w.panels) from_panels(first);
    const float *s = room.grid.data() + first * pitch + g * parts, *z = s + PAIR * pitch;
    for (int64_t row = first; !w.panels && row < first + ROWS; ++row, s += pitch, z += pitch, to += 64) {
      ask();
      values_of_group<BITS>(p, s, z, parts > 1, BFLOAT16, PAIR_BYTES, to);
      p += row + 1 < rows ? apart : 0;
    }
    left -= ROWS;
    if (left % PAIR == 0) to += (STEPS - 1) * PAIR_BYTES, p = w.row(n0 + pair * PAIR) + ++g * 16 * BITS;
  }
  void rest() {
    while (left > 0) some();
  }
};

static inline void load_sums(const float* sums) {
  _tile_loadd(0, sums, 64);
  _tile_loadd(1, sums + 256, 64);
  _tile_loadd(2, sums + 512, 64);
  _tile_loadd(3, sums + 768, 64);
}

// A unit of w's tiles times as many of x's, whose sums are in tiles 0-3; `turn` is called behind each step. Where w
// is to stay in L1, x passes it by.
template <int TILES, bool PASSING, class Turn>
static inline __attribute__((always_inline)) void add_unit(const uint8_t* w, const uint8_t* x, int64_t steps, Turn turn) {
  for (int64_t i = 0; i < steps; ++i, w += PAIR_BYTES, x += TILES * TILE_BYTES) {
    if constexpr (PASSING) _tile_stream_loadd(6, x, 64);
    else _tile_loadd(6, x, 64);
    _tile_loadd(4, w, 64);
    if constexpr (TILES == 2 && PASSING) _tile_stream_loadd(7, x + TILE_BYTES, 64);
    if constexpr (TILES == 2 && !PASSING) _tile_loadd(7, x + TILE_BYTES, 64);
    _tile_loadd(5, w + TILE_BYTES, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (TILES == 2) _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (TILES == 2) _tile_dpbf16ps(3, 5, 7);
    turn();
  }
}

// y of a pair's 32 rows of w and up to 16 of x from m on, from the sums of two tiles: 64 bytes of a row at once.
static void put_pair(const float* sums, int64_t m, int64_t M, int64_t n0, int64_t N, const Output& out) {
  __m512i row[TILE], column[2][TILE];
  const int64_t count = std::min(PAIR, N - n0);
  const __mmask32 there = (__mmask32)(((uint64_t)1 << count) - 1);
  alignas(64) float bias[PAIR] = {};
  if (out.bias) copy_floats(bias, out.bias, n0, count, out.dtype);
  for (int64_t t = 0; t < 2; ++t) {
    for (int64_t i = 0; i < TILE; ++i) row[i] = _mm512_load_si512(sums + (2 * t * TILE + i) * TILE);
    transpose(row, column[t]);
  }
  for (int64_t i = 0; i < TILE && m + i < M; ++i) {
    const Floats a = add(_mm512_castsi512_ps(column[0][i]), load(bias)), b = add(_mm512_castsi512_ps(column[1][i]), load(bias + TILE));
    _mm512_mask_storeu_epi16((uint16_t*)out.y + (m + i) * N + n0, there, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }
}

// Rows n0 on of w, a block of pairs, times all rows of x.
template <int BITS, int TILES>
static void multiply_block(const Weight& w, PairedRows& x, const Output& out, int64_t M, int64_t n0, int64_t most, BlockRoom& room) {
  const int64_t pairs = std::min(most, (w.N - n0 + PAIR - 1) / PAIR), every = x.pairs;
  const bool many = x.many();
  Unit unit(pairs, x);
  Unpacker<BITS> ahead(w, room, unit, n0, many);
  auto make = [&] {
    ahead.rest();
    asm volatile("" : : : "memory");  // tiles are read from what was written above
  };
  ahead.begin();
  make();
  for (int64_t index = 0; !unit.ended(); ++index, unit.next()) {
    if (!many || index > 0) ahead.begin();
    if (many) make();
    int64_t turn = 1;
    const bool last = unit.step + unit.count() == x.steps;
    for (int64_t i = 0; i < x.pairs; ++i) {
      float* sums = room.sums(unit.pair, i);
      if (unit.step == 0) zero_sums();
      else if (x.pairs > 1) load_sums(sums);
      const uint8_t *of = room.tiles(many ? 0 : index), *from = x.at(i, unit.step);
      if (many) add_unit<TILES, true>(of, from, unit.count(), [] {});
      else add_unit<TILES, false>(of, from, unit.count(), [&]() __attribute__((always_inline)) {
        if (--turn == 0) ahead.some(), turn = every;
      });
      if (x.pairs > 1 || last) store_sums(sums, sums + 256, sums + 512, sums + 768);
    }
    make();
  }
  for (int64_t m = 0; m < M; m += TILE)  // neighbours of a row together: rows of y are pages apart
    for (int64_t pair = 0; pair < pairs; ++pair)
      put_pair(room.sums(pair, m / PAIR) + m % PAIR * TILE, m, M, n0 + pair * PAIR, w.N, out);
}

template <int TILES>
static auto multiply_block_of(int64_t bits) {
  return bits == 3 ? multiply_block<3, TILES> : bits == 4 ? multiply_block<4, TILES> : multiply_block<8, TILES>;
}

// y = x w^T + bias of bfloat16 rows.
static void multiply_by_blocks(const Weight& w, const void* x, const Output& out, int64_t M, int threads) {
  static thread_local PairedRows held;
  PairedRows& paired = held;  // of the calling thread, for all
  paired.reset(M, w.k_groups);
  const int64_t all = (w.N + PAIR - 1) / PAIR, pairs = std::max<int64_t>(1, std::min(WIDE_PAIRS, all / (4 * threads)));
  auto run = paired.tiles == 1 ? multiply_block_of<1>(w.bits) : multiply_block_of<2>(w.bits);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < paired.pairs * paired.steps; ++i)
      to_pair((const uint16_t*)x, M, w.K, i / paired.steps, i % paired.steps, paired);
    static thread_local BlockRoom room;
    room.reset(w, pairs, paired);
    const TileShape shape(TILE);
    asm volatile("" : : "m"(shape));  // g++ 12 takes the shape for unread
    _tile_loadconfig(&shape);
#pragma omp for schedule(dynamic)
    for (int64_t n = 0; n < all; n += pairs) run(w, paired, out, M, n * PAIR, pairs, room);
    _tile_release();
  }
}

// Whether these rows are more than their codes are multiplied for (tiles.h): of panels, whose codes of 8 bits are tiles
// as they lie, and of which 3 bits take long to become bfloat16.
static bool takes_blocks(const Weight& w, int64_t rows, int64_t dtype, int64_t x_bits) {
  const int64_t least = !w.panels || w.bits == 4 ? TILE : w.bits == 3 ? 2 * TILE : 4 * TILE;
  return dtype == BFLOAT16 && x_bits == 16 && rows > least && tiles_allowed();
}
#else
static bool takes_blocks(const Weight&, int64_t, int64_t, int64_t) { return false; }
static void multiply_by_blocks(const Weight&, const void*, const Output&, int64_t, int) {}
#endif
