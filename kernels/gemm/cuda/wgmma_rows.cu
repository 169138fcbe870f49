// y = x w^T for tiles of any multiple of 8 rows of x on Hopper: w from registers, x by TMA.
//
//   WGS warpgroups, each 64 * BH rows of w (BH is 1; of 2, sums of shared tiles were wrong on some
//       runs on an H200, and the cause was not found): words in shared memory -> registers -> scaled left
//       operands of wgmma, 64 k at a time; rows of x are wgmma's N, so that a tile has as many of
//       them as suit M: 333 rows are two tiles of 168 or three of 112
//   a thread beside them asks for x, words and scales, all by TMA, as far ahead as XS slots of 64 k
//       of x and WS of 128 k of words reach; its warps' registers go to the others
//
// A warpgroup unpacks the next 64 k while the tensor cores multiply the 64 before; one product is
// always in flight, and warpgroups meet nobody. Programs are persistent; tiles that do not fill the
// last wave have their K shared out evenly: float32 sums lie in a workspace, the last program to
// arrive adds them in order, so that results do not depend on timing (gluon/gluon_shares.py).
// y leaves through shared memory, transposed, by TMA.
//
// rows_text.py puts the constants, unpack0 and unpack1 (halves of a k-group), zero_constants and
// mma before this. Legend: M rows of x, N of w; `blocks` of 16 rows of w, `groups` of 128 k.

struct __align__(64) TensorMap { char bytes[128]; };
struct Work { int M, N, m_tiles, n_tiles, blocks, groups, whole, together; };

#define HIGH (4 * WGS * BH)  // 16-row blocks of a tile
#define PLANES (1 + (BITS == 8))
#define WORD_BYTES (BITS == 3 ? 768 : 1024)  // of a block's k-group, in a plane
#define SCALES (GROUPED * (1 + ZEROS))  // kinds of a k-group's own
#define X_BYTES (NT * 128)
#define W_BYTES (HIGH * WORD_BYTES * PLANES)
#define S_BYTES (HIGH * 32 * SCALES)
#define STAGED_BYTES (WGS * NT * 128)
#define AT_STAGED (XS * X_BYTES)
#define AT_W (AT_STAGED + STAGED_BYTES)
#define AT_S (AT_W + WS * W_BYTES)
#define AT_BARRIERS (AT_S + WS * S_BYTES)
#define ONE __device__ __forceinline__

ONE void bar_init(u32 bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
ONE void bar_expect(u32 bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
ONE void bar_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
ONE void bar_wait(u32 bar, u32 phase) {
  u32 done;
  do {
    asm volatile("{.reg .pred p;mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                 "selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(bar), "r"(phase) : "memory");
  } while (!done);
}
ONE void tma_load(u32 to, const TensorMap *map, int column, int row, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3}], [%4];"
               ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(bar) : "memory");
}
ONE void prefetch(const TensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
ONE void tma_store(const TensorMap *map, int column, int row, u32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
               ::"l"(map), "r"(column), "r"(row), "r"(from) : "memory");
}
ONE void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
ONE void sync_warpgroup(int wg) { asm volatile("bar.sync %0, 128;" ::"r"(wg + 1) : "memory"); }
ONE void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
ONE u32 lds(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
template <int N> ONE void keep(u32 (&a)[N]) {  // until here: wgmma reads them behind ptxas's back
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(a[i])::"memory");
}
template <int N> ONE void keep(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
ONE u32 pair(float low, float high) {
  u32 v;
#if IS_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
#endif
  return v;
}
ONE float single(u16 bits) {
#if IS_BF16
  return __uint_as_float((u32)bits << 16);
#else
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
  return v;
#endif
}

// A lane's words of one k-group of a block, and its next 64 k as the left operand: 4 x (r3, k3).
struct Words {
#if BITS == 3
  u32 w[3][2];
  ONE void load(u32 at, int lane) {
#pragma unroll
    for (int i = 0; i < 3; i++)
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[i][0]), "=r"(w[i][1])
                   : "r"(at + i * 256 + lane * 8) : "memory");
  }
  ONE void operand(u32 (&a)[16], int h, const u32 (&s)[2], const u32 (&z)[ZC]) const {
    unpack(a, w[0][h], w[1][h], w[2][h], s, z);
  }
#else
  u32 w[PLANES][8];
  ONE void load(u32 at, int lane) {
#pragma unroll
    for (int p = 0; p < PLANES; p++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        u32 *q = w[p] + 4 * j;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(q[0]), "=r"(q[1]), "=r"(q[2]), "=r"(q[3])
                     : "r"(at + p * HIGH * WORD_BYTES + j * 512 + lane * 16) : "memory");
      }
  }
  ONE void operand(u32 (&a)[16], int h, const u32 (&s)[2], const u32 (&z)[ZC]) const {
#pragma unroll
    for (int j = 0; j < 8; j++) {
      if (h) unpack1(a[2 * j], a[2 * j + 1], w[0][j], w[PLANES - 1][j], s, z);
      else unpack0(a[2 * j], a[2 * j + 1], w[0][j], w[PLANES - 1][j], s, z);
    }
  }
#endif
};

// A program's tile, or its share of one: gluon/gluon_shares.py.
struct Segment { int m, n, first, last, after, tile; };
ONE int cut(int program, int tiles, int groups) {
  return (int)((long long)program * (tiles * groups) / (int)gridDim.x);
}
ONE int owner(int unit, int tiles, int groups) {
  return (int)(((long long)(unit + 1) * (int)gridDim.x - 1) / (tiles * groups));
}
ONE int segments_of(const Work &w, int &at) {
  const int pid = blockIdx.x, programs = gridDim.x, rest = w.m_tiles * w.n_tiles - w.whole;
  int count = max(w.whole - pid + programs - 1, 0) / programs;
  at = cut(pid, rest, w.groups);
  const int end = cut(pid + 1, rest, w.groups);
  if (end > at) count += (end - 1) / w.groups - at / w.groups + 1;
  return count;
}
ONE Segment segment_of(int i, int at, const Work &w) {
  Segment s;
  const int pid = blockIdx.x, all = w.m_tiles * w.n_tiles;
  int tile = pid + i * (int)gridDim.x;
  s.first = 0, s.last = w.groups, s.after = at;
  if (tile >= w.whole && all > w.whole) {
    const int end = cut(pid + 1, all - w.whole, w.groups);
    tile = at / w.groups;
    s.first = at - tile * w.groups;
    s.last = min(w.groups, end - tile * w.groups);
    s.after = tile * w.groups + s.last;
    tile += w.whole;
  }
  tile = min(tile, all - 1);
  const int wide = w.together * w.n_tiles, start = tile / wide * w.together;
  const int size = min(w.m_tiles - start, w.together), inner = tile % wide;
  s.m = start + inner % size, s.n = inner / size, s.tile = tile;
  return s;
}

ONE void ask(const TensorMap *xmap, const TensorMap *P0, const TensorMap *P1, const TensorMap *S,
             const TensorMap *Z, const Work &w, u32 base, int segments, int at) {
  const u32 xfull = base + AT_BARRIERS, xfree = xfull + 8 * XS;
  const u32 wfull = xfree + 8 * XS, wfree = wfull + 8 * WS;
  u32 xslot = 0, xphase = 1, slot = 0, phase = 1;
  bool waited = false;
  for (int i = 0; i < segments; i++) {
    const Segment s = segment_of(i, at, w);
    at = s.after;
    const int block = s.n * HIGH;  // blocks past the end are zeros
    for (int g = s.first; g < s.last; g++) {
      bar_wait(wfree + 8 * slot, phase);
      const u32 bar = wfull + 8 * slot, words = base + AT_W + slot * W_BYTES;
      bar_expect(bar, W_BYTES + S_BYTES);
      tma_load(words, P0, g * (WORD_BYTES / 4), block, bar);
#if PLANES == 2
      tma_load(words + HIGH * WORD_BYTES, P1, g * (WORD_BYTES / 4), block, bar);
#endif
#if SCALES > 0
      tma_load(base + AT_S + slot * S_BYTES, S, g * 8, block, bar);
#endif
#if SCALES > 1
      tma_load(base + AT_S + slot * S_BYTES + HIGH * 32, Z, g * 8, block, bar);
#endif
      if (++slot == WS) slot = 0, phase ^= 1;
      if (!waited) wait_for_kernel_before();  // words are no kernel's output; x may be
      waited = true;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        bar_wait(xfree + 8 * xslot, xphase);
        bar_expect(xfull + 8 * xslot, X_BYTES);
        tma_load(base + xslot * X_BYTES, xmap, g * 128 + h * 64, s.m * NT, xfull + 8 * xslot);
        if (++xslot == XS) xslot = 0, xphase ^= 1;
      }
    }
  }
}

// Leave acc for the program that ends a tile last, or become it: all programs' sums, in order.
ONE bool add_shares(float (&acc)[NT / 2], float *partial, int *arrived, const Work &w, int tile,
                    int part, u32 flag, int wg) {
  const int rest = w.m_tiles * w.n_tiles - w.whole, pid = blockIdx.x, thread = threadIdx.x % 128;
  const int begin = owner(tile * w.groups, rest, w.groups);
  const int end = owner((tile + 1) * w.groups - 1, rest, w.groups) + 1;
  if (end - begin <= 1) return true;
  // A program has at most two unfinished tiles: that in which its run starts, another one.
  const int mine = 2 * pid + (cut(pid, rest, w.groups) / w.groups != tile);
  float *own = partial + ((long long)mine * (WGS * BH) + part) * (64 * NT) + thread;
#pragma unroll
  for (int j = 0; j < NT / 2; j++) __stcg(own + j * 128, acc[j]);
  fence();
  sync_warpgroup(wg);  // all sums are written before this program counts itself
  if (thread == 0) {
    int *count = arrived + tile * (WGS * BH) + part, found;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(found) : "l"(count)
                 : "memory");
    const int last = found == end - begin - 1;
    if (last) *count = 0;
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(flag), "r"(last) : "memory");
  }
  sync_warpgroup(wg);
  const bool last = lds(flag) != 0;
  sync_warpgroup(wg);
  if (!last) return false;
  fence();
#pragma unroll
  for (int j = 0; j < NT / 2; j++) acc[j] = 0.0f;
  for (int p = begin; p < end; p++) {
    const int its = 2 * p + (cut(p, rest, w.groups) / w.groups != tile);
    const float *from = partial + ((long long)its * (WGS * BH) + part) * (64 * NT) + thread;
#pragma unroll
    for (int j = 0; j < NT / 2; j++) acc[j] += __ldcg(from + j * 128);
  }
  return true;
}

// Add bias and residual to 64 rows of w by NT of x, and store them.
ONE void store(float (&acc)[NT / 2], const TensorMap *ymap, const u16 *bias, const u16 *residual,
               const Work &w, u32 staged, int n0, int m0, int wg, int warp, int lane) {
  const int n = n0 + warp * 16 + lane / 4, rows = w.blocks * 16;
  if (bias) {
    const float low = n < rows ? single(bias[n]) : 0.0f;
    const float high = n + 8 < rows ? single(bias[n + 8]) : 0.0f;
#pragma unroll
    for (int j = 0; j < NT / 2; j++) acc[j] += j % 4 < 2 ? low : high;
  }
  if (residual) {
#pragma unroll
    for (int j = 0; j < NT / 2; j++) {
      const int m = m0 + j / 4 * 8 + lane % 4 * 2 + j % 2, row = n + j % 4 / 2 * 8;
      if (m < w.M && row < rows) acc[j] += single(residual[(long long)m * w.N + row]);
    }
  }
  if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  sync_warpgroup(wg);  // the tile before has left the buffer
  const u32 chunk = 2 * warp + (lane / 8 & 1), line = lane % 8 + lane / 16 * 8;
  const u32 to = staged + line * 128 + ((chunk ^ (lane % 8)) << 4);
#pragma unroll
  for (int j = 0; j + 1 < NT / 8; j += 2) {
    const float *d = acc + 4 * j;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(to + j * 1024), "r"(pair(d[0], d[1])), "r"(pair(d[2], d[3])),
                 "r"(pair(d[4], d[5])), "r"(pair(d[6], d[7])) : "memory");
  }
  if (NT / 8 % 2) {
    const float *d = acc + 4 * (NT / 8 - 1);
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                 ::"r"(to + (NT / 8 - 1) * 1024), "r"(pair(d[0], d[1])), "r"(pair(d[2], d[3]))
                 : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  sync_warpgroup(wg);
  if (threadIdx.x % 128 == 0) {
    if (n0 < rows) tma_store(ymap, n0, m0, staged);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
}

ONE void splat(u32 (&s)[2], u32 of_rows) {
  s[0] = __byte_perm(of_rows, of_rows, 0x1010), s[1] = __byte_perm(of_rows, of_rows, 0x3232);
}

extern "C" __global__ void __launch_bounds__((WGS + 1) * 128, 1)
    wgmma_rows(const __grid_constant__ TensorMap xmap, const __grid_constant__ TensorMap ymap,
               const __grid_constant__ TensorMap P0, const __grid_constant__ TensorMap P1,
               const __grid_constant__ TensorMap SM, const __grid_constant__ TensorMap ZM,
               const u32 *S, const u32 *Z, const u16 *bias, const u16 *residual, float *partial,
               int *arrived, const Work w) {
  extern __shared__ unsigned char memory[];
  const u32 base = ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
  const u32 xfull = base + AT_BARRIERS, xfree = xfull + 8 * XS;
  const u32 wfull = xfree + 8 * XS, wfree = wfull + 8 * WS, flags = wfree + 8 * WS;
  const int wg = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  if (threadIdx.x == WGS * 128) {  // the thread that asks
    prefetch(&xmap), prefetch(&P0), prefetch(&SM), prefetch(&ZM), prefetch(&ymap);
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < XS; i++) bar_init(xfull + 8 * i, 1), bar_init(xfree + 8 * i, WGS * 4);
    for (int i = 0; i < WS; i++) bar_init(wfull + 8 * i, 1), bar_init(wfree + 8 * i, WGS * 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;");
  int at;
  const int segments = segments_of(w, at);
  if (wg == WGS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS_ASKING));
    if (warp == 0 && lane == 0) ask(&xmap, &P0, &P1, &SM, &ZM, w, base, segments, at);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    wait_for_kernel_before();
    u32 xslot = 0, xphase = 0, slot = 0, phase = 0, before = 0;
    for (int i = 0; i < segments; i++) {
      const Segment s = segment_of(i, at, w);
      at = s.after;
      float acc[BH][NT / 2];
#pragma unroll
      for (int b = 0; b < BH; b++)
#pragma unroll
        for (int j = 0; j < NT / 2; j++) acc[b][j] = 0.0f;
      u32 a[2][16];
#pragma unroll
      for (int j = 0; j < 16; j++) a[1][j] = 0;
      u32 scale[BH][2], zero[BH][ZC], scales[BH], zeros[BH];
#if !GROUPED
#pragma unroll
      for (int b = 0; b < BH; b++) {
        const int block = min(s.n * HIGH + (wg * BH + b) * 4 + warp, w.blocks - 1);
        scales[b] = S[block * 8 + lane / 4];
        zeros[b] = ZEROS ? Z[block * 8 + lane / 4] : 0;
      }
#endif
      Words words[BH], next[BH];
      auto load = [&](Words(&to)[BH]) {
        bar_wait(wfull + 8 * slot, phase);
#pragma unroll
        for (int b = 0; b < BH; b++) {
          const int high = (wg * BH + b) * 4 + warp;
          to[b].load(base + AT_W + slot * W_BYTES + high * WORD_BYTES, lane);
#if GROUPED
          const u32 own = base + AT_S + slot * S_BYTES + high * 32 + lane / 4 * 4;
          scales[b] = lds(own);
          zeros[b] = ZEROS ? lds(own + HIGH * 32) : 0;
#endif
        }
        __syncwarp();
        if (lane == 0) bar_arrive(wfree + 8 * slot);
        if (++slot == WS) slot = 0, phase ^= 1;
      };
      load(next);
      for (int g = s.first; g < s.last; g++) {
#pragma unroll
        for (int b = 0; b < BH; b++) words[b] = next[b];
#pragma unroll
        for (int b = 0; b < BH; b++) splat(scale[b], scales[b]), zero_constants(zero[b], zeros[b]);
#pragma unroll
        for (int c = 0; c < 2 * BH; c++) {  // halves of the k-group, each of all BH blocks of rows
          const int h = c / BH, b = c % BH;
          u32(&now)[16] = a[c & 1];
          words[b].operand(now, h, scale[b], zero[b]);
          if (b == 0) bar_wait(xfull + 8 * xslot, xphase);
          // Rows of 128 bytes, swizzled: eight of them are 1,024 bytes.
          const u32 address = base + xslot * X_BYTES;
          const u64 x = (u64)((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
          keep(now);
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
          for (int j = 0; j < 4; j++) mma(acc[b], now, j, x + 2 * j);
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
          if (c == 0 && g + 1 < s.last) load(next);
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          keep(a[~c & 1]);
          if (b == 0 && (c > 0 || g > s.first) && lane == 0) bar_arrive(xfree + 8 * before);
          if (b == BH - 1) {
            before = xslot;
            if (++xslot == XS) xslot = 0, xphase ^= 1;
          }
        }
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int b = 0; b < BH; b++) keep(acc[b]);
      keep(a[1]);
      if (lane == 0) bar_arrive(xfree + 8 * before);
#pragma unroll
      for (int b = 0; b < BH; b++) {
        const int part = wg * BH + b, shared = s.tile - w.whole;
        bool ours = true;
        if (shared >= 0)
          ours = add_shares(acc[b], partial, arrived, w, shared, part, flags + 4 * wg, wg);
        if (ours)
          store(acc[b], &ymap, bias, residual, w, base + AT_STAGED + wg * (NT * 128),
                s.n * HIGH * 16 + part * 64, s.m * NT, wg, warp, lane);
      }
    }
    if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
}
