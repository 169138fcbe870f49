// Attention of single queries over a low-bit KV cache, its blocks as kernels/formats/kv_block.py draws
// them for GPUs, read in place; the newest tokens from the ring in 16 bits.
//
// 16 words that follow each other hold two tokens' keys (or two channels' values of 64 tokens) in the low
// and the high byte of their 16-bit halves: shifted and masked they are an operand of the integer dot
// product. The other is q times the channels' scales (or the tokens' weights times their scales) rounded
// to 16 bits a block: 2^-16 of its largest, where reading the cache as bfloat16 costs 2^-9. float32 takes two
// such rows, the second what the first left.
#pragma once
#include "attend.h"

struct Packed {
  const uint32_t *k_words, *v_words;   // [P, G, 4 bits channels], of keys' bits and of values'
  // keys of 16 bits stand as they are: [P, G, 128, channels]
  const uint16_t *k_params, *v_params; // fp16
  const void *k_ring, *v_ring;         // [S, G, ring, D]
  int64_t G, dim, channels, ring, key_bits, value_bits;
  int64_t words(int64_t bits) const { return 4 * bits * channels; }
};

// What a query head sees beside its keys: as ScoreRule of kernels/kv/reference.py.
struct Rule { int64_t window; float scale, cap; const float *slopes, *sinks; };

struct RingPlace {
  const void *k, *v;
  int64_t dim, base, ring;
  int64_t operator()(int64_t t) const { return base + t % ring * dim; }
};

// A token's place among the parameters of a block ("thread order").
static inline int64_t thread_order(int64_t t) { return t / 64 * 64 + t % 16 / 2 * 8 + t % 64 / 16 * 2 + t % 2; }

// Keys of a block that stand as they are.
struct KeyPlace {
  const void *k, *v;
  int64_t dim, base;
  int64_t operator()(int64_t t) const { return base + t * dim; }
};

// Lanes of the one of two runs of rows that share 16 words.
static inline Floats half_lanes(Floats v, int second) {
#if WIDE
  return _mm512_maskz_mov_ps(second ? 0xcccc : 0x3333, v);
#else
  return second ? _mm256_blend_ps(v, floats(0), 0x33) : _mm256_blend_ps(v, floats(0), 0xcc);
#endif
}

constexpr int HALVES = 16 / LANES;  // vectors of 16 words

template <int BITS>
static inline Ints codes_of(Ints words, int shift) {
#if WIDE
  return _mm512_and_si512(_mm512_srli_epi16(words, shift), _mm512_set1_epi16((1 << BITS) - 1));
#else
  return _mm256_and_si256(_mm256_srli_epi16(words, shift), _mm256_set1_epi16((1 << BITS) - 1));
#endif
}

// The order in which a row's codes stand in words: 32 for each plane of each 16 words.
struct Order {
  int64_t planes;
  int64_t chunks;               // of 16 words, of a row
  bool shared;                  // two rows share 16 words
  std::vector<int16_t> places;  // which channel of a key, which token of 64 of a value
  std::vector<float> gain;      // what a stored scale is divided by, inverse

  static Order of_keys(int64_t bits, int64_t channels) {
    int64_t words = channels * bits / 64;
    Order order{8 / bits, words == 2 ? 1 : words / 4, words == 2, {}, {}};
    order.lay([&](int64_t octet, int64_t t, int64_t h) { return t * (channels / 4) + 2 * octet + h; });
    for (int64_t c = 0; c < channels; ++c) order.gain.push_back(order.of_octet(c % (channels / 4) / 2));
    return order;
  }
  static Order of_values(int64_t bits) {
    Order order{8 / bits, bits == 8 ? 2 : 1, bits == 2, {}, {}};
    order.lay([](int64_t octet, int64_t t, int64_t h) { return octet / 2 * 16 + 2 * (2 * t + h) + octet % 2; });
    for (int64_t t = 0; t < BLOCK; ++t) order.gain.push_back(order.of_octet(t % 64 / 16 * 2 + t % 2));
    return order;
  }

 private:
  float of_octet(int64_t octet) const {
    int64_t bits = 8 / planes;
    return std::ldexp(1.0f, (int)(octet % planes * bits + bits - 8));
  }
  template <class F>
  void lay(F at) {
    for (int64_t j = 0; j < chunks; ++j)
      for (int64_t i = 0; i < planes; ++i)
        for (int64_t l = 0; l < 32; ++l) {
          int64_t w = l / 2 % 4, octets = shared ? w % 2 : 4 * j + w;
          places.push_back((int16_t)at(octets * planes + i, l / 8, l % 2));
        }
  }
};

// f(bits) where bits are known as it is compiled.
template <class F>
static inline void with_bits(int64_t bits, F f) {
  if (bits == 8) f(std::integral_constant<int, 8>());
  else if (bits == 4) f(std::integral_constant<int, 4>());
  else f(std::integral_constant<int, 2>());
}

constexpr float REST = 0x1p-15f;  // a second part's step, of the first's

// x [n] rounded to 16 bits in the order `place`, what that leaves `apart` further on; returns the step.
template <int PARTS>
static inline float round_in_order(float* x, int64_t n, const std::vector<int16_t>& place, int16_t* out, int64_t apart) {
  float most = 0;
  for (int64_t i = 0; i < n; ++i) most = std::max(most, std::fabs(x[i]));
  if (!(most > 0x1p-100f)) most = 0;
  const float first = most / 32767;
  float step = first, inverse = most > 0 ? 32767 / most : 0;
  for (int part = 0; part < PARTS; ++part, step *= REST, inverse /= REST, out += apart) {
    alignas(64) int16_t whole[256];
    for (int64_t i = 0; i < n; ++i) {
      whole[i] = (int16_t)(x[i] * inverse + (x[i] < 0 ? -0.5f : 0.5f));
      x[i] -= (float)whole[i] * step;
    }
    for (size_t i = 0; i < place.size(); ++i) out[i] = whole[place[i]];
  }
  return first;
}

// What dot products of x [n] with codes begin at, so that a code counts from the middle of its grid: the
// large sums of codes and zeros cancel as integers, not as floats.
template <int BITS>
static inline Ints from_middle(const int16_t* x, size_t n) {
  alignas(64) int16_t middle[2 * LANES];
  std::fill(middle, middle + 2 * LANES, (int16_t)-(1 << (BITS - 1)));
  Ints sum = zero_ints();
  for (size_t i = 0; i < n; i += 2 * LANES) sum = dot(sum, load(middle), load(x + i));
  return sum;
}

// Dot products of two rows of codes (low and high bytes), `chunks` times 16 words from p on 128 words apart,
// with HEADS rows of rounded values.
template <int BITS, int HEADS>
static inline void two_rows(const uint32_t* p, int64_t chunks, const int16_t* q, int64_t stride, const Ints* start,
                            Ints (&acc)[2][HEADS]) {
  constexpr int PLANES = 8 / BITS;
  for (int r = 0; r < 2; ++r)
    for (int h = 0; h < HEADS; ++h) acc[r][h] = start[h];
  for (int64_t j = 0; j < chunks; ++j)
    for (int half = 0; half < HALVES; ++half) {
      Ints words = load((const int16_t*)(p + j * 128) + half * 2 * LANES);
      for (int i = 0; i < PLANES; ++i) {
        Ints low = codes_of<BITS>(words, BITS * i), high = codes_of<BITS>(words, 8 + BITS * i);
        for (int h = 0; h < HEADS; ++h) {
          Ints x = load(q + h * stride + (j * PLANES + i) * 32 + half * 2 * LANES);
          acc[0][h] = dot(acc[0][h], low, x);
          acc[1][h] = dot(acc[1][h], high, x);
        }
      }
    }
}

// Sums of a head's dot products: PARTS of them, HEADS apart.
template <int PARTS, int HEADS, int ROWS>
static inline Floats joined(const Ints (&acc)[2][ROWS], int r, int h) {
  Floats v = to_floats(acc[r][h]);
  if constexpr (PARTS == 2) v = fma(to_floats(acc[r][HEADS + h]), floats(REST), v);
  return v;
}

// One task: HEADS query heads of key/value head g; float32 takes two PARTS of rounded values, 30 bits.
template <int PARTS, int HEADS>
struct PackedHeads {
  static constexpr int ROWS = HEADS * PARTS;
  const Packed& pool;
  const Order &of_keys, &of_values;
  const Rule& rule;
  int64_t g, padded, stride;
  const float* q;  // [HEADS, padded]
  std::vector<int16_t> rounded;
  std::vector<float> scale, zero, scaled;
  Ints start[ROWS];

  PackedHeads(const Packed& pool, const Order& of_keys, const Order& of_values, const Rule& rule, int64_t g,
              const float* q)
      : pool(pool), of_keys(of_keys), of_values(of_values), rule(rule), g(g), padded(pool.channels),
        stride((int64_t)std::max(of_keys.places.size(), of_values.places.size())), q(q), rounded(ROWS * stride),
        scale(256), zero(256), scaled(256) {}

  template <int BITS>
  void begin(size_t n) {
    for (int row = 0; row < ROWS; ++row) start[row] = from_middle<BITS>(rounded.data() + row * stride, n);
  }

  // scores[h, 128] of the block on `page`, whose keys stand as they are.
  template <int DTYPE>
  void plain_keys(int64_t page, float* scores, int64_t scores_stride) {
    int64_t C = pool.channels;
    KeyPlace at{pool.k_words, nullptr, C, (page * pool.G + g) * BLOCK * C};
    scores_of<DTYPE, HEADS>(at, q, padded, 0, BLOCK, scores, scores_stride);
  }

  // scores[h, 128] of the block on `page`.
  template <int BITS>
  void keys(int64_t page, float* scores, int64_t scores_stride) {
    constexpr float MIDDLE = 1 << (BITS - 1);
    const Order& order = of_keys;
    int64_t block = page * pool.G + g, C = pool.channels;
    const uint32_t* words = pool.k_words + block * pool.words(BITS);
    float step[HEADS], off[HEADS];
    copy_floats(scale.data(), pool.k_params, block * 2 * C, C, FLOAT16);
    copy_floats(zero.data(), pool.k_params, block * 2 * C + C, C, FLOAT16);
    for (int64_t c = 0; c < C; ++c) scale[c] *= order.gain[c];
    for (int h = 0; h < HEADS; ++h) {
      const float* own = q + h * padded;
      off[h] = 0;
      for (int64_t c = 0; c < C; ++c) {
        scaled[c] = own[c] * scale[c];
        off[h] += own[c] * (zero[c] + MIDDLE * scale[c]);
      }
      step[h] = round_in_order<PARTS>(scaled.data(), C, order.places, rounded.data() + h * stride, HEADS * stride);
    }
    begin<BITS>(order.places.size());
    for (int64_t t = 0; t < BLOCK; t += order.shared ? 32 : 16) {
      int64_t at = t / 64 * (pool.words(BITS) / 2) + (order.shared ? t % 64 / 32 : t % 64 / 16 * order.chunks) * 128;
      sixteen<BITS>(words + at, t, scores, scores_stride, step, off);
    }
  }

  template <int BITS>
  void sixteen(const uint32_t* words, int64_t t, float* scores, int64_t scores_stride, const float* step,
               const float* off) {
    Floats sums[2][HEADS][16];
    for (int eighth = 0; eighth < 8; ++eighth) {
      Ints acc[2][ROWS];
      two_rows<BITS, ROWS>(words + eighth * 16, of_keys.chunks, rounded.data(), stride, start, acc);
      for (int r = 0; r < 2; ++r)
        for (int h = 0; h < HEADS; ++h) {
          Floats v = joined<PARTS, HEADS>(acc, r, h);
          sums[0][h][2 * eighth + r] = of_keys.shared ? half_lanes(v, 0) : v;
          if (of_keys.shared) sums[1][h][2 * eighth + r] = half_lanes(v, 1);
        }
    }
    for (int run = 0; run < (of_keys.shared ? 2 : 1); ++run, t += 16)
      for (int h = 0; h < HEADS; ++h) {
        float* to = scores + h * scores_stride + t;
        totals(sums[run][h], to);
        for (int i = 0; i < 16; ++i) to[i] = to[i] * step[h] + off[h];
      }
  }

  // Adds the block's values, weighted, to lanes [HEADS, rows of words, 16 channels] and `constant` [HEADS].
  template <int BITS>
  void values(int64_t page, const float* weights, int64_t weights_stride, float* lanes, double* constant) {
    constexpr float MIDDLE = 1 << (BITS - 1);
    const Order& order = of_values;
    int64_t block = page * pool.G + g, rows = value_rows();
    alignas(64) float s[BLOCK], z[BLOCK];
    copy_floats(scale.data(), pool.v_params, block * 2 * BLOCK, BLOCK, FLOAT16);
    copy_floats(zero.data(), pool.v_params, block * 2 * BLOCK + BLOCK, BLOCK, FLOAT16);
    for (int64_t t = 0; t < BLOCK; ++t) {
      s[t] = scale[thread_order(t)] * order.gain[t];
      z[t] = zero[thread_order(t)] + MIDDLE * s[t];
    }
    constexpr int64_t chunks = BITS == 8 ? 2 : 1;
    for (int64_t tile = 0; tile < 2; ++tile) {
      const uint32_t* words = pool.v_words + block * pool.words(BITS) + tile * (pool.words(BITS) / 2);
      float step[HEADS], most = 0;
      for (int h = 0; h < HEADS; ++h) {
        const float* own = weights + h * weights_stride + tile * 64;
        for (int64_t t = 0; t < 64; ++t) {
          scaled[t] = own[t] * s[tile * 64 + t];
          constant[h] += (double)own[t] * z[tile * 64 + t];
        }
        step[h] = round_in_order<PARTS>(scaled.data(), 64, order.places, rounded.data() + h * stride, HEADS * stride);
        most = std::max(most, step[h]);
      }
      if (most == 0) continue;
      begin<BITS>(order.places.size());
      for (int64_t row = 0; row < rows; ++row)
        for (int eighth = 0; eighth < 8; ++eighth) {
          Ints acc[2][ROWS];
          two_rows<BITS, ROWS>(words + row * chunks * 128 + eighth * 16, chunks, rounded.data(), stride, start, acc);
          for (int h = 0; h < HEADS; ++h)
            for (int r = 0; r < 2; ++r) {
              float* to = lanes + (((h * rows + row) * 8 + eighth) * 2 + r) * LANES;
              store(to, fma(joined<PARTS, HEADS>(acc, r, h), floats(step[h]), load(to)));
            }
        }
    }
  }

  // Rows of words of a tile of values: of 16 channels, of 2 bits 32.
  int64_t value_rows() const { return pool.channels / (pool.value_bits == 2 ? 32 : 16); }

  // out [h][padded] = the lanes' sums, channel by channel.
  void gather(const float* lanes, const double* constant, float* const* out) const {
    int64_t C = pool.channels, rows = value_rows(), each = pool.value_bits == 2 ? 2 : 1;
    for (int h = 0; h < HEADS; ++h)
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < 16; ++i) {
          Floats v = load(lanes + ((h * rows + row) * 16 + i) * LANES);
          for (int64_t run = 0; run < each; ++run)
            out[h][i / 2 * (C / 8) + 2 * (row * each + run) + i % 2] +=
                total(each == 2 ? half_lanes(v, (int)run) : v) + (float)constant[h];
        }
  }

  // Row's keys: blocks b0 .. b1 of the table and, in the ring, positions from r0 on; it sees from `first` to `last`.
  template <int DTYPE>
  void attend(const int32_t* table, int64_t slot, int64_t b0, int64_t b1, int64_t r0, int64_t first, int64_t last,
              bool with_ring, const float* slopes, float* const* out) {
    int64_t packed = (b1 - b0) * BLOCK, n = packed + (with_ring ? last + 1 - r0 : 0), long_n = (n + 15) / 16 * 16;
    std::vector<float> scores(HEADS * long_n), sums(HEADS * padded);
    std::vector<float> lanes(packed ? HEADS * pool.channels * LANES : 0);
    RingPlace at{pool.k_ring, pool.v_ring, pool.dim, (slot * pool.G + g) * pool.ring * pool.dim, pool.ring};
    if (pool.key_bits == 16)
      for (int64_t b = b0; b < b1; ++b) plain_keys<DTYPE>(table[b], scores.data() + (b - b0) * BLOCK, long_n);
    else
      with_bits(pool.key_bits, [&](auto bits) {
        for (int64_t b = b0; b < b1; ++b) keys<bits()>(table[b], scores.data() + (b - b0) * BLOCK, long_n);
      });
    if (with_ring) scores_of<DTYPE, HEADS>(at, q, padded, r0, last + 1, scores.data() + packed, long_n);
    double constant[HEADS] = {};
    for (int h = 0; h < HEADS; ++h) {
      float* own = scores.data() + h * long_n;
      if (rule.cap)
        for (int64_t i = 0; i < n; ++i) own[i] = rule.cap * std::tanh(own[i] / rule.cap);
      if (slopes)
        for (int64_t i = 0; i < n; ++i)
          own[i] += slopes[h] * (float)((i < packed ? b0 * BLOCK + i : r0 + i - packed) - last);
      for (int64_t i = 0; i < packed && b0 * BLOCK + i < first; ++i) own[i] = -INFINITY;
      out[h][0] = *std::max_element(own, own + n);
      out[h][1] = exponents(own, n, out[h][0]);
    }
    with_bits(pool.value_bits, [&](auto bits) {
      for (int64_t b = b0; b < b1; ++b)
        values<bits()>(table[b], scores.data() + (b - b0) * BLOCK, long_n, lanes.data(), constant);
    });
    float* whole[HEADS];
    for (int h = 0; h < HEADS; ++h) whole[h] = sums.data() + h * padded;
    if (packed) gather(lanes.data(), constant, whole);
    for (int64_t d = 0; with_ring && d < pool.dim; d += 32)
      sum_values<DTYPE, HEADS, 32 / LANES>(at, scores.data() + packed, long_n, r0, last + 1, d, sums.data(), padded);
    for (int h = 0; h < HEADS; ++h) std::memcpy(out[h] + 2, whole[h], padded * sizeof(float));
  }
};

// q, o [B, H, D]; table [S, columns]; the row's query is the token at `last` [B] (-1: a row without one).
template <int PARTS, int DTYPE>
static void attend_packed(const Packed& pool, const void* q, void* o, const int32_t* table, const int64_t* slots,
                          const int64_t* last, int64_t B, int64_t H, int64_t columns, int64_t holdback, const Rule& rule,
                          int threads) {
  int64_t rep = H / pool.G, longest = 0;
  for (int64_t b = 0; b < B; ++b) longest = std::max(longest, last[b] + 1);
  if (rule.window) longest = std::min(longest, rule.window);
  Partials partials(B * H, parts_for(B * pool.G, longest, threads), pool.dim);
  std::vector<float> rows = scaled_rows(q, B * H, pool.dim, partials.padded, rule.scale, DTYPE);
  Order of_keys = pool.key_bits == 16 ? Order{} : Order::of_keys(pool.key_bits, pool.channels);
  Order of_values = Order::of_values(pool.value_bits);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t i = 0; i < B * pool.G * partials.parts; ++i) {
    int64_t parts = partials.parts, part = i % parts, g = i / parts % pool.G, b = i / parts / pool.G, r = 0;
    int64_t end = std::max<int64_t>(0, last[b] - holdback) / BLOCK, first = 0;
    if (rule.window) first = std::max<int64_t>(0, last[b] + 1 - rule.window);
    int64_t begin = std::min(first / BLOCK, end), blocks = end - begin;
    int64_t b0 = begin + blocks * part / parts, b1 = begin + blocks * (part + 1) / parts;
    bool ring = part == parts - 1 && last[b] >= 0;
    auto heads = [&](auto task, int count) {
      int64_t row = b * H + g * rep + r;
      float* out[4];
      for (int j = 0; j < count; ++j) {
        out[j] = partials.of(row + j, part);
        out[j][0] = -INFINITY;
      }
      if (b1 > b0 || ring) task(rows.data() + row * partials.padded, rule.slopes ? rule.slopes + g * rep + r : nullptr, out);
      r += count;
    };
    auto run = [&](auto task, const float* slopes, float* const* out) {
      task.template attend<DTYPE>(table + slots[b] * columns, slots[b], b0, b1, std::max(end * BLOCK, first), first,
                                   last[b], ring, slopes, out);
    };
    auto of = [&](auto count, auto x, auto s, auto out) {
      run(PackedHeads<PARTS, count()>(pool, of_keys, of_values, rule, g, x), s, out);
    };
    auto four = [&](auto x, auto s, auto out) { of(std::integral_constant<int, 4 / PARTS>(), x, s, out); };
    auto two = [&](auto x, auto s, auto out) { of(std::integral_constant<int, 2>(), x, s, out); };
    auto one = [&](auto x, auto s, auto out) { of(std::integral_constant<int, 1>(), x, s, out); };
    while (rep - r >= 4 / PARTS) heads(four, 4 / PARTS);
    while (PARTS == 1 && rep - r >= 2) heads(two, 2);
    while (r < rep) heads(one, 1);
  }
  partials.join(o, B * H, H, rule.sinks, DTYPE, threads);
}

static void attend_packed_of(const Packed& pool, const void* q, void* o, const int32_t* table, const int64_t* slots,
                             const int64_t* last, int64_t B, int64_t H, int64_t columns, int64_t holdback,
                             const Rule& rule, int64_t dtype, int threads) {
  auto run = dtype == FLOAT32    ? attend_packed<2, FLOAT32>
             : dtype == BFLOAT16 ? attend_packed<1, BFLOAT16>
                                  : attend_packed<1, FLOAT16>;
  run(pool, q, o, table, slots, last, B, H, columns, holdback, rule, threads);
}
