// A decoder layer of a few rows as one call (kernels/cpu/native_layer.py): its products, norms, rotations and gate are
// the library's own functions, in the order and with the roundings of separate calls; compiled as products.cpp is.
#include <omp.h>

#include "recurrent.h"
#include "row_wise.h"
#include "threads.h"

extern "C" {
void llmpq_multiply(const void* x, const uint8_t* codes, const void* scale, const void* zero, const void* bias,
                    void* y, int64_t M, int64_t N, int64_t K, int64_t k_groups, int64_t groups, int64_t bits,
                    int64_t panels, int64_t dtype, int64_t scale_dtype, int64_t x_bits, int64_t threads);
void llmpq_dense(const void* x, const void* w, const void* bias, void* y, int64_t M, int64_t N, int64_t K,
                 int64_t dtype, int64_t threads);
void llmpq_attend_blocks(const void* q, const void* k, const void* v, void* o, const int64_t* tables,
                         const int64_t* ends, const float* scale, const float* slopes, int64_t B, int64_t H, int64_t G,
                         int64_t D, int64_t columns, int64_t window, int64_t dtype, int64_t threads);
void llmpq_norm(const void* x, const void* weight, void* y, const float* eps, int64_t M, int64_t n, int64_t dtype,
                int64_t threads);
void llmpq_gate(const void* x, void* y, int64_t M, int64_t n, int64_t dtype, int64_t threads);
}

// Members as native_layer.py's structures have them, 8 bytes each.
struct Product {
  int64_t bits;  // 0: not quantised, `codes` the weight
  const void *codes, *scale, *zero, *bias;
  int64_t N, K, k_groups, groups, panels, scale_dtype, x_bits;
};
struct Layer {
  int64_t dtype, hidden, heads, groups, dim, ffn, turned, window;  // turned: channels of a head that are rotated
  int64_t gated;  // qkv ends with a gate of what attention gives
  const void *attn_norm, *mlp_norm, *q_norm, *k_norm;  // the latter two may be null
  const float* slopes;
  double attn_eps, mlp_eps, head_eps, scale;
  Product qkv, o, gate_up, down;  // qkv: of a recurrent mixer what it reads
  const Mixer* mixer;             // null: attention
  Product steps;                  // of the mixer; of no rows where qkv has them
  int64_t wide() const { return (gated ? 2 : 1) * heads + 2 * groups; }  // heads that qkv makes
};
struct Rows {
  int64_t M, threads;
  const void* x;
  void *y, *qkv, *q, *attended;  // [M, hidden]; [M, heads + 2 groups, dim], [M, heads, dim] twice, null for a whole layer
  const void *cosine, *sine;     // [angles, dim / 2]
  int64_t angles;
  void *k, *v;                   // a pool [places, groups, dim] each
  const int64_t *places, *tables, *ends;
  int64_t B, columns;            // rows that have a token each, the others are padding
  const int64_t *at, *slots, *fresh;  // of a recurrent mixer, whose k and v are tails and matrices
};
enum Part : int64_t { BEFORE = 1, ATTENTION = 2, BEHIND = 4 };

// What a calling thread works in, kept for its next call.
struct Room {
  std::vector<uint8_t> held;
  uint8_t* of(int64_t bytes) {
    if ((int64_t)held.size() < bytes + 64) held.resize(bytes + 64);
    return held.data() + (64 - (uintptr_t)held.data() % 64) % 64;
  }
};
static Room& room_for(Part part) {
  static thread_local Room own, heads;
  return part == ATTENTION ? heads : own;
}
static int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static void multiply(const Product& p, const void* x, void* y, const Layer& layer, const Rows& rows) {
  if (p.bits)
    llmpq_multiply(x, (const uint8_t*)p.codes, p.scale, p.zero, p.bias, y, rows.M, p.N, p.K, p.k_groups, p.groups,
                   p.bits, p.panels, layer.dtype, p.scale_dtype, p.x_bits, rows.threads);
  else
    llmpq_dense(x, p.codes, p.bias, y, rows.M, p.N, p.K, layer.dtype, rows.threads);
}

// Queries and keys normed and rotated: queries to a place of their own, keys where they are.
template <int DTYPE>
static void place_heads(const Layer& l, const Rows& r) {
  const int64_t all = l.wide(), pitch = all * l.dim, half = l.turned / 2, size = size_of(DTYPE);
#pragma omp parallel for schedule(static) num_threads(threads_for(r.M * pitch, r.threads))
  for (int64_t m = 0; m < r.M; ++m) {
    if (l.q_norm)
      for (int64_t i = 0; i < l.heads + l.groups; ++i)
        norm_row<DTYPE>(r.qkv, i < l.heads ? l.q_norm : l.k_norm, r.qkv, m * all + i, l.dim, (float)l.head_eps);
    const int64_t from = m * pitch, key = from + l.heads * l.dim, to = m * l.heads * l.dim, at = m % r.angles * half;
    if (l.turned < l.dim)
      std::memcpy((uint8_t*)r.q + to * size, (const uint8_t*)r.qkv + from * size, l.heads * l.dim * size);
    if (l.turned == l.dim) {
      turn_token<DTYPE>(r.qkv, r.cosine, r.sine, r.q, from, to, at, l.heads, half);
      turn_token<DTYPE>(r.qkv, r.cosine, r.sine, r.qkv, key, key, at, l.groups, half);
    } else if (l.turned) {
      for (int64_t i = 0; i < l.heads * l.dim; i += l.dim)
        turn_token<DTYPE>(r.qkv, r.cosine, r.sine, r.q, from + i, to + i, at, 1, half);
      for (int64_t i = 0; i < l.groups * l.dim; i += l.dim)
        turn_token<DTYPE>(r.qkv, r.cosine, r.sine, r.qkv, key + i, key + i, at, 1, half);
    }
  }
}

// What attention gave times the sigmoid of its gate, rounded as two steps.
template <int DTYPE>
static void gate_heads(const Layer& l, const Rows& r) {
  const int64_t n = l.heads * l.dim, pitch = l.wide() * l.dim, gate = (l.heads + 2 * l.groups) * l.dim;
  for (int64_t b = 0; b < r.B; ++b)
    for (int64_t i = 0; i < n; ++i) {
      const float share = rounded(1 / (1 + std::exp(-float_of(r.qkv, b * pitch + gate + i, DTYPE))), DTYPE);
      put(r.attended, b * n + i, DTYPE, float_of(r.attended, b * n + i, DTYPE) * share);
    }
}

// y = a + b, rounded once; y may be either.
template <int DTYPE>
static void add_rows(const void* a, const void* b, void* y, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) put_eight(y, i, DTYPE, _mm256_add_ps(eight_of(a, i, DTYPE), eight_of(b, i, DTYPE)));
  for (; i < n; ++i) put(y, i, DTYPE, float_of(a, i, DTYPE) + float_of(b, i, DTYPE));
}

static void before_attention(const Layer& l, const Rows& r) {
  uint8_t* normed = room_for(BEFORE).of(r.M * l.hidden * size_of(l.dtype));
  const float eps = (float)l.attn_eps;
  llmpq_norm(r.x, l.attn_norm, normed, &eps, r.M, l.hidden, l.dtype, r.threads);
  multiply(l.qkv, normed, r.qkv, l, r);
  auto place = l.dtype == FLOAT32 ? place_heads<FLOAT32> : l.dtype == BFLOAT16 ? place_heads<BFLOAT16> : place_heads<FLOAT16>;
  place(l, r);
}

static void attend_in_pool(const Layer& l, const Rows& r) {
  const int64_t bytes = l.groups * l.dim * size_of(l.dtype), all = bytes / l.groups * l.wide();
  const uint8_t* keys = (const uint8_t*)r.qkv + bytes / l.groups * l.heads;
  for (int64_t b = 0; b < r.B; ++b) {
    std::memcpy((uint8_t*)r.k + r.places[b] * bytes, keys + b * all, bytes);
    std::memcpy((uint8_t*)r.v + r.places[b] * bytes, keys + b * all + bytes, bytes);
  }
  const float scale = (float)l.scale;
  const int64_t row = l.heads * l.dim * size_of(l.dtype);
  llmpq_attend_blocks(r.q, r.k, r.v, r.attended, r.tables, r.ends, &scale, l.slopes, r.B, l.heads, l.groups, l.dim,
                      r.columns, l.window, l.dtype, r.threads);
  if (l.gated) (l.dtype == FLOAT32 ? gate_heads<FLOAT32> : l.dtype == BFLOAT16 ? gate_heads<BFLOAT16> : gate_heads<FLOAT16>)(l, r);
  std::memset((uint8_t*)r.attended + r.B * row, 0, (r.M - r.B) * row);
}

// A recurrent mixer up to the matrix behind it: what that is multiplied with, in `attended`.
static void mix(const Layer& l, Rows& r) {
  const Mixer& m = *l.mixer;
  const int64_t inner = l.o.K, size = size_of(l.dtype), into = lines(r.M * l.qkv.N * size), steps = lines(r.M * l.steps.N * size);
  uint8_t* made = room_for(ATTENTION).of(into + steps + lines(r.M * l.hidden * size) + r.M * inner * size);
  uint8_t *more = made + into, *normed = more + steps;
  r.attended = normed + lines(r.M * l.hidden * size);
  const float eps = (float)l.attn_eps;
  llmpq_norm(r.x, l.attn_norm, normed, &eps, r.M, l.hidden, l.dtype, r.threads);
  multiply(l.qkv, normed, made, l, r);
  if (l.steps.N) multiply(l.steps, normed, more, l, r);
  auto part = [&](int64_t channels) { return made + channels * size; };
  Tokens t{r.B, r.threads, r.at, r.slots, r.fresh, made, part(m.channels), made, l.qkv.N, l.qkv.N, l.qkv.N, r.k, (float*)r.v, r.attended};
  if (m.kind == MAMBA2) t.gate = made, t.x = part(inner), t.steps = part(inner + m.channels);
  if (l.steps.N) t.steps = more, t.steps_pitch = l.steps.N;
  if (r.B < r.M) std::memset(r.attended, 0, r.M * inner * size);
  llmpq_recurrent(&m, &t);
}

static void behind_attention(const Layer& l, const Rows& r) {
  const int64_t stream = lines(r.M * l.hidden * size_of(l.dtype)), wide = lines(r.M * l.ffn * size_of(l.dtype));
  uint8_t *made = room_for(BEHIND).of(2 * stream + 3 * wide), *normed = made + stream, *both = normed + stream;
  auto add = l.dtype == FLOAT32 ? add_rows<FLOAT32> : l.dtype == BFLOAT16 ? add_rows<BFLOAT16> : add_rows<FLOAT16>;
  multiply(l.o, r.attended, made, l, r);
  add(made, r.x, r.y, r.M * l.hidden);
  const float eps = (float)l.mlp_eps;
  llmpq_norm(r.y, l.mlp_norm, normed, &eps, r.M, l.hidden, l.dtype, r.threads);
  multiply(l.gate_up, normed, both, l, r);
  llmpq_gate(both, both + 2 * wide, r.M, l.ffn, l.dtype, r.threads);
  multiply(l.down, both + 2 * wide, made, l, r);
  add(r.y, made, r.y, r.M * l.hidden);
}

// The parts of a layer that are asked for, on the rows of one step.
extern "C" void llmpq_layer(const Layer* layer, const Rows* rows, int64_t parts) {
  Rows r = *rows;
  if (layer->mixer && (parts & BEFORE)) {
    mix(*layer, r);
    behind_attention(*layer, r);
    return;
  }
  if (!r.qkv) {
    const int64_t heads = lines(r.M * layer->heads * layer->dim * size_of(layer->dtype));
    uint8_t* held = room_for(ATTENTION).of(2 * heads + r.M * layer->wide() * layer->dim * size_of(layer->dtype));
    r.q = held, r.attended = held + heads, r.qkv = held + 2 * heads;
  }
  if (parts & BEFORE) before_attention(*layer, r);
  if (parts & ATTENTION) attend_in_pool(*layer, r);
  if (parts & BEHIND) behind_attention(*layer, r);
}

// All parts of n layers, one after the other: `rows` of each pool, `pools` which of them a layer's k and v are in.
extern "C" void llmpq_layers(const Layer* const* layers, const Rows* rows, const int64_t* pools, void* const* k,
                             void* const* v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    Rows r = rows[pools[i]];
    r.k = k[i], r.v = v[i];
    if (i) r.x = r.y;
    llmpq_layer(layers[i], &r, BEFORE | ATTENTION | BEHIND);
  }
}
