// y = x w^T for tiles of any multiple of 8 rows of x on Hopper: w from registers, x by TMA.
//
//   WGS warpgroups, each 64 * BH rows of w (BH is 1; of 2, sums of shared tiles were wrong on some
//       runs on an H200, and the cause was not found): words in shared memory -> registers -> scaled
//       left operands of wgmma, 64 k at a time; rows of x are wgmma's N, so that a tile has as many of
//       them as suit M: 333 rows are two tiles of 168 or three of 112
//   a thread beside them asks for x, words and scales, all by TMA, as far ahead as XS slots of 64 k
//       of x and WS of 128 k of words reach; its warps' registers go to the others
//
// A warpgroup unpacks the next 64 k while the tensor cores multiply the 64 before; one product is
// always in flight, and warpgroups wait for no other. Programs are persistent; tiles that do not fill the
// last wave have their K shared out evenly (wgmma_parts.cu). Where tiles are fewer than
// multiprocessors, SPLIT programs of a cluster share a tile's K instead: each sends the others its sums
// of their rows of x, memory to memory, and adds up its own rows'. y leaves through shared memory,
// transposed, by TMA.
//
// rows_text.py puts the constants, wgmma_parts.cu, unpack0 and unpack1 (halves of a k-group),
// zero_constants and mma before this. Legend: M rows of x, N of w; `blocks` of 16 rows of w, `groups`
// of 128 k.

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
#define SUM_BYTES ((SPLIT - 1) * WGS * OWN_Y * 256)
#define AT_SUMS (AT_S + WS * S_BYTES)
#define AT_BARRIERS (AT_SUMS + SUM_BYTES)

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
  ONE void join_planes() {}
  ONE void operand(u32 (&a)[16], int h, const u32 (&s)[2], const u32 (&z)[ZC]) const {
    unpack(a, w[0][h], w[1][h], w[2][h], s, z);
  }
#else
  u32 w[PLANES][8];
  ONE void load(u32 at, int lane) {
#pragma unroll
    for (int p = 0; p < PLANES; p++)
#pragma unroll
      for (int j = 0; j < 2; j++)
        lds4(w[p] + 4 * j, at + p * HIGH * WORD_BYTES + j * 512 + lane * 16);
  }
  // 8 bits: nibbles of both planes to bytes, those of rows r in w[0], of rows r + 8 in w[1].
  ONE void join_planes() {
#if BITS == 8
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const u32 high = w[0][j], low = w[1][j];
      join(w[0][j], w[1][j], high, low);
    }
#endif
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

#if SPLIT > 1
// Give the others of the cluster what they add up of this program's sums; return its own rows of x.
ONE void share_out(float (&acc)[NT / 2], float (&own)[OWN_Y / 2], u32 base, u32 sums, u32 rank, int wg) {
  const u32 thread = threadIdx.x % 128 * 16;
  cluster_wait();  // the others have begun
#pragma unroll
  for (int q = 0; q < SPLIT; q++) {
    if (q == rank) continue;
    const u32 from = rank - (rank > q);  // programs but q
    const u32 to = in_program(base + AT_SUMS + (from * WGS + wg) * (OWN_Y * 256) + thread, q);
    const u32 bar = in_program(sums, q);
#pragma unroll
    for (int j = 0; j < OWN_Y / 8; j++) {
      const float *d = acc + (q * (OWN_Y / 8) + j) * 4;
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                   "[%0], {%1, %2, %3, %4}, [%5];"
                   ::"r"(to + j * 2048), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]), "r"(bar)
                   : "memory");
    }
  }
  bar_wait(sums, 0);
#pragma unroll
  for (int j = 0; j < OWN_Y / 2; j++) own[j] = 0.0f;
#pragma unroll
  for (int q = 0; q < SPLIT; q++) {  // in the order of K
    if (q == rank) {
#pragma unroll
      for (int p = 0; p < SPLIT; p++)
        if (p == q)
#pragma unroll
          for (int j = 0; j < OWN_Y / 2; j++) own[j] += acc[p * (OWN_Y / 2) + j];
      continue;
    }
    const u32 from = q - (q > rank);
    const u32 at = base + AT_SUMS + (from * WGS + wg) * (OWN_Y * 256) + thread;
#pragma unroll
    for (int j = 0; j < OWN_Y / 8; j++) {
      float d[4];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(at + j * 2048) : "memory");
#pragma unroll
      for (int i = 0; i < 4; i++) own[4 * j + i] += d[i];
    }
  }
}
#endif

ONE void splat(u32 (&s)[2], u32 of_rows) {
#if SUBNORMAL
  of_rows = scaled_up(of_rows);
#endif
  s[0] = __byte_perm(of_rows, of_rows, 0x1010), s[1] = __byte_perm(of_rows, of_rows, 0x3232);
}

extern "C" __global__ void __launch_bounds__((WGS + 1) * 128, 1) CLUSTERED
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
    for (int i = 0; SPLIT > 1 && i < WGS; i++) {
      bar_init(flags + 64 + 8 * i, 1);
      bar_expect(flags + 64 + 8 * i, (SPLIT - 1) * OWN_Y * 256);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  cluster_arrive();  // this program's memory may be reached into
  asm volatile("griddepcontrol.launch_dependents;");
  int at;
  const int segments = segments_of(w, at);
  if (wg == WGS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS_ASKING));
    if (warp == 0 && lane == 0) ask(&xmap, &P0, &P1, &SM, &ZM, w, base, segments, at);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    wait_for_kernel_before();
    const int part0 = wg * BH;
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
        const int block = min(s.n * 4 * PARTS + (part0 + b) * 4 + warp, w.blocks - 1);
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
        for (int b = 0; b < BH; b++) words[b] = next[b], words[b].join_planes();
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
        const int part = part0 + b, shared = s.tile - w.whole;
        const u32 staged = base + AT_STAGED + wg * (NT * 128);
#if SPLIT > 1
        float own[OWN_Y / 2];
        const u32 rank = k_rank();
        share_out(acc[b], own, base, flags + 64 + 8 * wg, rank, wg);
        store<OWN_Y>(own, &ymap, bias, residual, w, staged, (s.n * PARTS + part) * 64,
                     s.m * NT + rank * OWN_Y, wg, warp, lane);
#else
        bool ours = true;
        if (shared >= 0)
          ours = add_shares(acc[b], partial, arrived, w, shared, part, flags + 4 * wg, wg);
        if (ours)
          store<NT>(acc[b], &ymap, bias, residual, w, staged, (s.n * PARTS + part) * 64, s.m * NT,
                    wg, warp, lane);
#endif
      }
    }
    if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
#if SPLIT > 1
  if (wg == WGS) cluster_wait();
#endif
}
