// What lies between a step's products: norms, gates, turns. Arithmetic in float32; where torch rounds to the
// tensor's number on the way, so is it here.
#pragma once
#include "attend.h"

static inline __m256 rounded(__m256 v, int64_t dtype) {
  if (dtype == FLOAT32) return v;
  alignas(16) uint16_t half[8];
  put_eight(half, 0, dtype, v);
  return eight_of(half, 0, dtype);
}
static inline float rounded(float v, int64_t dtype) {
  if (dtype == FLOAT32) return v;
  uint16_t half;
  put(&half, 0, dtype, v);
  return float_of(&half, 0, dtype);
}

static inline __m256 exp_of_eight(__m256 x) {
#if WIDE
  return _mm512_castps512_ps256(exp_of(_mm512_zextps256_ps512(x)));
#else
  return exp_of(x);
#endif
}

// y = x / sqrt(mean x^2 + eps) * weight of row m.
template <int DTYPE>
static void norm_row(const void* x, const void* weight, void* y, int64_t m, int64_t n, float eps) {
  __m256 squares[2] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int j = 0; j < 2; ++j) {
      __m256 v = eight_of(x, m * n + i + 8 * j, DTYPE);
      squares[j] = _mm256_fmadd_ps(v, v, squares[j]);
    }
  alignas(32) float parts[8];
  _mm256_store_ps(parts, _mm256_add_ps(squares[0], squares[1]));
  float sum = 0;
  for (float part : parts) sum += part;
  for (; i < n; ++i) sum += float_of(x, m * n + i, DTYPE) * float_of(x, m * n + i, DTYPE);
  const float inverse = 1 / std::sqrt(sum / (float)n + eps);
  for (i = 0; i + 8 <= n; i += 8) {
    __m256 v = _mm256_mul_ps(eight_of(x, m * n + i, DTYPE), _mm256_set1_ps(inverse));
    put_eight(y, m * n + i, DTYPE, _mm256_mul_ps(v, eight_of(weight, i, DTYPE)));
  }
  for (; i < n; ++i)
    put(y, m * n + i, DTYPE, float_of(x, m * n + i, DTYPE) * inverse * float_of(weight, i, DTYPE));
}

// y [n] = silu(g) u of row m of x [M, 2 n], whose halves are g and u.
template <int DTYPE>
static void gate_row(const void* x, void* y, int64_t m, int64_t n) {
  const int64_t g = 2 * m * n, u = g + n, sign = INT32_MIN;
  const __m256 one = _mm256_set1_ps(1), minus = _mm256_castsi256_ps(_mm256_set1_epi32((int)sign));
  auto silu = [&](__m256 v) {
    __m256 e = exp_of_eight(_mm256_or_ps(v, minus));                    // e^-|v|
    __m256 share = _mm256_blendv_ps(one, e, v);                         // e where v < 0
    return rounded(_mm256_div_ps(_mm256_mul_ps(v, share), _mm256_add_ps(one, e)), DTYPE);
  };
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    put_eight(y, m * n + i, DTYPE, _mm256_mul_ps(silu(eight_of(x, g + i, DTYPE)), eight_of(x, u + i, DTYPE)));
  if (i == n) return;
  alignas(32) float rest[8] = {};
  copy_floats(rest, x, g + i, n - i, DTYPE);
  _mm256_store_ps(rest, silu(_mm256_load_ps(rest)));
  for (int64_t k = 0; i < n; ++i, ++k) put(y, m * n + i, DTYPE, rest[k] * float_of(x, u + i, DTYPE));
}

// Heads of one token, 2 `half` channels each: (a, b) -> (a cos - b sin, b cos + a sin).
template <int DTYPE>
static void turn_token(const void* x, const void* cosine, const void* sine, void* y, int64_t from, int64_t to,
                       int64_t angles, int64_t heads, int64_t half) {
  for (int64_t head = 0; head < heads; ++head, from += 2 * half, to += 2 * half) {
    int64_t i = 0;
    for (; i + 8 <= half; i += 8) {
      __m256 a = eight_of(x, from + i, DTYPE), b = eight_of(x, from + half + i, DTYPE);
      __m256 c = eight_of(cosine, angles + i, DTYPE), s = eight_of(sine, angles + i, DTYPE);
      put_eight(y, to + i, DTYPE, _mm256_sub_ps(rounded(_mm256_mul_ps(a, c), DTYPE), _mm256_mul_ps(b, s)));
      put_eight(y, to + half + i, DTYPE, _mm256_add_ps(rounded(_mm256_mul_ps(b, c), DTYPE), _mm256_mul_ps(a, s)));
    }
    for (; i < half; ++i) {
      float a = float_of(x, from + i, DTYPE), b = float_of(x, from + half + i, DTYPE);
      float c = float_of(cosine, angles + i, DTYPE), s = float_of(sine, angles + i, DTYPE);
      put(y, to + i, DTYPE, rounded(a * c, DTYPE) - b * s);
      put(y, to + half + i, DTYPE, rounded(b * c, DTYPE) + a * s);
    }
  }
}
