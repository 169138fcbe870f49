// y = x w^T for few rows of x on GPUs before Ampere, whose tensor cores Triton does not drive:
// words of w -> registers -> products; w is read once, as it is stored, for ROWS rows of x.
//
//   program   WARPS warps, one block of 16 rows of w, ROWS rows of x; warps take k-groups in turn
//             and add their sums in shared memory, in order: results have the same bits each time
//   TENSOR    products by the tensor cores (mma.m16n8k8, Turing on): a lane's words are their left
//             operand as they lie (formats/weight_layout.py). Else, on Volta, by fused
//             multiply-adds: a lane multiplies the codes that it holds, lanes of a row add at last
//
// Codes become code - zero exactly in float16; sums and scales are float32: a k-group's sum is
// scaled, PARTS times where it has so many scales. `dequantize` makes w in float16 instead.
// gemv_launch.py puts the constants before this.

typedef unsigned short u16;
typedef unsigned int u32;
#define ONE __device__ __forceinline__
#define TILES ((ROWS + 7) / 8)  // of 8 rows of x: the right operand's width
#define WORDS (BITS == 3 ? 192 : 256)  // of a block's k-group, in a plane
#define GROUP_SCALES (PARTS ? PARTS : 1)

ONE u32 minus(u32 a, u32 b) {
  u32 d;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
ONE float low(u32 pair) {
  float f;
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(pair));
  return f;
}
ONE float high(u32 pair) {
  float f;
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(pair));
  return f;
}
ONE u32 halves(float a, float b) {
  u32 d;
  asm("{.reg .f16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}"
      : "=r"(d) : "f"(a), "f"(b));
  return d;
}
ONE float single(u16 bits) { return low((u32)bits); }
ONE u16 half_of(float f) { return (u16)halves(f, 0.0f); }

// A lane's words of one k-group: pairs along k of rows r (r3 = 0) and r + 8 (r3 = 1).
struct Words {
#if BITS == 3
  u32 w[3][2];
  ONE void load(const u32 *P0, const u32 *P1, int lane) {
#pragma unroll
    for (int i = 0; i < 3; i++) {
      const uint2 v = __ldg((const uint2 *)(P0 + 64 * i) + lane);
      w[i][0] = v.x, w[i][1] = v.y;
    }
  }
  ONE u32 codes(int h, int jj, int k3, int r3) const {
    const int p = 4 * jj + 2 * k3 + r3;
    if (p < 15) return w[p / 5][h] >> 3 * (p % 5) & 0x00070007u;
    return (w[0][h] >> 15 & 0x00010001u) | (w[1][h] >> 14 & 0x00020002u) |
           (w[2][h] >> 13 & 0x00040004u);
  }
#else
  u32 w[BITS / 4][8];
  ONE void load(const u32 *P0, const u32 *P1, int lane) {
#pragma unroll
    for (int plane = 0; plane < BITS / 4; plane++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const uint4 v = __ldg((const uint4 *)((plane ? P1 : P0) + 128 * j) + lane);
        u32 *to = w[plane] + 4 * j;
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
      }
  }
  ONE u32 codes(int h, int jj, int k3, int r3) const {
    const int i = 2 * jj + k3, shift = 4 * (2 * h + r3);
    const u32 nibbles = w[0][i] >> shift & 0x000f000fu;
    return BITS == 4 ? nibbles : nibbles << 4 | (w[BITS / 4 - 1][i] >> shift & 0x000f000fu);
  }
#endif
  // code - zero as two neighbours along k; `zero` is 1024 + zero, twice
  ONE u32 pair(int h, int jj, int k3, int r3, u32 zero) const {
    return minus(codes(h, jj, k3, r3) | 0x64006400u, zero);
  }
};

// 1024 + zero of rows r and r + 8, each twice; stored zeros are whole numbers in float16.
ONE void zero_pairs(u32 (&z)[2], u32 stored) {
#if ZEROS
  const u32 one = __byte_perm(stored, stored, 0x1010), two = __byte_perm(stored, stored, 0x3232);
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(z[0]) : "r"(one), "r"(0x64006400u));
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(z[1]) : "r"(two), "r"(0x64006400u));
#else
  z[0] = z[1] = 0x64006400u | (1u << (BITS - 1)) * 0x00010001u;
#endif
}

// The part of a k-group's scales in which k = 64 h + 16 jj lies.
ONE int part_of(int h, int jj) { return PARTS == 4 ? 2 * h + jj / 2 : PARTS == 2 ? h : 0; }

// Unpack what a lane holds of a part of a k-group: use(k, a, b) of each two neighbours along k, from
// `first` on, in rows r (a) and r + 8 (b); codes less their zeros.
template <class Use>
ONE void each_pair(const Words &words, int part, const u32 (&z)[2], int first, Use use) {
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int jj = 0; jj < 4; jj++)
#pragma unroll
      for (int k3 = 0; k3 < 2; k3++) {
        if (part_of(h, jj) != part) continue;
        const u32 a = words.pair(h, jj, k3, 0, z[0]), b = words.pair(h, jj, k3, 1, z[1]);
        use(first + 64 * h + 16 * jj + 8 * k3, a, b);
      }
}

ONE u32 x_pair(const u16 *x, int m, int k, int M, int K) {
  return m < M && k < K ? __ldg((const u32 *)(x + (long long)m * K + k)) : 0u;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    cuda_gemv(const u32 *P0, const u32 *P1, const u32 *S, const u32 *Z, const u16 *x,
              const u16 *bias, const u16 *residual, u16 *y, int M, int N, int K, int groups) {
  __shared__ float shared[WARPS][16 * 8 * TILES];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, c = lane % 4;
  const int m0 = blockIdx.x % ((M + ROWS - 1) / ROWS) * ROWS;
  const long long block = blockIdx.x / ((M + ROWS - 1) / ROWS);
  const int scale_groups = PARTS ? groups * GROUP_SCALES : 1;
#if TENSOR
  float sum[TILES][4] = {};
#else
  float sum[ROWS][2] = {};
#endif
  for (int g = warp; g < groups; g += WARPS) {
    Words words;
    const long long at = (block * groups + g) * WORDS;
    words.load(P0 + at, P1 + at, lane);
    const long long scales = (block * scale_groups + (PARTS ? g * GROUP_SCALES : 0)) * 8 + r;
#pragma unroll
    for (int part = 0; part < GROUP_SCALES; part++) {
      u32 z[2];
      zero_pairs(z, ZEROS ? __ldg(Z + scales + 8 * part) : 0u);
#if TENSOR
      float own[TILES][4] = {};
#else
      float own[ROWS][2] = {};
#endif
      each_pair(words, part, z, 128 * g + 2 * c, [&](int k, u32 a, u32 b) {
#if TENSOR
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          const u32 right = x_pair(x, m0 + 8 * t + r, k, M, K);
          float(&d)[4] = own[t];
          asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, "
              "{%6}, {%0, %1, %2, %3};"
              : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a), "r"(b), "r"(right));
        }
#else
        const float a0 = low(a), a1 = high(a), b0 = low(b), b1 = high(b);
#pragma unroll
        for (int m = 0; m < ROWS; m++) {
          const u32 pair = x_pair(x, m0 + m, k, M, K);
          const float x0 = low(pair), x1 = high(pair);
          own[m][0] = fmaf(a1, x1, fmaf(a0, x0, own[m][0]));
          own[m][1] = fmaf(b1, x1, fmaf(b0, x0, own[m][1]));
        }
#endif
      });
      const u32 scale = __ldg(S + scales + 8 * part);
      const float s0 = low(scale), s1 = high(scale);
#if TENSOR
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[t][i] = fmaf(i < 2 ? s0 : s1, own[t][i], sum[t][i]);
#else
#pragma unroll
      for (int m = 0; m < ROWS; m++) {
        sum[m][0] = fmaf(s0, own[m][0], sum[m][0]);
        sum[m][1] = fmaf(s1, own[m][1], sum[m][1]);
      }
#endif
    }
  }
  // [row of w of the block (16)][row of x]
#if TENSOR
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      shared[warp][(r + 8 * (i / 2)) * 8 * TILES + 8 * t + 2 * c + i % 2] = sum[t][i];
#else
#pragma unroll
  for (int m = 0; m < ROWS; m++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float v = sum[m][i];
      v += __shfl_xor_sync(0xffffffffu, v, 1);
      v += __shfl_xor_sync(0xffffffffu, v, 2);
      if (c == 0) shared[warp][(r + 8 * i) * 8 * TILES + m] = v;
    }
#endif
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * ROWS; i += 32 * WARPS) {
    const int m = m0 + i / 16, row = i % 16;
    if (m >= M) continue;
    float v = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) v += shared[w][row * 8 * TILES + i / 16];
    const long long n = block * 16 + row, to = (long long)m * N + n;
    if (bias) v += single(bias[n]);
    if (residual) v += single(residual[to]);
    y[to] = half_of(v);
  }
}

// w [16 * blocks, K] in float16; a warp writes a block's k-group.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    cuda_dequantize(const u32 *P0, const u32 *P1, const u32 *S, const u32 *Z, u16 *w, int blocks,
                    int K, int groups) {
  const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  const long long item = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
  if (item >= (long long)blocks * groups) return;
  const long long block = item / groups;
  const int g = (int)(item % groups);
  Words words;
  words.load(P0 + item * WORDS, P1 + item * WORDS, lane);
  const long long scales = (PARTS ? item * GROUP_SCALES : block) * 8 + r;
#pragma unroll
  for (int part = 0; part < GROUP_SCALES; part++) {
    u32 z[2];
    zero_pairs(z, ZEROS ? __ldg(Z + scales + 8 * part) : 0u);
    const u32 scale = __ldg(S + scales + 8 * part);
    const float s[2] = {low(scale), high(scale)};
    each_pair(words, part, z, 128 * g + 2 * c, [&](int k, u32 a, u32 b) {
#pragma unroll
      for (int r3 = 0; r3 < 2; r3++) {
        const u32 pair = r3 ? b : a;
        u16 *to = w + (block * 16 + r + 8 * r3) * K + k;
        if (k < K) *(u32 *)to = halves(s[r3] * low(pair), s[r3] * high(pair));
      }
    });
  }
}
