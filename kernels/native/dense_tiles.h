// Rows of x times a bfloat16 weight as the checkpoint stores it, by AMX: tiles of 16 rows of w x 16 rows of x x 32 of
// k, sums in float32. Rows of w lie in memory as a tile's rows do; x is written as tiles once a product. Up to 16
// rows of x meet 64 rows of w, more of them 32: sums stay in tiles 0-3 for all of K.
#pragma once
#include "tiles.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && WIDE
constexpr int64_t STEP = 32;  // k of a tile

// x [M, K] as tiles: pairs of k by rows of x, zeros past both.
struct DenseRows {
  int64_t tiles, steps;
  std::vector<uint8_t> held;
  void reset(int64_t M, int64_t K) {
    tiles = (M + TILE - 1) / TILE, steps = (K + STEP - 1) / STEP;
    tiles += tiles > 1 && tiles % 2;  // by twos
    const int64_t size = tiles * steps * TILE_BYTES + 64;
    if ((int64_t)held.size() < size) held.resize(size);
  }
  uint8_t* at(int64_t tile, int64_t step) {
    return held.data() + (64 - (uintptr_t)held.data() % 64) % 64 + (tile * steps + step) * TILE_BYTES;
  }
};

static void to_dense_tile(const uint16_t* x, int64_t M, int64_t K, int64_t tile, int64_t step, DenseRows& t) {
  uint32_t* to = (uint32_t*)t.at(tile, step);
  const int64_t first = tile * TILE, k = step * STEP, count = K - k < STEP ? K - k : STEP;
  std::memset(to, 0, TILE_BYTES);
  for (int64_t m = 0; m < TILE && first + m < M; ++m) {
    uint32_t pairs[STEP / 2] = {};
    std::memcpy(pairs, x + (first + m) * K + k, count * 2);
    for (int64_t i = 0; i < STEP / 2; ++i) to[i * TILE + m] = pairs[i];
  }
}

static inline void zero_sums() { _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); }

// 64 rows of w, `apart` bytes from each other, times a tile of x.
static inline void multiply_four(const uint8_t* w, int64_t apart, const uint8_t* x) {
  _tile_loadd(6, x, 64);
  _tile_loadd(4, w, apart);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(5, w + TILE * apart, apart);
  _tile_dpbf16ps(1, 5, 6);
  _tile_loadd(4, w + 2 * TILE * apart, apart);
  _tile_dpbf16ps(2, 4, 6);
  _tile_loadd(5, w + 3 * TILE * apart, apart);
  _tile_dpbf16ps(3, 5, 6);
}

// 32 rows of w times two tiles of x.
static inline void multiply_two(const uint8_t* w, int64_t apart, const uint8_t* x, const uint8_t* other) {
  _tile_loadd(6, x, 64);
  _tile_loadd(7, other, 64);
  _tile_loadd(4, w, apart);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_loadd(5, w + TILE * apart, apart);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// Tiles a .. d of sums, 16 rows of w each, to memory.
static inline void store_sums(float* a, float* b, float* c, float* d) {
  _tile_stored(0, a, 64);
  _tile_stored(1, b, 64);
  _tile_stored(2, c, 64);
  _tile_stored(3, d, 64);
}

// What a thread works in: sums of a panel, [2, tiles of x, 16, 16] or [4, 16, 16], and a panel that is not whole.
struct DenseRoom {
  std::vector<float> sums;
  std::vector<uint8_t> copied;
  explicit DenseRoom(int64_t tiles) : sums(std::max<int64_t>(4, 2 * tiles) * TILE * TILE) {}
};

// The panel's rows as they lie, or a copy with zeros past N and K.
static const uint8_t* panel_rows(const uint16_t* w, int64_t N, int64_t K, int64_t n0, int64_t rows, DenseRoom& room,
                                 int64_t* apart) {
  *apart = 2 * K;
  if (n0 + rows <= N && K % STEP == 0) return (const uint8_t*)(w + n0 * K);
  *apart = (K + STEP - 1) / STEP * STEP * 2;
  room.copied.assign(rows * *apart, 0);
  for (int64_t i = 0; i < rows && n0 + i < N; ++i) std::memcpy(room.copied.data() + i * *apart, w + (n0 + i) * K, K * 2);
  return room.copied.data();
}

// Rows n0 on of w, 64 with one tile of x, else 32, times all rows of x.
static void dense_panel(const uint16_t* w, DenseRows& x, const Output& out, int64_t M, int64_t N, int64_t K, int64_t n0,
                        DenseRoom& room) {
  const bool one = x.tiles == 1;
  const int64_t rows = one ? 4 * TILE : 2 * TILE;
  int64_t apart;
  const uint8_t* p = panel_rows(w, N, K, n0, rows, room, &apart);
  // The next panel is asked for in the order of memory: rows of this one are apart.
  const char* next = (const char*)(w + (n0 + rows) * K);
  const int64_t lines = rows * K * 2 / 64 / x.steps;
  float* sums = room.sums.data();
  for (int64_t tile = 0; tile < x.tiles; tile += 2) {
    zero_sums();
    for (int64_t step = 0; step < x.steps; ++step) {
      if (tile == 0)
        for (int64_t i = 0; i < lines; ++i) _mm_prefetch(next, _MM_HINT_T1), next += 64;
      if (one) multiply_four(p + step * 64, apart, x.at(0, step));
      else multiply_two(p + step * 64, apart, x.at(tile, step), x.at(tile + 1, step));
    }
    float *a = sums + tile * TILE * TILE, *b = a + x.tiles * TILE * TILE;
    if (one) store_sums(sums, sums + 256, sums + 512, sums + 768);
    else store_sums(a, a + 256, b, b + 256);
  }
  for (int64_t i = 0; i < rows / TILE && n0 + i * TILE < N; ++i)
    put_panel(sums + i * x.tiles * TILE * TILE, M, n0 + i * TILE, N, out);
}

static void dense_by_tiles(const void* x, const void* w, const void* bias, void* y, int64_t M, int64_t N, int64_t K,
                           int threads) {
  static thread_local DenseRows held;
  DenseRows& tiled = held;  // of the calling thread, for all
  tiled.reset(M, K);
  const Output out{y, bias, BFLOAT16};
  const int64_t rows = tiled.tiles == 1 ? 4 * TILE : 2 * TILE;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < tiled.tiles * tiled.steps; ++i)
      to_dense_tile((const uint16_t*)x, M, K, i / tiled.steps, i % tiled.steps, tiled);
    DenseRoom room(tiled.tiles);
    const TileShape shape(TILE);
    asm volatile("" : : "m"(shape));  // g++ 12 takes the shape for unread
    _tile_loadconfig(&shape);
#pragma omp for schedule(guided, 2)
    for (int64_t n = 0; n < (N + rows - 1) / rows; ++n) dense_panel((const uint16_t*)w, tiled, out, M, N, K, n * rows, room);
    _tile_release();
  }
}
#endif
