// What kernels of persistent tiles on Hopper share: barriers, TMA, tiles whose K is shared out, stores.
//
// Tiles that do not fill the last wave have their K shared out evenly: float32 sums lie in a
// workspace, the last program to arrive adds them in order, so that results do not depend on timing
// (gluon/gluon_shares.py). shared_parts.cu and constants stand before this: NT rows of x, WGS
// warpgroups of 64 rows of w, BH 1; SPLIT programs of a cluster that share a tile's K (wgmma_rows.cu),
// 1: none.

struct __align__(64) TensorMap { char bytes[128]; };
struct Work { int M, N, m_tiles, n_tiles, blocks, groups, whole, together; };

#define PARTS (WGS * BH)  // of 64 rows of w
#define OWN_Y (NT / SPLIT)  // rows of x whose sums a program of a cluster that shares K adds up
#define PID ((int)blockIdx.x / SPLIT)
#define PROGRAMS ((int)gridDim.x / SPLIT)
#if SPLIT > 1
#define CLUSTERED __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTERED
#endif

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
ONE u32 rank_in_cluster() {
  u32 v;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(v));
  return v;
}
ONE u32 k_rank() { return SPLIT > 1 ? rank_in_cluster() : 0; }
ONE u32 in_program(u32 address, u32 rank) {  // of a cluster
  u32 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(v) : "r"(address), "r"(rank));
  return v;
}
ONE void cluster_arrive() {
  if (SPLIT > 1) asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
ONE void cluster_wait() {
  if (SPLIT > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
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

// A program's tile, or its share of one: gluon/gluon_shares.py.
struct Segment { int m, n, first, last, after, tile; };
ONE int cut(int program, int tiles, int groups) {
  return (int)((long long)program * (tiles * groups) / PROGRAMS);
}
ONE int owner(int unit, int tiles, int groups) {
  return (int)(((long long)(unit + 1) * PROGRAMS - 1) / (tiles * groups));
}
ONE int segments_of(const Work &w, int &at) {
  const int pid = PID, programs = PROGRAMS, rest = w.m_tiles * w.n_tiles - w.whole;
  int count = max(w.whole - pid + programs - 1, 0) / programs;
  at = cut(pid, rest, w.groups);
  const int end = cut(pid + 1, rest, w.groups);
  if (end > at) count += (end - 1) / w.groups - at / w.groups + 1;
  return count;
}
ONE Segment segment_of(int i, int at, const Work &w) {
  Segment s;
  const int pid = PID, all = w.m_tiles * w.n_tiles;
  int tile = pid + i * PROGRAMS;
  s.first = 0, s.last = w.groups, s.after = at;
  if (tile >= w.whole && all > w.whole) {
    const int end = cut(pid + 1, all - w.whole, w.groups);
    tile = at / w.groups;
    s.first = at - tile * w.groups;
    s.last = min(w.groups, end - tile * w.groups);
    s.after = tile * w.groups + s.last;
    tile += w.whole;
  }
  if (SPLIT > 1)
    s.first = (int)k_rank() * w.groups / SPLIT, s.last = ((int)k_rank() + 1) * w.groups / SPLIT;
  tile = min(tile, all - 1);
  const int wide = w.together * w.n_tiles, start = tile / wide * w.together;
  const int size = min(w.m_tiles - start, w.together), inner = tile % wide;
  s.m = start + inner % size, s.n = inner / size, s.tile = tile;
  return s;
}

// Leave acc for the program that ends a tile last, or become it: all programs' sums, in order.
ONE bool add_shares(float (&acc)[NT / 2], float *partial, int *arrived, const Work &w, int tile,
                    int part, u32 flag, int wg) {
  const int rest = w.m_tiles * w.n_tiles - w.whole, pid = PID, thread = threadIdx.x % 128;
  const int begin = owner(tile * w.groups, rest, w.groups);
  const int end = owner((tile + 1) * w.groups - 1, rest, w.groups) + 1;
  if (end - begin <= 1) return true;
  // A program has at most two unfinished tiles: that in which its run starts, another one.
  const int mine = 2 * pid + (cut(pid, rest, w.groups) / w.groups != tile);
  float *own = partial + ((long long)mine * PARTS + part) * (64 * NT) + thread;
#pragma unroll
  for (int j = 0; j < NT / 2; j++) __stcg(own + j * 128, acc[j]);
  fence();
  sync_warpgroup(wg);  // all sums are written before this program counts itself
  if (thread == 0) {
    int *count = arrived + tile * PARTS + part, found;
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
    const float *from = partial + ((long long)its * PARTS + part) * (64 * NT) + thread;
#pragma unroll
    for (int j = 0; j < NT / 2; j++) acc[j] += __ldcg(from + j * 128);
  }
  return true;
}

// Add bias and residual to 64 rows of w by ROWS of x, and store them.
template <int ROWS>
ONE void store(float (&acc)[ROWS / 2], const TensorMap *ymap, const u16 *bias, const u16 *residual,
               const Work &w, u32 staged, int n0, int m0, int wg, int warp, int lane) {
  const int n = n0 + warp * 16 + lane / 4, rows = w.blocks * 16;
  if (bias) {
    const float low = n < rows ? single(bias[n]) : 0.0f;
    const float high = n + 8 < rows ? single(bias[n + 8]) : 0.0f;
#pragma unroll
    for (int j = 0; j < ROWS / 2; j++) acc[j] += j % 4 < 2 ? low : high;
  }
  if (residual) {
#pragma unroll
    for (int j = 0; j < ROWS / 2; j++) {
      const int m = m0 + j / 4 * 8 + lane % 4 * 2 + j % 2, row = n + j % 4 / 2 * 8;
      if (m < w.M && row < rows) acc[j] += single(residual[(long long)m * w.N + row]);
    }
  }
  if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  sync_warpgroup(wg);  // the tile before has left the buffer
  const u32 chunk = 2 * warp + (lane / 8 & 1), line = lane % 8 + lane / 16 * 8;
  const u32 to = staged + line * 128 + ((chunk ^ (lane % 8)) << 4);
#pragma unroll
  for (int j = 0; j + 1 < ROWS / 8; j += 2) {
    const float *d = acc + 4 * j;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(to + j * 1024), "r"(pair(d[0], d[1])), "r"(pair(d[2], d[3])),
                 "r"(pair(d[4], d[5])), "r"(pair(d[6], d[7])) : "memory");
  }
  if (ROWS / 8 % 2) {
    const float *d = acc + 4 * (ROWS / 8 - 1);
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                 ::"r"(to + (ROWS / 8 - 1) * 1024), "r"(pair(d[0], d[1])), "r"(pair(d[2], d[3]))
                 : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  sync_warpgroup(wg);
  if (threadIdx.x % 128 == 0) {
    // Past the end nothing is written. With a condition on n0 here, ptxas 13.0 moves the coordinates
    // under another predicate's value: tiles of some texts were never written.
    tma_store(ymap, n0, m0, staged);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
}
