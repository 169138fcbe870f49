// Products of quantised weights, called through ctypes (native.py); no header of torch; compiles in some 20 s, once a machine.
// Built once a machine for one level of instructions; threads are those of the OpenMP library that
// torch has loaded, so that there is one pool.
#include <omp.h>

#include "attend.h"
#include "dense.h"
#include "dequantize.h"
#include "few_rows.h"
#include "packed_attend.h"
#include "search.h"

// Weights below which waking threads costs more than they save.
constexpr int64_t ALONE = 1 << 17;
static int threads_for(int64_t work, int64_t threads) { return work < ALONE ? 1 : (int)threads; }

extern "C" {

// y [M, N] = x [M, K] w^T + bias for few rows, x rounded to x_bits; x, bias and y are of one number, scales of another.
void llmpq_few_rows(const void* x, const uint8_t* codes, const void* scale, const void* zero, const void* bias,
                    void* y, int64_t M, int64_t N, int64_t K, int64_t k_groups, int64_t groups, int64_t bits,
                    int64_t number, int64_t scale_number, int64_t x_bits, int64_t threads) {
  Weight w{codes, scale, zero, N, K, k_groups, groups, bits, scale_number};
  Output out{y, bias, number};
  RoundedRows rounded(M, number == FLOAT32 && x_bits == 16 ? 2 : 1, w, x_bits);
  auto run = [&](auto product, int64_t n0, int64_t n1, float* s) {
    product(w, rounded, out, M, n0, n1, s, s + w.grid_size());
  };
  constexpr int64_t block = 32;
#pragma omp parallel num_threads(threads_for(M * N * K, threads))
  {
    std::vector<float> grid(2 * w.grid_size());
#pragma omp for schedule(static)
    for (int64_t i = 0; i < M * k_groups; ++i) round_row_group(x, number, w, i / k_groups, i % k_groups, rounded);
#pragma omp for schedule(dynamic, 4)
    for (int64_t n = 0; n < (N + block - 1) / block; ++n) {
      int64_t n0 = n * block, n1 = n0 + block < N ? n0 + block : N;
      bool two = rounded.parts == 2;
      if (bits == 3) run(two ? few_rows<3, 2> : few_rows<3, 1>, n0, n1, grid.data());
      else if (bits == 4) run(two ? few_rows<4, 2> : few_rows<4, 1>, n0, n1, grid.data());
      else run(two ? few_rows<8, 2> : few_rows<8, 1>, n0, n1, grid.data());
    }
  }
}

// Rows n0 .. n1 of w as out [n1 - n0, K] of `number`.
void llmpq_dequantize(const uint8_t* codes, const void* scale, const void* zero, void* out, int64_t n0, int64_t n1,
                      int64_t N, int64_t K, int64_t k_groups, int64_t groups, int64_t bits, int64_t number,
                      int64_t scale_number, int64_t threads) {
  Weight w{codes, scale, zero, N, K, k_groups, groups, bits, scale_number};
#pragma omp parallel num_threads(threads_for((n1 - n0) * K, threads))
  {
    std::vector<float> grid(2 * w.grid_size());
    auto row = bits == 3 ? dequantize_row<3> : bits == 4 ? dequantize_row<4> : dequantize_row<8>;
#pragma omp for schedule(static)
    for (int64_t n = n0; n < n1; ++n) row(w, n, out, (n - n0) * K, number, grid.data(), grid.data() + w.grid_size());
  }
}

// Codes, scales and zeros (null if symmetric) of w [N, K] in k-groups.
void llmpq_quantize(const void* w, uint8_t* codes, void* scale, void* zero, int64_t N, int64_t K, int64_t k_groups,
                    int64_t bits, int64_t symmetric, int64_t number, int64_t scale_number, const float* clip,
                    const float* factor, int64_t clips, const float* least_scale, int64_t sum_lanes, int64_t threads) {
  Search how{bits, symmetric, clips, sum_lanes, clip, factor, *least_scale, scale_number};
#pragma omp parallel for schedule(dynamic, 8) num_threads(threads_for(N * K, threads))
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t g = 0; g < k_groups; ++g) {
      alignas(64) float values[GROUP] = {}, found[GROUP];
      copy_floats(values, w, n * K + g * GROUP, K - g * GROUP < GROUP ? K - g * GROUP : GROUP, number);
      Grid grid = search_group(values, how, found);
      pack_group(found, bits, codes + (n * k_groups + g) * 16 * bits);
      put(scale, n * k_groups + g, scale_number, grid.scale);
      if (zero) put(zero, n * k_groups + g, scale_number, grid.zero);
    }
  }
}

// y [M, N] = x [M, K] w^T + bias of one number, w [N, K] not quantised.
void llmpq_dense(const void* x, const void* w, const void* bias, void* y, int64_t M, int64_t N, int64_t K,
                 int64_t number, int64_t threads) {
  auto run = number == FLOAT32 ? dense<FLOAT32> : number == BFLOAT16 ? dense<BFLOAT16> : dense<FLOAT16>;
  run(x, w, bias, y, M, N, K, threads_for(M * N * K, threads));
}

// o [B, H, D] of one query per row over its blocks of k and v [places, G, D]; scale and slopes [H] (or
// null) are floats.
void llmpq_attend_blocks(const void* q, const void* k, const void* v, void* o, const int64_t* tables,
                         const int64_t* ends, const float* scale, const float* slopes, int64_t B, int64_t H, int64_t G,
                         int64_t D, int64_t columns, int64_t window, int64_t number, int64_t threads) {
  int64_t seen = 0;
  for (int64_t b = 0; b < B; ++b) seen += window && ends[b] > window ? window : ends[b];
  auto run = number == FLOAT32 ? attend_rows<FLOAT32> : number == BFLOAT16 ? attend_rows<BFLOAT16> : attend_rows<FLOAT16>;
  run(k, v, q, o, tables, ends, B, H, G, D, columns, window, *scale, slopes, threads_for(seen * H * D * 2, threads));
}

// The same over a cache of `bits`-bit blocks (packed_attend.h); pools: keys' words and parameters, values' of
// each, rings of keys and of values; sizes: B, H, G, D, channels, key group, ring, columns, holdback, window.
void llmpq_attend_packed(const void* q, void* o, const void* const* pools, const int32_t* table, const int64_t* slots,
                         const int64_t* last, const int64_t* sizes, const float* scale_cap, const float* slopes,
                         const float* sinks, int64_t bits, int64_t number, int64_t threads) {
  int64_t B = sizes[0], H = sizes[1], seen = 0;
  Packed pool{(const uint32_t*)pools[0], (const uint32_t*)pools[2], (const uint16_t*)pools[1],
              (const uint16_t*)pools[3], pools[4], pools[5], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]};
  Rule rule{sizes[9], scale_cap[0], scale_cap[1], slopes, sinks};
  for (int64_t b = 0; b < B; ++b) seen += last[b] + 1;
  auto run = bits == 8 ? attend_packed_of<8> : bits == 4 ? attend_packed_of<4> : attend_packed_of<2>;
  run(pool, q, o, table, slots, last, B, H, sizes[7], sizes[8], rule, number, threads_for(seen * H * sizes[3] * 2, threads));
}

}  // extern "C"
