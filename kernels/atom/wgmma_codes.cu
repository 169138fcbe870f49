// W4A4 for many tokens on Hopper: fp8 tensor cores, k-groups of 128 scaled in float32.
//
//   WGS warpgroups, each 64 rows of w by NT tokens: nibbles in shared memory -> e4m3 in registers ->
//       wgmma -> acc += part * (scale of the row * scale of the token). While one's products run it
//       makes the next k-group's operand; while it scales, the others' products run
//   a thread beside them asks for codes, words and scales, all by TMA, SLOTS k-groups ahead
//
// A nibble u = code + 8 becomes the e4m3 number code * 2^-9 by four instructions a word of four
// bytes: |u - 8| in subnormals and the first binade, which are one linear scale, and the sign bit.
// The tokens' codes are such values, too. All sums stay below 2^14 steps: exact in fp8 tensor cores.
// The outliers' two nibble planes come first, as int8: their sums start the accumulators.
//
//   x   [M, (G + 1) * 128]   bytes: code * 2^-9 as e4m3, the outliers' last 128 as int8
//   A   [G + 1, MS]          float32: scales of tokens, the outliers' last
//   P, S                     FRAGMENT planes and scales (atom_weight.py): G groups, then the outliers'
//                            high and low nibbles
//
// The channels of a group are stored so that the words of a lane are its fp8 operand, in order
// (weights/atom_weight.py `fragment_order`). codes_text.py puts constants, wgmma_parts.cu, mma and
// mma8 before this. Legend: M tokens, N rows of w, G groups, MS tokens padded to 128.

#define HIGH (4 * WGS)  // 16-row blocks of a tile
#define X_BYTES (NT * 128)
#define W_BYTES (HIGH * 1024)
#define S_BYTES (HIGH * 32)
#define A_BYTES (NT * 4)
#define STAGED_BYTES (WGS * NT * 128)
#define AT_STAGED (SLOTS * X_BYTES)
#define AT_W (AT_STAGED + STAGED_BYTES)
#define AT_S (AT_W + SLOTS * W_BYTES)
#define AT_A (AT_S + SLOTS * S_BYTES)
#define A_SLOT ((A_BYTES + 127) / 128 * 128)
#define AT_BARRIERS (AT_A + SLOTS * A_SLOT)

template <int N> ONE void keep(int (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(d[i])::"memory");
}
ONE float scale_of(u32 bits) {
#if SCALES_BF16
  return __uint_as_float(bits << 16);
#else
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"((u16)bits));
  return v;
#endif
}
ONE void lds2(float &x, float &y, u32 at) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(at) : "memory");
}
// code * 2^-9 of nibbles code + 8: the low ones of rows r, the high ones of rows r + 8.
ONE void nibbles(u32 &even, u32 &odd, u32 word) {
  u32 t = word & 0x0f0f0f0f, u = word >> 4 & 0x0f0f0f0f;
  asm("vabsdiff4.u32.u32.u32 %0, %1, %2, %3;" : "=r"(t) : "r"(t), "r"(0x08080808), "r"(0));
  asm("vabsdiff4.u32.u32.u32 %0, %1, %2, %3;" : "=r"(u) : "r"(u), "r"(0x08080808), "r"(0));
  even = t | (~(word << 4) & 0x80808080), odd = u | (~word & 0x80808080);
}
ONE void outlier_bytes(u32 &even, u32 &odd, u32 high, u32 low) {
  even = ((high << 4 & 0xf0f0f0f0) | (low & 0x0f0f0f0f)) ^ 0x80808080;
  odd = ((high & 0xf0f0f0f0) | (low >> 4 & 0x0f0f0f0f)) ^ 0x80808080;
}
ONE u64 described(u32 address) {
  return (u64)((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

ONE void ask(const TensorMap *xmap, const TensorMap *P, const TensorMap *S, const TensorMap *A,
             const Work &w, u32 base, int segments, int at) {
  const u32 full = base + AT_BARRIERS, free = full + 8 * SLOTS;
  u32 slot = 0, phase = 1;
  bool waited = false;
  for (int i = 0; i < segments; i++) {
    const Segment s = segment_of(i, at, w);
    at = s.after;
    const int block = s.n * HIGH;
    // The outliers' two planes of nibbles come first, then k-groups.
    for (int g = (OUTLIERS && s.first == 0) ? -2 : s.first; g < s.last; g++) {
      const int column = g < 0 ? w.groups + 2 + g : g;
      bar_wait(free + 8 * slot, phase);
      const u32 bar = full + 8 * slot;
      bar_expect(bar, W_BYTES + S_BYTES + (g == -1 ? 0 : X_BYTES + A_BYTES));
      tma_load(base + AT_W + slot * W_BYTES, P, column * 256, block, bar);
      tma_load(base + AT_S + slot * S_BYTES, S, column * 8, block, bar);
      if (!waited) wait_for_kernel_before();
      waited = true;
      if (g != -1) {
        tma_load(base + slot * X_BYTES, xmap, column * 64, s.m * NT, bar);
        tma_load(base + AT_A + slot * A_SLOT, A, s.m * NT, column, bar);
      }
      if (++slot == SLOTS) slot = 0, phase ^= 1;
    }
  }
}

extern "C" __global__ void __launch_bounds__((WGS + 1) * 128, 1)
    wgmma_codes(const __grid_constant__ TensorMap xmap, const __grid_constant__ TensorMap ymap,
                const __grid_constant__ TensorMap P, const __grid_constant__ TensorMap SM,
                const __grid_constant__ TensorMap A, const u16 *bias, const u16 *residual,
                float *partial, int *arrived, const Work w) {
  extern __shared__ unsigned char memory[];
  const u32 base = ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
  const u32 full = base + AT_BARRIERS, free = full + 8 * SLOTS, flags = free + 8 * SLOTS;
  const int wg = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  if (threadIdx.x == WGS * 128) {
    prefetch(&xmap), prefetch(&P), prefetch(&SM), prefetch(&A), prefetch(&ymap);
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; i++) bar_init(full + 8 * i, 1), bar_init(free + 8 * i, WGS * 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;");
  int at;
  const int segments = segments_of(w, at);
  if (wg == WGS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS_ASKING));
    if (warp == 0 && lane == 0) ask(&xmap, &P, &SM, &A, w, base, segments, at);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    wait_for_kernel_before();
    u32 slot = 0, phase = 0;
    const int high = wg * 4 + warp;
    const u32 own_w = base + AT_W + high * 1024 + lane * 16;
    const u32 own_s = base + AT_S + high * 32 + lane / 4 * 4;
    const u32 own_a = base + AT_A + lane % 4 * 8;
    auto leave = [&](u32 which) {
      __syncwarp();
      if (lane == 0) bar_arrive(free + 8 * which);
    };
    auto move = [&]() {
      if (++slot == SLOTS) slot = 0, phase ^= 1;
    };
    for (int i = 0; i < segments; i++) {
      const Segment s = segment_of(i, at, w);
      at = s.after;
      float acc[NT / 2], part[NT / 2];
#pragma unroll
      for (int j = 0; j < NT / 2; j++) acc[j] = 0.0f;
      u32 a[2][16];
      float sw[2][2];
      auto scales_of = [&](float(&to)[2], u32 rows) {
        to[0] = scale_of(rows & 0xffff), to[1] = scale_of(rows >> 16);
      };
#if OUTLIERS
      if (s.first == 0) {
        u32 top[8], low[8];
        const u32 first = slot;
        bar_wait(full + 8 * slot, phase);
        lds4(top, own_w + slot * W_BYTES), lds4(top + 4, own_w + slot * W_BYTES + 512);
        move();
        bar_wait(full + 8 * slot, phase);
        lds4(low, own_w + slot * W_BYTES), lds4(low + 4, own_w + slot * W_BYTES + 512);
        scales_of(sw[0], lds(own_s + slot * S_BYTES));
        leave(slot);
        move();
#pragma unroll
        for (int j = 0; j < 8; j++) outlier_bytes(a[0][2 * j], a[0][2 * j + 1], top[j], low[j]);
        int total[NT / 2];
#pragma unroll
        for (int j = 0; j < NT / 2; j++) total[j] = 0;
        keep(a[0]);
        keep(total);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int j = 0; j < 4; j++) mma8(total, a[0], j, described(base + first * X_BYTES) + 2 * j);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        keep(total);
        keep(a[0]);
#pragma unroll
        for (int j = 0; j < NT / 8; j++) {
          float x, y;
          lds2(x, y, own_a + first * A_SLOT + j * 32);
          acc[4 * j] = (float)total[4 * j] * (x * sw[0][0]);
          acc[4 * j + 1] = (float)total[4 * j + 1] * (y * sw[0][0]);
          acc[4 * j + 2] = (float)total[4 * j + 2] * (x * sw[0][1]);
          acc[4 * j + 3] = (float)total[4 * j + 3] * (y * sw[0][1]);
        }
        leave(first);
      }
#endif
      // Words of a k-group to its operand and scales, in units of what fp8 sums are.
      auto make = [&](u32(&to)[16], float(&scale)[2]) {
        u32 words[8];
        bar_wait(full + 8 * slot, phase);
        lds4(words, own_w + slot * W_BYTES), lds4(words + 4, own_w + slot * W_BYTES + 512);
        scales_of(scale, lds(own_s + slot * S_BYTES));
#pragma unroll
        for (int j = 0; j < 8; j++) nibbles(to[2 * j], to[2 * j + 1], words[j]);
        scale[0] *= 262144.0f, scale[1] *= 262144.0f;
        keep(to);  // made here, while tensor cores multiply
      };
      make(a[0], sw[0]);
      auto step = [&](int now, bool more) {
        const u32 own = slot;
        move();
        keep(a[now]);
        keep(part);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int j = 0; j < 4; j++) mma(part, a[now], j, described(base + own * X_BYTES) + 2 * j);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        // A branch, so that ptxas makes the next operand before it waits.
        if (more && w.M > 0) make(a[now ^ 1], sw[now ^ 1]);
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        keep(part);
        keep(a[now]);
#pragma unroll
        for (int j = 0; j < NT / 8; j++) {
          float x, y;
          lds2(x, y, own_a + own * A_SLOT + j * 32);
          acc[4 * j] += part[4 * j] * (x * sw[now][0]);
          acc[4 * j + 1] += part[4 * j + 1] * (y * sw[now][0]);
          acc[4 * j + 2] += part[4 * j + 2] * (x * sw[now][1]);
          acc[4 * j + 3] += part[4 * j + 3] * (y * sw[now][1]);
        }
        leave(own);
      };
      int g = s.first;
      for (; g + 1 < s.last; g += 2) {
        step(0, true);
        step(1, g + 2 < s.last);
      }
      if (g < s.last) step(0, false);
      const int shared = s.tile - w.whole;
      bool ours = true;
      if (shared >= 0) ours = add_shares(acc, partial, arrived, w, shared, wg, flags + 4 * wg, wg);
      if (ours)
        store<NT>(acc, &ymap, bias, residual, w, base + AT_STAGED + wg * (NT * 128),
              (s.n * WGS + wg) * 64, s.m * NT, wg, warp, lane);
    }
    if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
}
