// A recurrent mixer, its products left out, and the tokens that it takes (recurrent.cpp).
#pragma once
#include <cstdint>

enum Kind : int64_t { GATED_DELTA = 0, KDA = 1, LIGHTNING = 2, MAMBA2 = 3, SHORT_CONV = 4 };

// Members as recurrent_step.py's structures have them, 8 bytes each; what a kind does not have is null.
struct Mixer {
  int64_t kind, dtype, heads, key_heads, key_dim, value_dim, channels, taps, sigmoid, norm_groups, norm_first, steps_in_dtype;
  const float *conv, *conv_bias;  // [taps, channels], [channels]
  const float *rate, *step_bias;  // [heads]; [heads], KDA's [heads, key_dim]
  const float *skip;              // [heads]
  const void* norm;               // delta rules: [value_dim] in dtype; others: [inner] in float32
  double norm_eps, beta_factor;
};
struct Tokens {
  int64_t B, threads;
  const int64_t *at, *slots, *fresh;  // [B]: which token is a row's, its slot, whether it begins from zeros
  const void *x, *gate, *steps;       // of each token, so many elements apart
  int64_t x_pitch, gate_pitch, steps_pitch;
  void* tails;      // [slots, taps - 1, channels]
  float* matrices;  // [slots, heads, key_dim, value_dim]
  void* out;        // [tokens, inner]
};

extern "C" void llmpq_recurrent(const Mixer* mixer, const Tokens* tokens);
