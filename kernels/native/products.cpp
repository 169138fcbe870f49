// Products of weights, called through ctypes (library.py); no header of torch. Built once a machine for one
// level of instructions, beside the other .cpp files; threads are those of the OpenMP library that
// torch has loaded, so that there is one pool.
#include <omp.h>

#include "dense.h"
#include "dense_tiles.h"
#include "dequantize.h"
#include "gemv_int16.h"
#include "gemm_amx_bf16.h"
#include "panel_rows.h"
#include "gemm_vnni.h"
#include "search.h"
#include "threads.h"
#include "tiles.h"

// Rows of x at a time: a few MB hold them as tiles.
constexpr int64_t CODE_ROWS = 128, BLOCKED_ROWS = 512, SHEET_ROWS = 512;

// y [M, N] = x [M, K] w^T + bias, x rounded to x_bits: codes as they are.
static void multiply_codes(const Weight& w, const void* x, const Output& out, int64_t M, int64_t x_bits, int64_t threads) {
  static thread_local RoundedRows held;
  RoundedRows& rounded = held;  // of the calling thread, for all
  const int64_t parts = out.dtype == FLOAT32 && x_bits == 16 ? 2 : 1;
#ifdef __AMX_INT8__
  const bool tiles = takes_tiles(w, M);
#else
  constexpr bool tiles = false;
#endif
  const bool sheets = !tiles && parts == 1 && takes_gemm_vnni(w, M, x_bits);
  rounded.reset(M, parts, w, x_bits, sheets, tiles);
  constexpr int64_t block = 32;
  auto run = [&](auto product, int64_t n0, int64_t n1, float* s) {
    float* z = s + block * w.grid_size();
    w.grids(n0, n1, s, z);
    product(w, rounded, out, M, n0, n1, s, z);
  };
#ifdef __AMX_INT8__
  static thread_local TiledRows held_tiles;
  TiledRows& tiled = held_tiles;
  if (tiles) tiled.reset(M * rounded.parts, w, rounded);
#endif
  static thread_local SheetRows held_sheets;
  SheetRows& x_sheets = held_sheets;
  if (sheets) x_sheets.reset(w, M, rounded);
#pragma omp parallel num_threads(threads_for(M * w.N * w.K, threads))
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < M * w.k_groups; ++i) {
      const int64_t m = i / w.k_groups, g = i % w.k_groups;
      round_row_group(x, out.dtype, w, m, g, rounded);
#ifdef __AMX_INT8__
      for (int64_t part = 0; tiles && part < rounded.parts; ++part) to_tiles(rounded, m * rounded.parts + part, g, tiled);
#endif
    }
#ifdef __AMX_INT8__
    if (tiles) multiply_by_tiles(w, tiled, rounded.parts, out, M);
#endif
    if (sheets) gemm_vnni(w, rounded, x_sheets, out, M);
    else if (w.panels && !tiles) multiply_panels(w, rounded, out, M);
    std::vector<float> grid(w.panels ? 0 : 2 * block * w.grid_size());
    const int64_t blocks = w.panels || sheets ? 0 : (w.N + block - 1) / block;
#pragma omp for schedule(dynamic, 4)
    for (int64_t n = 0; n < blocks; ++n) {
      int64_t n0 = n * block, n1 = n0 + block < w.N ? n0 + block : w.N;
      bool two = rounded.parts == 2;
      if (w.bits == 3) run(two ? gemv_int16<3, 2> : gemv_int16<3, 1>, n0, n1, grid.data());
      else if (w.bits == 4) run(two ? gemv_int16<4, 2> : gemv_int16<4, 1>, n0, n1, grid.data());
      else run(two ? gemv_int16<8, 2> : gemv_int16<8, 1>, n0, n1, grid.data());
    }
  }
}

extern "C" {

// Whether this build and this process have tiles for several rows.
int64_t llmpq_tiles() {
#ifdef __AMX_INT8__
  return tiles_allowed();
#else
  return 0;
#endif
}

// Whether this build multiplies weights in panels, and any number of rows by sheets.
int64_t llmpq_panels() { return HAS_BYTE_DOT; }

// y [M, N] = x [M, K] w^T + bias, x rounded to x_bits; x, bias and y are of one number, scales of another.
void llmpq_multiply(const void* x, const uint8_t* codes, const void* scale, const void* zero, const void* bias,
                    void* y, int64_t M, int64_t N, int64_t K, int64_t k_groups, int64_t groups, int64_t bits,
                    int64_t panels, int64_t dtype, int64_t scale_dtype, int64_t x_bits, int64_t threads) {
  const Weight w{codes, scale, zero, N, K, k_groups, groups, bits, scale_dtype, panels != 0};
  const bool blocks = takes_blocks(w, M, dtype, x_bits);
  const int64_t most = blocks ? BLOCKED_ROWS : llmpq_tiles() ? CODE_ROWS : SHEET_ROWS;
  for (int64_t m = 0; m < M; m += most) {
    const int64_t rows = std::min(most, M - m);
    const void* from = (const uint8_t*)x + m * K * size_of(dtype);
    const Output out{(uint8_t*)y + m * N * size_of(dtype), bias, dtype};
    if (blocks) multiply_by_blocks(w, from, out, rows, threads_for(rows * N * K, threads));
    else multiply_codes(w, from, out, rows, x_bits, threads);
  }
}

// Rows n0 .. n1 of w as out [n1 - n0, K] of `number`.
void llmpq_dequantize(const uint8_t* codes, const void* scale, const void* zero, void* out, int64_t n0, int64_t n1,
                      int64_t N, int64_t K, int64_t k_groups, int64_t groups, int64_t bits, int64_t panels,
                      int64_t dtype, int64_t scale_dtype, int64_t threads) {
  const Weight w{codes, scale, zero, N, K, k_groups, groups, bits, scale_dtype, panels != 0};
#pragma omp parallel num_threads(threads_for((n1 - n0) * K, threads))
  {
    auto run = bits == 3 ? dequantize_rows<3> : bits == 4 ? dequantize_rows<4> : dequantize_rows<8>;
    DequantizeRoom room(w);
#pragma omp for schedule(static)
    for (int64_t n = n0 / PANEL; n < (n1 + PANEL - 1) / PANEL; ++n) run(w, n * PANEL, n0, n1, out, dtype, room);
  }
}

// Codes, scales and zeros (null if symmetric) of w [N, K] in k-groups.
void llmpq_quantize(const void* w, uint8_t* codes, void* scale, void* zero, int64_t N, int64_t K, int64_t k_groups,
                    int64_t bits, int64_t panels, int64_t symmetric, int64_t dtype, int64_t scale_dtype,
                    const float* clip, const float* factor, int64_t clips, const float* least_scale, int64_t sum_lanes, int64_t threads) {
  const Weight to{codes, scale, zero, N, K, k_groups, k_groups, bits, scale_dtype, panels != 0};
  Search how{bits, symmetric, clips, sum_lanes, clip, factor, *least_scale, scale_dtype};
#pragma omp parallel for schedule(dynamic, PANEL) num_threads(threads_for(N * K, threads))
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t g = 0; g < k_groups; ++g) {
      alignas(64) float values[GROUP] = {}, found[GROUP];
      copy_floats(values, w, n * K + g * GROUP, K - g * GROUP < GROUP ? K - g * GROUP : GROUP, dtype);
      Grid grid = search_group(values, how, found);
      put_group(found, to, codes, n, g);
      put(scale, to.grid_at(n, g), scale_dtype, grid.scale);
      if (zero) put(zero, to.grid_at(n, g), scale_dtype, grid.zero);
    }
  }
}

// y [M, N] = x [M, K] w^T + bias of one number, w [N, K] not quantised.
void llmpq_dense(const void* x, const void* w, const void* bias, void* y, int64_t M, int64_t N, int64_t K,
                 int64_t dtype, int64_t threads) {
#ifdef __AMX_BF16__
  if (dtype == BFLOAT16 && M > 1 && tiles_allowed()) return dense_by_tiles(x, w, bias, y, M, N, K, threads_for(M * N * K, threads));
#endif
  auto run = dtype == FLOAT32 ? dense<FLOAT32> : dtype == BFLOAT16 ? dense<BFLOAT16> : dense<FLOAT16>;
  run(x, w, bias, y, M, N, K, threads_for(M * N * K, threads));
}

}  // extern "C"
