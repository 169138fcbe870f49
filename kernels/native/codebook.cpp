// Products of weights of a table's codes, called through ctypes (library.py), as products.cpp.
#include "codebook.h"

#include <omp.h>

#include "threads.h"

extern "C" {

// y [M, N] = x [M, K] w^T + bias for few rows; x, bias and y are of one number.
void llmpq_codebook_rows(const void* x, const uint8_t* codes, const void* scale, const float* factor,
                      const float* values, const void* bias, void* y, int64_t M, int64_t N, int64_t K, int64_t group,
                      int64_t kind, int64_t dtype, int64_t threads) {
  const Codebook w{codes, scale, factor, values, N, K, group, kind};
  const int64_t pitch = w.k_groups() * TABLE_GROUP;
  static thread_local std::vector<float> held;
  held.resize(M * pitch);
  float* given = held.data();  // of the calling thread, for all
  for (int64_t m = 0; m < M; ++m) codebook_order(x, m * K, K, dtype, given + m * pitch);
  using Row = void (*)(const Codebook&, const CodebookValues&, const Ints*, int64_t, const float*, int64_t, const float*,
                       float*);
  static constexpr Row of_rows[TABLE_ROWS] = {codebook_row<1>, codebook_row<2>, codebook_row<3>, codebook_row<4>};
  const CodebookValues table(values);
  Ints lanes[2 * TABLE_HALVES];
  table_lanes(group, lanes);
#pragma omp parallel num_threads(threads_for(M * N * K, threads))
  {
    std::vector<float> s(w.scales());
#pragma omp for schedule(static)
    for (int64_t n = 0; n < N; ++n) {
      w.scales_of(n, s.data());
      const float more = bias ? float_of(bias, n, dtype) : 0;
      for (int64_t m0 = 0; m0 < M; m0 += TABLE_ROWS) {
        const int64_t count = std::min(TABLE_ROWS, M - m0);
        float sums[TABLE_ROWS];
        of_rows[count - 1](w, table, lanes, n, given + m0 * pitch, pitch, s.data(), sums);
        for (int64_t m = 0; m < count; ++m) put(y, (m0 + m) * N + n, dtype, sums[m] + more);
      }
    }
  }
}

// Rows n0 .. n1 of w as out [n1 - n0, K] of `number`.
void llmpq_codebook_dequantize(const uint8_t* codes, const void* scale, const float* factor, const float* values,
                            void* out, int64_t n0, int64_t n1, int64_t N, int64_t K, int64_t group, int64_t kind,
                            int64_t dtype, int64_t threads) {
  const Codebook w{codes, scale, factor, values, N, K, group, kind};
  const CodebookValues table(values);
#pragma omp parallel num_threads(threads_for((n1 - n0) * K, threads))
  {
    std::vector<float> s(w.scales());
#pragma omp for schedule(static)
    for (int64_t n = n0; n < n1; ++n) {
      w.scales_of(n, s.data());
      codebook_dequantize_row(w, table, n, out, (n - n0) * K, dtype, s.data());
    }
  }
}

}  // extern "C"
