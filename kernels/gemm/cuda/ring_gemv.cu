// y = x w^T for few rows of x on Hopper: words through rings of shared memory, mma.sync.
//
//   a program takes a run of 16-row blocks of w: KW of its W warps share out a block's K, W / KW
//   take blocks in turn. A warp asks for the k-groups of its slice, block after block, by cp.async,
//   RING of them ahead, and waits for no other warp; x is loaded once by all
//       words -> registers -> code - zero -> left operand; x by ldmatrix -> right operand
//       sums of a k-group times its scale, in float32
//       (16 bits: w's rows by ldmatrix)
//   every PHASE turns the warps' sums meet in shared memory, in order
//
// Words are asked for before the kernel before has ended (PDL), as far as the rings reach.
// ring_text.py puts constants, shared_parts.cu, unpack0, unpack1 and zero_constants before this. Legend:
// M rows of x (at most 8 * NT), N of w; `blocks` of 16 rows, `groups` of 128 k.

struct Work { int M, N, K, blocks, groups; };

#define DENSE (BITS == 16)
#define TURN (W / KW)  // blocks at once
#define PLANES (1 + (BITS == 8))
#define SCALES (GROUPED * (1 + ZEROS))  // kinds of a k-group's own; else a row has one
#define ROW_BYTES 272  // of 128 k of w as they are: eight rows for ldmatrix meet eight banks
#define SLOT_BYTES (DENSE ? 16 * ROW_BYTES : PLANES * 1024 + SCALES * 32)
#define SCALES_AT (PLANES * 1024)
#define SUMS_AT (W * RING * SLOT_BYTES)
#define SUMS_BYTES (2 * PHASE * W * NT * 512)
#define X_AT (SUMS_AT + SUMS_BYTES)

ONE void copy(u32 to, const void *from) {  // 16 bytes, past the L1
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
ONE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> ONE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
ONE float lds_float(u32 at) { return __uint_as_float(lds(at)); }
ONE u16 rounded(float value) {
  u16 v;
#if IS_BF16
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(value));
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(value));
#endif
  return v;
}
ONE void mma(float (&d)[4], const u32 *a, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, "
               "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
ONE void load_x(u32 (&b)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at) : "memory");
}
extern "C" __global__ void __launch_bounds__(W * 32, 1)
    ring_gemv(const u16 *x, u16 *y, const u32 *P0, const u32 *P1, const u32 *S, const u32 *Z,
              const u16 *bias, const u16 *residual, const Work w) {
  extern __shared__ unsigned char memory[];
  const u32 base = ((u32)__cvta_generic_to_shared(memory) + 127) & ~127u;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int run = blockIdx.x, runs = gridDim.x;
  const int first_block = (int)((long long)run * w.blocks / runs);
  const int last_block = (int)((long long)(run + 1) * w.blocks / runs);
  const int part = warp % KW, turn = warp / KW;
  const int first = part * w.groups / KW, count = (part + 1) * w.groups / KW - first;
  const u32 ring = base + warp * (RING * SLOT_BYTES);
  const int row_bytes = w.groups * 256 + 16, zeros = w.M < 8 * NT;
  const u32 x_base = base + X_AT;

  // Where the next k-group to be asked for lies, and where it goes; this lane's part of both.
  int left = count * max(0, (last_block - first_block - turn + TURN - 1) / TURN), next = 0;
  u32 into = ring;
#if DENSE
  const u16 *rows_at = (const u16 *)P0 + ((first_block + turn) * 16ll + lane / 16) * w.K + first * 128;
  rows_at += lane % 16 * 8;
  const u32 own_row = lane / 16 * ROW_BYTES + lane % 16 * 16;
#else
  const long long begins = (long long)(first_block + turn) * w.groups + first;
  const u32 *words_at = P0 + begins * 256 + lane * 4;
  const long long plane = P1 - P0;
  const u32 *scales_at = (lane < 2 ? S : Z) + begins * 8 + lane % 2 * 4;
#endif
  auto ask = [&] {
    if (left > 0) {
      left--;
      const int step = ++next < count ? 1 : TURN * w.groups - count + 1;  // the next block's slice
#if DENSE
#pragma unroll
      for (int i = 0; i < 8; i++) copy(into + own_row + 2 * i * ROW_BYTES, rows_at + 2ll * i * w.K);
      rows_at += next < count ? 128ll : TURN * 16ll * w.K - (count - 1) * 128;
#else
#pragma unroll
      for (int p = 0; p < PLANES; p++)
#pragma unroll
        for (int j = 0; j < 2; j++)
          copy(into + p * 1024 + j * 512 + lane * 16, words_at + p * plane + j * 128);
#if GROUPED
      if (lane < 2 * SCALES) copy(into + SCALES_AT + lane * 16, scales_at);
#endif
      words_at += step * 256, scales_at += step * 8;
#endif
      if (next == count) next = 0;
      into = into + SLOT_BYTES == ring + RING * SLOT_BYTES ? ring : into + SLOT_BYTES;
    }
    commit();
  };
#pragma unroll
  for (int i = 0; i < RING - 1; i++) ask();
  asm volatile("griddepcontrol.launch_dependents;");
  if (zeros)  // of rows past the last
    for (int i = threadIdx.x * 16; i < row_bytes; i += W * 512)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(x_base + w.M * row_bytes + i),
                   "r"(0) : "memory");
  wait_for_kernel_before();
  for (int m = warp; m < w.M; m += W)
    for (int i = lane; i < w.groups * 16; i += 32)
      copy(x_base + m * row_bytes + i * 16, x + (long long)m * w.K + i * 8);
  commit();
  wait_copies<0>();
  __syncthreads();

  u32 x_at[NT];  // of this lane's row of the matrices that ldmatrix reads
#pragma unroll
  for (int t = 0; t < NT; t++) {
    const int m = t * 8 + lane % 8;
    x_at[t] = x_base + min(m, w.M - !zeros) * row_bytes + first * 256 + lane / 8 * 16;
  }

  int phase = 0;
  u32 at = ring;
  for (int begin = first_block; begin < last_block; begin += PHASE * TURN, phase ^= 1) {
    const int most = min(PHASE * TURN, last_block - begin);
    const u32 sums_at = base + SUMS_AT + phase * (SUMS_BYTES / 2);
    for (int i = turn; i < most; i += TURN) {
      float acc[NT][4];
#pragma unroll
      for (int t = 0; t < NT; t++)
#pragma unroll
        for (int j = 0; j < 4; j++) acc[t][j] = 0.0f;
#if !DENSE
      u32 scales = 0, zero[ZC];
#if !GROUPED
      const int of_row = (begin + i) * 8 + lane / 4;
      scales = S[of_row];
      zero_constants(zero, ZEROS ? Z[of_row] : 0);
#endif
#endif
      for (int g = 0; g < count; g++) {
        wait_copies<RING - 2>();
        __syncwarp();  // all have come, and no lane reads the slot before any more
        ask();
#if DENSE
        const u32 own = at + (lane % 16) * ROW_BYTES + lane / 16 * 16;
#pragma unroll
        for (int j = 0; j < 4; j++) {  // 32 k
          u32 a[2][4];
          load_x(a[0], own + j * 64), load_x(a[1], own + j * 64 + 32);
#pragma unroll
          for (int t = 0; t < NT; t++) {
            u32 b[4];
            load_x(b, x_at[t] + g * 256 + j * 64);
            mma(acc[t], a[0], b[0], b[1]);
            mma(acc[t], a[1], b[2], b[3]);
          }
        }
#else
        u32 words[PLANES][8];
#pragma unroll
        for (int p = 0; p < PLANES; p++)
#pragma unroll
          for (int j = 0; j < 2; j++) lds4(words[p] + 4 * j, at + p * 1024 + j * 512 + lane * 16);
#if GROUPED
        scales = lds(at + SCALES_AT + lane / 4 * 4);
        zero_constants(zero, ZEROS ? lds(at + SCALES_AT + 32 + lane / 4 * 4) : 0);
#endif
        float sums[2][NT][4];
#pragma unroll
        for (int s = 0; s < 2; s++)
#pragma unroll
          for (int t = 0; t < NT; t++)
#pragma unroll
            for (int j = 0; j < 4; j++) sums[s][t][j] = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; h++) {  // halves of the k-group
          u32 a[16];
#pragma unroll
          for (int j = 0; j < 8; j++) {
            if (h) unpack1(a[2 * j], a[2 * j + 1], words[0][j], words[PLANES - 1][j], zero);
            else unpack0(a[2 * j], a[2 * j + 1], words[0][j], words[PLANES - 1][j], zero);
          }
#pragma unroll
          for (int t = 0; t < NT; t++)
#pragma unroll
            for (int j = 0; j < 2; j++) {  // 32 k
              u32 b[4];
              load_x(b, x_at[t] + g * 256 + h * 128 + j * 64);
              mma(sums[0][t], a + 8 * j, b[0], b[1]);
              mma(sums[1][t], a + 8 * j + 4, b[2], b[3]);
            }
        }
#if GROUPED
        const float low = single((u16)scales), top = single((u16)(scales >> 16));
#else
        const float low = 1.0f, top = 1.0f;
#endif
#pragma unroll
        for (int t = 0; t < NT; t++)
#pragma unroll
          for (int j = 0; j < 4; j++)
            acc[t][j] += (sums[0][t][j] + sums[1][t][j]) * (j < 2 ? low : top);
#endif
        at = at + SLOT_BYTES == ring + RING * SLOT_BYTES ? ring : at + SLOT_BYTES;
      }
#if !DENSE && !GROUPED
#pragma unroll
      for (int t = 0; t < NT; t++)
#pragma unroll
        for (int j = 0; j < 4; j++) acc[t][j] *= single((u16)(j < 2 ? scales : scales >> 16));
#endif
#pragma unroll
      for (int t = 0; t < NT; t++)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                     ::"r"(sums_at + (((i * NT + t) * KW + part) * 32 + lane) * 16), "f"(acc[t][0]),
                     "f"(acc[t][1]), "f"(acc[t][2]), "f"(acc[t][3]) : "memory");
    }
    __syncthreads();
    auto summed = [&](int v) {  // of this program's warps: value v is (block, row of x, row of w)
      const int m = v / 16 % (8 * NT), row = v % 16, of = (v / (128 * NT) * NT + m / 8) * KW;
      const int place = (row % 8 * 4 + m % 8 / 2) * 4 + row / 8 * 2 + m % 2;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < KW; i++) sum += lds_float(sums_at + ((of + i) * 128 + place) * 4);
      return sum;
    };
    auto put = [&](int v, float sum) {
      const int m = v / 16 % (8 * NT), n = (begin + v / (128 * NT)) * 16 + v % 16;
      if (m >= w.M) return;
      if (bias) sum += single(bias[n]);
      const long long at = (long long)m * w.N + n;
      if (residual) sum += single(residual[at]);
      y[at] = rounded(sum);
    };
    const int values = most * 128 * NT;
    for (int v = threadIdx.x; v < values; v += W * 32) put(v, summed(v));
  }
}
