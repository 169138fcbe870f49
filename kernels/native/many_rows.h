// Many rows of bfloat16 x times a quantised weight, by AMX: blocks of the weight become bfloat16 tiles that stay in a
// core's L2 and meet all rows of x, as an unquantised weight's do.
//
// A weight is (code - zero) scale in float32, rounded once. Below 8 bits a group has at most 16 values: they are
// computed once and looked up by a permutation of words, which takes the word's low bits itself. Sums in float32.
// A core's loop is two tiles of w x two of x for 8 steps of 32 k: those of x stay in L1, those of w come from L2.
#pragma once
#include "dense_tiles.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && WIDE
constexpr int64_t PAIR = 2 * TILE, PAIR_BYTES = 2 * TILE_BYTES, PAIR_SUMS = 4 * TILE * TILE;
constexpr int64_t NEAR_STEPS = 8;     // of a pair's that stay in L1
constexpr int64_t DEEP_STEPS = 64;    // of w's that stay in L2
constexpr int64_t WIDE_PAIRS = 8;     // of w's that stay in L2
constexpr int64_t AHEAD_BYTES = 256;  // of a row of codes, asked for before
constexpr int64_t STEPS = GROUP / STEP;

// 16 rows of 16 words, `apart` words from each other, as columns.
static inline void transpose(const __m512i* row, __m512i* column) {
  __m512i t[16], u[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(row[2 * i], row[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(row[2 * i], row[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j) {
      u[4 * i + 2 * j] = _mm512_unpacklo_epi64(t[4 * i + j], t[4 * i + 2 + j]);
      u[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(t[4 * i + j], t[4 * i + 2 + j]);
    }
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i32x4(u[j], u[4 + j], 0x88), b = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(u[j], u[4 + j], 0xdd), d = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0xdd);
    column[j] = _mm512_shuffle_i32x4(a, b, 0x88);
    column[8 + j] = _mm512_shuffle_i32x4(a, b, 0xdd);
    column[4 + j] = _mm512_shuffle_i32x4(c, d, 0x88);
    column[12 + j] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
}

// x [M, K] as pairs of tiles: [pairs, steps, 2, 16 pairs of k, 16 rows], zeros past M and K.
struct PairedRows {
  int64_t pairs = 0, steps = 0;
  std::vector<uint8_t> held;
  void reset(int64_t M, int64_t groups) {
    pairs = (M + PAIR - 1) / PAIR, steps = groups * STEPS;
    const int64_t size = pairs * steps * PAIR_BYTES + 64;
    if ((int64_t)held.size() < size) held.resize(size);
  }
  uint8_t* at(int64_t pair, int64_t step) {
    return held.data() + (64 - (uintptr_t)held.data() % 64) % 64 + (pair * steps + step) * PAIR_BYTES;
  }
};

static void to_pair(const uint16_t* x, int64_t M, int64_t K, int64_t pair, int64_t step, PairedRows& t) {
  const int64_t k = step * STEP, count = K - k;
  const __mmask32 there = count >= STEP ? ~0u : count > 0 ? (1u << count) - 1 : 0;
  for (int64_t half = 0; half < 2; ++half) {
    __m512i row[TILE], column[TILE];
    for (int64_t i = 0; i < TILE; ++i) {
      const int64_t m = pair * PAIR + half * TILE + i;
      row[i] = m < M && there ? _mm512_maskz_loadu_epi16(there, x + m * K + k) : _mm512_setzero_si512();
    }
    transpose(row, column);
    for (int64_t i = 0; i < TILE; ++i) _mm512_store_si512(t.at(pair, step) + half * TILE_BYTES + i * 64, column[i]);
  }
}

// The values of all codes below 8 bits, over and over.
static inline __m512i values_of(int64_t bits, float scale, float zero) {
  const __m512i word = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512 code = _mm512_cvtepi32_ps(_mm512_and_si512(word, _mm512_set1_epi32((1 << bits) - 1)));
  return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(mul(sub(code, floats(zero)), floats(scale))));
}

// A k-group of a row of w: 32 numbers to each of four tiles, `PAIR_BYTES` apart. s and z: of its parts.
template <int BITS>
static inline void numbers_of_group(const uint8_t* p, const float* s, const float* z, bool fine, uint8_t* to) {
  if constexpr (BITS == 8) {
    for (int64_t v = 0; v < STEPS; ++v) {
      const Floats zero = floats(z[fine ? v : 0]), scale = floats(s[fine ? v : 0]);
      auto half = [&](int64_t at) {
        const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(p + v * STEP + at)));
        return mul(sub(_mm512_cvtepi32_ps(codes), zero), scale);
      };
      _mm512_store_si512(to + v * PAIR_BYTES, (__m512i)_mm512_cvtne2ps_pbh(half(TILE), half(0)));
    }
  } else {
    const __m512i w = BITS == 4 ? _mm512_loadu_si512(p) : words12(p);
    __m512i values = values_of(BITS, *s, *z);
    for (int64_t v = 0; v < STEPS; ++v) {
      if (fine && v) values = values_of(BITS, s[v], z[v]);
      _mm512_store_si512(to + v * PAIR_BYTES, _mm512_permutexvar_epi16(_mm512_srli_epi16(w, BITS * v), values));
    }
  }
}

// What a thread works in: a block of w as pairs of tiles [pairs, steps, 2, 16, 32], and sums [pairs of x, pairs, 4, 16, 16].
struct BlockRoom {
  int64_t pairs, deep, kept;  // pairs of w; steps of w at once; pairs of x whose sums are kept
  std::vector<uint8_t> held;
  std::vector<float> grid;
  void reset(const Weight& w, int64_t most, int64_t x_pairs) {
    pairs = most, deep = std::min(DEEP_STEPS, w.k_groups * STEPS), kept = w.k_groups * STEPS > deep ? x_pairs : 1;
    const int64_t size = pairs * (deep * PAIR_BYTES + kept * PAIR_SUMS * 4) + 64;
    if ((int64_t)held.size() < size) held.resize(size);
    grid.resize(2 * pairs * PAIR * w.grid_size());
  }
  uint8_t* tiles(int64_t pair, int64_t step) {
    return held.data() + (64 - (uintptr_t)held.data() % 64) % 64 + (pair * deep + step) * PAIR_BYTES;
  }
  float* sums(int64_t x_pair, int64_t pair) {
    return (float*)tiles(pairs, 0) + ((kept == 1 ? 0 : x_pair) * pairs + pair) * PAIR_SUMS;
  }
};

// Steps first .. last of rows n0 on as tiles; behind the last row that row's again.
template <int BITS>
static void block_tiles(const Weight& w, int64_t n0, int64_t rows, int64_t first, int64_t last, BlockRoom& room) {
  const int64_t pitch = w.grid_size(), parts = w.parts();
  const float *scales = room.grid.data(), *zeros = scales + rows * pitch;
  for (int64_t pair = 0; pair < rows / PAIR; ++pair)
    for (int64_t step = first; step < last; step += STEPS) {
      const int64_t g = step / STEPS;
      uint8_t* to = room.tiles(pair, step - first);
      for (int64_t i = pair * PAIR; i < (pair + 1) * PAIR; ++i, to += 64) {
        const uint8_t* p = w.row(std::min(n0 + i, w.N - 1)) + g * 16 * BITS;
        const int64_t at = i * pitch + g * parts;
        _mm_prefetch((const char*)p + AHEAD_BYTES, _MM_HINT_T0);
        if (BITS == 8) _mm_prefetch((const char*)p + AHEAD_BYTES + 64, _MM_HINT_T0);
        numbers_of_group<BITS>(p, scales + at, zeros + at, parts > 1, to);
      }
    }
}

// Sums of a pair of w's tiles and one of x's over some steps; `next` is asked for meanwhile, `lines` a step.
static inline void add_pair(const uint8_t* w, const uint8_t* x, int64_t steps, bool first, float* sums,
                            const char* next, int64_t lines) {
  if (first) zero_sums();
  else { _tile_loadd(0, sums, 64); _tile_loadd(1, sums + 256, 64); _tile_loadd(2, sums + 512, 64); _tile_loadd(3, sums + 768, 64); }
  for (int64_t i = 0; i < steps; ++i, w += PAIR_BYTES, x += PAIR_BYTES) {
    for (int64_t line = 0; line < lines; ++line, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    _tile_loadd(6, x, 64);
    _tile_loadd(4, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, x + TILE_BYTES, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, w + TILE_BYTES, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  store_sums(sums, sums + 256, sums + 512, sums + 768);
}

// y of 16 rows of w and up to 16 of x from m on, from their sums.
static void put_tile(const float* sums, int64_t m, int64_t M, int64_t n0, int64_t N, const Output& out) {
  __m512i row[TILE], column[TILE];
  const int64_t count = std::min(TILE, N - n0);
  const __mmask16 there = (__mmask16)((1u << count) - 1);
  alignas(64) float bias[TILE] = {};
  if (out.bias) copy_floats(bias, out.bias, n0, count, out.number);
  for (int64_t i = 0; i < TILE; ++i) row[i] = _mm512_load_si512(sums + i * TILE);
  transpose(row, column);
  for (int64_t i = 0; i < TILE && m + i < M; ++i) {
    const __m256i y = (__m256i)_mm512_cvtneps_pbh(add(_mm512_castsi512_ps(column[i]), load(bias)));
    _mm256_mask_storeu_epi16((uint16_t*)out.y + (m + i) * N + n0, there, y);
  }
}

// Rows n0 on of w, a block of them, times all rows of x.
template <int BITS>
static void multiply_block(const Weight& w, PairedRows& x, const Output& out, int64_t M, int64_t n0, BlockRoom& room) {
  const int64_t pairs = std::min(room.pairs, (w.N - n0 + PAIR - 1) / PAIR), rows = pairs * PAIR;
  w.grids(n0, n0 + rows, room.grid.data(), room.grid.data() + rows * w.grid_size());
  const char* next = (const char*)w.row(n0 + rows);
  for (int64_t deep = 0; deep < x.steps; deep += room.deep) {
    const int64_t end = std::min(x.steps, deep + room.deep);
    block_tiles<BITS>(w, n0, rows, deep, end, room);
    for (int64_t i = 0; i < x.pairs; ++i) {
      for (int64_t step = deep; step < end; step += NEAR_STEPS) {
        const int64_t steps = std::min(NEAR_STEPS, end - step);
        for (int64_t pair = 0; pair < pairs; ++pair) {
          const int64_t lines = i == 0 && x.steps <= DEEP_STEPS ? PAIR * 16 * BITS / STEPS / 64 : 0;
          add_pair(room.tiles(pair, step - deep), x.at(i, step), steps, step == 0, room.sums(i, pair), next, lines);
          next += lines * 64 * steps;
        }
      }
      for (int64_t pair = 0; end == x.steps && pair < pairs; ++pair)
        for (int64_t t = 0; t < 4; ++t)
          if (n0 + pair * PAIR + t / 2 * TILE < w.N)
            put_tile(room.sums(i, pair) + t * TILE * TILE, i * PAIR + t % 2 * TILE, M, n0 + pair * PAIR + t / 2 * TILE, w.N, out);
    }
  }
}

// y = x w^T + bias of bfloat16 rows.
static void multiply_by_blocks(const Weight& w, const void* x, const Output& out, int64_t M, int threads) {
  static thread_local PairedRows held;
  PairedRows& paired = held;  // of the calling thread, for all
  paired.reset(M, w.k_groups);
  const int64_t each = w.N / (4 * threads) / PAIR, most = paired.pairs > 2 ? WIDE_PAIRS : 1;
  const int64_t pairs = std::min(most, std::max<int64_t>(1, each)), rows = pairs * PAIR;
  const int64_t blocks = (w.N + rows - 1) / rows, together = std::max<int64_t>(1, std::min(WIDE_PAIRS / pairs, each / pairs));
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < paired.pairs * paired.steps; ++i) to_pair((const uint16_t*)x, M, w.K, i / paired.steps, i % paired.steps, paired);
    static thread_local BlockRoom room;
    room.reset(w, pairs, paired.pairs);
    const TileShape shape(TILE);
    asm volatile("" : : "m"(shape));  // g++ 12 takes the shape for unread
    _tile_loadconfig(&shape);
    auto run = w.bits == 3 ? multiply_block<3> : w.bits == 4 ? multiply_block<4> : multiply_block<8>;
#pragma omp for schedule(dynamic, together)
    for (int64_t n = 0; n < blocks; ++n) run(w, paired, out, M, n * rows, room);
    _tile_release();
  }
}

// Whether these rows are more than their codes are multiplied for (tiles.h).
static bool takes_blocks(const Weight& w, int64_t rows, int64_t number, int64_t x_bits) {
  return number == BFLOAT16 && x_bits == 16 && rows > (w.bits < 8 ? 16 : 32) && tiles_allowed();
}
#else
static bool takes_blocks(const Weight&, int64_t, int64_t, int64_t) { return false; }
static void multiply_by_blocks(const Weight&, const void*, const Output&, int64_t, int) {}
#endif
