// Few rows of x times a weight that is not quantised, as the checkpoint stores it: [N, K], float32,
// bfloat16 or float16. Sums in float32. Read once, at the memory's speed: 2 K bytes an output.
#pragma once
#include <vector>

#include "vectors.h"

#if WIDE
static inline Floats wide_of(const void* p, int64_t i, int64_t dtype) {
  if (dtype == FLOAT32) return _mm512_loadu_ps((const float*)p + i);
  __m256i half = _mm256_loadu_si256((const __m256i*)((const uint16_t*)p + i));
  if (dtype == FLOAT16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
#else
static inline Floats wide_of(const void* p, int64_t i, int64_t dtype) { return eight_of(p, i, dtype); }
#endif

// COLUMNS rows of w from n on times ROWS rows of x from m on; x [M, padded K] floats, zeros past K.
template <int DTYPE, int ROWS, int COLUMNS>
static inline void dense_block(const float* x, int64_t padded, const void* w, const void* bias, void* y, int64_t m,
                               int64_t n, int64_t N, int64_t K) {
  Floats acc[COLUMNS][ROWS];
  for (int c = 0; c < COLUMNS; ++c)
    for (int r = 0; r < ROWS; ++r) acc[c][r] = floats(0);
  int64_t k = 0;
  for (; k + LANES <= K; k += LANES) {
    Floats v[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) v[c] = wide_of(w, (n + c) * K + k, DTYPE);
    for (int r = 0; r < ROWS; ++r) {
      Floats xv = load(x + (m + r) * padded + k);
      for (int c = 0; c < COLUMNS; ++c) acc[c][r] = fma(v[c], xv, acc[c][r]);
    }
  }
  if (k < K) {
    for (int c = 0; c < COLUMNS; ++c) {
      alignas(64) float rest[LANES] = {};
      copy_floats(rest, w, (n + c) * K + k, K - k, DTYPE);
      for (int r = 0; r < ROWS; ++r) acc[c][r] = fma(load(rest), load(x + (m + r) * padded + k), acc[c][r]);
    }
  }
  for (int c = 0; c < COLUMNS; ++c) {
    float b = bias ? float_of(bias, n + c, DTYPE) : 0;
    for (int r = 0; r < ROWS; ++r) put(y, (m + r) * N + n + c, DTYPE, total(acc[c][r]) + b);
  }
}

// One row of w times one row of x: rows of w one after the other are read at the memory's speed, two or four
// at once more slowly.
template <int DTYPE>
static inline void dense_row(const float* x, const void* w, const void* bias, void* y, int64_t n, int64_t K) {
  constexpr int SUMS = 4;
  Floats acc[SUMS];
  for (int s = 0; s < SUMS; ++s) acc[s] = floats(0);
  int64_t k = 0;
  for (; k + SUMS * LANES <= K; k += SUMS * LANES)
    for (int s = 0; s < SUMS; ++s)
      acc[s] = fma(wide_of(w, n * K + k + s * LANES, DTYPE), load(x + k + s * LANES), acc[s]);
  for (; k < K; k += LANES) {
    alignas(64) float rest[LANES] = {};
    copy_floats(rest, w, n * K + k, K - k < LANES ? K - k : LANES, DTYPE);
    acc[0] = fma(load(rest), load(x + k), acc[0]);
  }
  float b = bias ? float_of(bias, n, DTYPE) : 0;
  put(y, n, DTYPE, total(add(add(acc[0], acc[1]), add(acc[2], acc[3]))) + b);
}

#ifdef __AVX512BF16__
// The same of bfloat16, x as it came: an instruction for 32 products instead of six.
static inline void dense_row_of_bfloats(const uint16_t* x, const uint16_t* w, const void* bias, void* y, int64_t n, int64_t K) {
  constexpr int SUMS = 4, VALUES = 32;
  Floats acc[SUMS];
  for (int s = 0; s < SUMS; ++s) acc[s] = floats(0);
  const uint16_t* p = w + n * K;
  int64_t k = 0;
  for (; k + SUMS * VALUES <= K; k += SUMS * VALUES)
    for (int s = 0; s < SUMS; ++s) {
      const int64_t at = k + s * VALUES;
      _mm_prefetch((const char*)(p + at) + 4096, _MM_HINT_T1);
      acc[s] = _mm512_dpbf16_ps(acc[s], (__m512bh)_mm512_loadu_si512(p + at), (__m512bh)_mm512_loadu_si512(x + at));
    }
  for (; k < K; k += VALUES) {
    const __mmask32 there = K - k < VALUES ? (1u << (K - k)) - 1 : ~0u;
    acc[0] = _mm512_dpbf16_ps(acc[0], (__m512bh)_mm512_maskz_loadu_epi16(there, p + k),
                              (__m512bh)_mm512_maskz_loadu_epi16(there, x + k));
  }
  const float b = bias ? float_of(bias, n, BFLOAT16) : 0;
  put(y, n, BFLOAT16, total(add(add(acc[0], acc[1]), add(acc[2], acc[3]))) + b);
}
#endif

template <int DTYPE, int ROWS>
static void dense_rows(const float* x, int64_t padded, const void* w, const void* bias, void* y, int64_t m, int64_t n0,
                       int64_t n1, int64_t N, int64_t K) {
  constexpr int COLUMNS = (WIDE ? 16 : 8) / ROWS > 4 ? 4 : (WIDE ? 16 : 8) / ROWS;
  int64_t n = n0;
  for (; n + COLUMNS <= n1; n += COLUMNS) dense_block<DTYPE, ROWS, COLUMNS>(x, padded, w, bias, y, m, n, N, K);
  for (; n < n1; ++n) dense_block<DTYPE, ROWS, 1>(x, padded, w, bias, y, m, n, N, K);
}

template <int DTYPE>
static void dense(const void* x, const void* w, const void* bias, void* y, int64_t M, int64_t N, int64_t K,
                  int threads) {
  int64_t padded = (K + 15) / 16 * 16;
  std::vector<float> rows(M * padded);
  for (int64_t m = 0; m < M; ++m) copy_floats(rows.data() + m * padded, x, m * K, K, DTYPE);
  constexpr int64_t block = 64;
#pragma omp parallel for schedule(dynamic, 2) num_threads(threads)
  for (int64_t i = 0; i < (N + block - 1) / block; ++i) {
    int64_t n0 = i * block, n1 = n0 + block < N ? n0 + block : N, m = 0;
    const float* p = rows.data();
    if (M == 1) {
#ifdef __AVX512BF16__
      if constexpr (DTYPE == BFLOAT16) {
        for (int64_t n = n0; n < n1; ++n) dense_row_of_bfloats((const uint16_t*)x, (const uint16_t*)w, bias, y, n, K);
        continue;
      }
#endif
      for (int64_t n = n0; n < n1; ++n) dense_row<DTYPE>(p, w, bias, y, n, K);
      continue;
    }
    for (; M - m >= 8; m += 8) dense_rows<DTYPE, 8>(p, padded, w, bias, y, m, n0, n1, N, K);
    for (; M - m >= 4; m += 4) dense_rows<DTYPE, 4>(p, padded, w, bias, y, m, n0, n1, N, K);
    for (; M - m >= 2; m += 2) dense_rows<DTYPE, 2>(p, padded, w, bias, y, m, n0, n1, N, K);
    if (m < M) dense_rows<DTYPE, 1>(p, padded, w, bias, y, m, n0, n1, N, K);
  }
}
