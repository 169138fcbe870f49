// One token of a row through a recurrent mixer, its products left out (kernels/cpu/recurrent_step.py): convolution,
// gates, state and norm in one pass, in the order and with the roundings of runtime/models/recurrent.py; compiled as
// products.cpp is.
#include <omp.h>

#include "recurrent.h"
#include "row_wise.h"
#include "threads.h"

static __m256 sigmoid_of(__m256 v) {
  const __m256 one = _mm256_set1_ps(1), e = exp_of_eight(_mm256_or_ps(v, _mm256_set1_ps(-0.0f)));  // e^-|v|
  return _mm256_div_ps(_mm256_blendv_ps(one, e, v), _mm256_add_ps(one, e));
}
static float sigmoid_of(float v) { return 1 / (1 + std::exp(-v)); }
static float softplus_of(float v) { return v > 20 ? v : std::log1p(std::exp(v)); }

// mixed [channels] = silu of the convolution of a row's new inputs, whose tail moves on.
template <int DTYPE>
static void convolve_row(const Mixer& l, const Tokens& t, int64_t b, float* mixed) {
  const int64_t C = l.channels, size = size_of(DTYPE), from = t.at[b] * t.x_pitch, before = l.taps - 1;
  uint8_t* tail = (uint8_t*)t.tails + t.slots[b] * before * C * size;
  if (t.fresh[b]) std::memset(tail, 0, before * C * size);
  auto input = [&](int64_t c) {  // of eight channels
    __m256 x = eight_of(t.x, from + c, DTYPE);
    return l.kind == SHORT_CONV ? rounded(_mm256_mul_ps(x, eight_of(t.x, from + 2 * C + c, DTYPE)), DTYPE) : x;
  };
  auto input_one = [&](int64_t c) {
    float x = float_of(t.x, from + c, DTYPE);
    return l.kind == SHORT_CONV ? rounded(x * float_of(t.x, from + 2 * C + c, DTYPE), DTYPE) : x;
  };
  int64_t c = 0;
  for (; c + 8 <= C; c += 8) {
    const __m256 x = input(c);
    __m256 sum = x;
    if (l.conv) {
      sum = _mm256_setzero_ps();
      for (int64_t k = 0; k < before; ++k)
        sum = _mm256_add_ps(sum, _mm256_mul_ps(eight_of(tail, k * C + c, DTYPE), _mm256_loadu_ps(l.conv + k * C + c)));
      sum = _mm256_add_ps(sum, _mm256_mul_ps(x, _mm256_loadu_ps(l.conv + before * C + c)));
      if (l.conv_bias) sum = _mm256_add_ps(sum, _mm256_loadu_ps(l.conv_bias + c));
      sum = rounded(sum, DTYPE);
    }
    if (l.kind != SHORT_CONV) sum = rounded(_mm256_mul_ps(sum, sigmoid_of(sum)), DTYPE);
    _mm256_storeu_ps(mixed + c, sum);
    for (int64_t k = 0; k + 1 < before; ++k) std::memcpy(tail + (k * C + c) * size, tail + ((k + 1) * C + c) * size, 8 * size);
    if (before) put_eight(tail, (before - 1) * C + c, DTYPE, x);
  }
  for (; c < C; ++c) {
    const float x = input_one(c);
    float sum = x;
    if (l.conv) {
      sum = 0;
      for (int64_t k = 0; k < before; ++k) sum += float_of(tail, k * C + c, DTYPE) * l.conv[k * C + c];
      sum += x * l.conv[before * C + c];
      if (l.conv_bias) sum += l.conv_bias[c];
      sum = rounded(sum, DTYPE);
    }
    if (l.kind != SHORT_CONV) sum = rounded(sum * sigmoid_of(sum), DTYPE);
    mixed[c] = sum;
    for (int64_t k = 0; k + 1 < before; ++k) std::memcpy(tail + (k * C + c) * size, tail + ((k + 1) * C + c) * size, size);
    if (before) put(tail, (before - 1) * C + c, DTYPE, x);
  }
}

// state [N, P] = a state + k u^T; out [P] = its q: read once with q and k, then moved on.
static void move_state(float* state, const float* q, const float* k, const float* a, const float* v, bool delta, float beta,
                       int64_t N, int64_t P, float* out, float* u) {
  for (int64_t p = 0; p < P; ++p) out[p] = u[p] = 0;
  float both = 0;
  for (int64_t n = 0; n < N; ++n) {
    const float *row = state + n * P, aq = a[n] * q[n], ak = a[n] * k[n];
    both += q[n] * k[n];
    if (delta)
      for (int64_t p = 0; p < P; ++p) out[p] += aq * row[p], u[p] += ak * row[p];
    else
      for (int64_t p = 0; p < P; ++p) out[p] += aq * row[p];
  }
  for (int64_t p = 0; p < P; ++p) {
    u[p] = delta ? (v[p] - u[p]) * beta : v[p];
    out[p] += both * u[p];
  }
  for (int64_t n = 0; n < N; ++n) {
    float *row = state + n * P, an = a[n], kn = k[n];
    for (int64_t p = 0; p < P; ++p) row[p] = an * row[p] + kn * u[p];
  }
}

// One head of a row: its queries, keys, values, decay and share, then its state.
template <int DTYPE>
static void head_of_row(const Mixer& l, const Tokens& t, int64_t b, int64_t h, const float* mixed, float* out) {
  const int64_t H = l.heads, N = l.key_dim, P = l.value_dim, width = l.key_heads * N, own = h / (H / l.key_heads) * N;
  const int64_t steps = t.at[b] * t.steps_pitch;
  static thread_local std::vector<float> held;
  held.resize(3 * N + 2 * P);
  float *q = held.data(), *k = q + N, *a = k + N, *u = a + N, *fed = u + P;
  const bool delta = l.kind == GATED_DELTA || l.kind == KDA, mamba = l.kind == MAMBA2;
  const float* v = mamba ? mixed + h * P : mixed + 2 * width + h * P;
  const float* from_q = mamba ? mixed + H * P + width + own : mixed + own;
  const float* from_k = mamba ? mixed + H * P + own : mixed + width + own;
  float q_by = 1, k_by = 1, beta = 1;
  if (delta) {
    float qq = 0, kk = 0;
    for (int64_t n = 0; n < N; ++n) qq += from_q[n] * from_q[n], kk += from_k[n] * from_k[n];
    q_by = 1 / std::sqrt(qq + 1e-6f) / std::sqrt((float)N), k_by = 1 / std::sqrt(kk + 1e-6f);
    beta = sigmoid_of(float_of(t.steps, steps + h, DTYPE)) * (float)l.beta_factor;
  }
  for (int64_t n = 0; n < N; ++n) q[n] = from_q[n] * q_by, k[n] = from_k[n] * k_by;
  if (l.kind == KDA) {
    for (int64_t n = 0; n < N; ++n)
      a[n] = std::exp(-l.rate[h] * softplus_of(float_of(t.steps, steps + H + h * N + n, DTYPE) + l.step_bias[h * N + n]));
  } else {
    float decay = l.rate[h];
    if (mamba) {
      const float step = float_of(t.steps, steps + h, DTYPE) + l.step_bias[h];
      const float dt = l.steps_in_dtype ? rounded(softplus_of(rounded(step, DTYPE)), DTYPE) : softplus_of(step);
      decay *= dt;
      for (int64_t p = 0; p < P; ++p) fed[p] = v[p] * dt;
    } else if (delta) {
      decay *= softplus_of(float_of(t.steps, steps + H + h, DTYPE) + l.step_bias[h]);
    }
    const float each = std::exp(-decay);
    for (int64_t n = 0; n < N; ++n) a[n] = each;
  }
  float* state = t.matrices + (t.slots[b] * H + h) * N * P;
  if (t.fresh[b]) std::memset(state, 0, N * P * sizeof(float));
  move_state(state, q, k, a, mamba ? fed : v, delta, beta, N, P, out + h * P, u);
  if (mamba)
    for (int64_t p = 0; p < P; ++p) out[h * P + p] += v[p] * l.skip[h];
}

// What the gate makes of channel i of a row.
template <int DTYPE>
static float gate_of(const Mixer& l, const Tokens& t, int64_t b, int64_t i) {
  const float g = float_of(t.gate, t.at[b] * t.gate_pitch + i, DTYPE);
  return l.sigmoid ? sigmoid_of(g) : g * sigmoid_of(g);
}

// The row's output of what its state gave, normalised and gated.
template <int DTYPE>
static void finish_row(const Mixer& l, const Tokens& t, int64_t b, float* out) {
  const int64_t inner = l.kind == SHORT_CONV ? l.channels : l.heads * l.value_dim, to = t.at[b] * inner;
  if (l.kind == SHORT_CONV) {
    for (int64_t i = 0; i < inner; ++i)
      put(t.out, to + i, DTYPE, out[i] * float_of(t.gate, t.at[b] * t.gate_pitch + i, DTYPE));
    return;
  }
  const bool delta = l.kind == GATED_DELTA || l.kind == KDA;
  if (l.kind != MAMBA2)
    for (int64_t i = 0; i < inner; ++i) out[i] = rounded(out[i], DTYPE);
  if (!delta && !l.norm_first)
    for (int64_t i = 0; i < inner; ++i) out[i] *= gate_of<DTYPE>(l, t, b, i);
  if (!delta && !l.norm) {
    if (l.norm_first)
      for (int64_t i = 0; i < inner; ++i) out[i] *= gate_of<DTYPE>(l, t, b, i);
  } else {
    const int64_t groups = delta ? l.heads : l.norm_groups, n = inner / groups;
    for (int64_t g = 0; g < groups; ++g) {
      float sum = 0, *part = out + g * n;
      for (int64_t i = 0; i < n; ++i) sum += part[i] * part[i];
      const float inverse = 1 / std::sqrt(sum / (float)n + (float)l.norm_eps);
      for (int64_t i = 0; i < n; ++i) {
        const float weight = delta ? float_of(l.norm, i, DTYPE) : ((const float*)l.norm)[g * n + i];
        const float normed = part[i] * inverse * weight;
        part[i] = delta ? rounded(normed, DTYPE) * gate_of<DTYPE>(l, t, b, g * n + i)
                        : l.norm_first ? normed * gate_of<DTYPE>(l, t, b, g * n + i) : normed;
      }
    }
  }
  for (int64_t i = 0; i < inner; ++i) put(t.out, to + i, DTYPE, out[i]);
}

template <int DTYPE>
static void step_of(const Mixer& l, const Tokens& t) {
  const int64_t inner = l.kind == SHORT_CONV ? 0 : l.heads * l.value_dim, each = l.channels + inner;
  std::vector<float> held(t.B * each);
  const int64_t heads = l.kind == SHORT_CONV ? 0 : l.heads, state = heads * l.key_dim * l.value_dim;
  const int threads = threads_for(t.B * (state + l.channels), t.threads);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t b = 0; b < t.B; ++b) convolve_row<DTYPE>(l, t, b, held.data() + b * each);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < t.B * heads; ++i) {
      float* mixed = held.data() + i / heads * each;
      head_of_row<DTYPE>(l, t, i / heads, i % heads, mixed, mixed + l.channels);
    }
#pragma omp for schedule(static)
    for (int64_t b = 0; b < t.B; ++b) finish_row<DTYPE>(l, t, b, held.data() + b * each + (inner ? l.channels : 0));
  }
}

void llmpq_recurrent(const Mixer* mixer, const Tokens* tokens) {
  if (mixer->dtype == FLOAT32) step_of<FLOAT32>(*mixer, *tokens);
  else if (mixer->dtype == BFLOAT16) step_of<BFLOAT16>(*mixer, *tokens);
  else step_of<FLOAT16>(*mixer, *tokens);
}
