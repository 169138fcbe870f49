// Products of weights kept in E4M3, called through ctypes (library.py), as products.cpp.
#include "fp8.h"

#include <omp.h>

#include "threads.h"

extern "C" {

// y [M, N] = x [M, K] w^T + bias for few rows; x, bias and y are of one number.
void llmpq_fp8_rows(const void* x, const uint8_t* codes, const float* scale, const void* bias, void* y, int64_t M,
                    int64_t N, int64_t K, int64_t rows, int64_t columns, int64_t wide, int64_t dtype,
                    int64_t threads) {
  const Fp8 w{codes, scale, N, K, rows, columns, wide};
  static thread_local std::vector<float> held;
  held.resize(M * K);
  float* given = held.data();  // of the calling thread, for all
  for (int64_t m = 0; m < M; ++m) copy_floats(given + m * K, x, m * K, K, dtype);
  using Row = void (*)(const Fp8&, int64_t, const float*, int64_t, float*);
  static constexpr Row of_rows[FP8_ROWS] = {fp8_row<1>, fp8_row<2>, fp8_row<3>, fp8_row<4>,
                                            fp8_row<5>, fp8_row<6>, fp8_row<7>, fp8_row<8>};
#pragma omp parallel for schedule(static) num_threads(threads_for(M * N * K, threads))
  for (int64_t n = 0; n < N; ++n) {
    const float more = bias ? float_of(bias, n, dtype) : 0;
    for (int64_t m0 = 0; m0 < M; m0 += FP8_ROWS) {
      const int64_t count = std::min(FP8_ROWS, M - m0);
      float sums[FP8_ROWS];
      of_rows[count - 1](w, n, given + m0 * K, K, sums);
      for (int64_t m = 0; m < count; ++m) put(y, (m0 + m) * N + n, dtype, sums[m] + more);
    }
  }
}

// Rows n0 .. n1 of w as out [n1 - n0, K] of `number`.
void llmpq_fp8_dequantize(const uint8_t* codes, const float* scale, void* out, int64_t n0, int64_t n1, int64_t N,
                          int64_t K, int64_t rows, int64_t columns, int64_t wide, int64_t dtype, int64_t threads) {
  const Fp8 w{codes, scale, N, K, rows, columns, wide};
#pragma omp parallel for schedule(static) num_threads(threads_for((n1 - n0) * K, threads))
  for (int64_t n = n0; n < n1; ++n) fp8_dequantize_row(w, n, out, (n - n0) * K, dtype);
}

}  // extern "C"
