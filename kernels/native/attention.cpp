// Attention over the cache's blocks, and what lies between products; called through ctypes (library.py); compiled as products.cpp is.
#include <omp.h>

#include "attend.h"
#include "row_wise.h"
#include "threads.h"

extern "C" {

// o [B, H, D] of one query per row over its blocks of k and v [places, G, D]; scale and slopes [H] (or
// null) are floats.
void llmpq_attend_blocks(const void* q, const void* k, const void* v, void* o, const int64_t* tables,
                         const int64_t* ends, const float* scale, const float* slopes, int64_t B, int64_t H, int64_t G,
                         int64_t D, int64_t columns, int64_t window, int64_t dtype, int64_t threads) {
  int64_t seen = 0;
  for (int64_t b = 0; b < B; ++b) seen += window && ends[b] > window ? window : ends[b];
  auto run = dtype == FLOAT32 ? attend_rows<FLOAT32> : dtype == BFLOAT16 ? attend_rows<BFLOAT16> : attend_rows<FLOAT16>;
  run(k, v, q, o, tables, ends, B, H, G, D, columns, window, *scale, slopes, threads_for(seen * H * D * 2, threads));
}

// y [M, n] = x / sqrt(mean x^2 + eps) * weight.
void llmpq_norm(const void* x, const void* weight, void* y, const float* eps, int64_t M, int64_t n, int64_t dtype,
                int64_t threads) {
  auto run = dtype == FLOAT32 ? norm_row<FLOAT32> : dtype == BFLOAT16 ? norm_row<BFLOAT16> : norm_row<FLOAT16>;
#pragma omp parallel for schedule(static) num_threads(threads_for(M * n, threads))
  for (int64_t m = 0; m < M; ++m) run(x, weight, y, m, n, *eps);
}

// y [M, n] = silu(g) u of x [M, 2 n] = (g, u).
void llmpq_gate(const void* x, void* y, int64_t M, int64_t n, int64_t dtype, int64_t threads) {
  auto run = dtype == FLOAT32 ? gate_row<FLOAT32> : dtype == BFLOAT16 ? gate_row<BFLOAT16> : gate_row<FLOAT16>;
#pragma omp parallel for schedule(static) num_threads(threads_for(M * n * 4, threads))
  for (int64_t m = 0; m < M; ++m) run(x, y, m, n);
}

// y [M, heads, 2 half] = x turned by the angles of cosine and sine [A, half], token m by those of m % A; tokens of
// x are `pitch` apart.
void llmpq_rotate(const void* x, const void* cosine, const void* sine, void* y, int64_t M, int64_t A, int64_t heads,
                int64_t half, int64_t pitch, int64_t dtype, int64_t threads) {
  auto run = dtype == FLOAT32 ? turn_token<FLOAT32> : dtype == BFLOAT16 ? turn_token<BFLOAT16> : turn_token<FLOAT16>;
#pragma omp parallel for schedule(static) num_threads(threads_for(M * heads * half * 2, threads))
  for (int64_t m = 0; m < M; ++m) run(x, cosine, sine, y, m * pitch, m * heads * 2 * half, m % A * half, heads, half);
}

}  // extern "C"
