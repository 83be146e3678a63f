// y[M, N] = x[M, K] @ W[N, K]^T (+ h[M, R] @ b[N, R]^T) from tiles of packed NVFP4, for sm_90a. See nvfp4_matmul.py.
//
// W is the A operand of wgmma, decoded in registers; x the B operand, in shared memory; so a weight is decoded once for
// up to BM rows of x. One persistent block an SM: a producer warpgroup copies, WGS consumer warpgroups decode and
// multiply. Work is split evenly by K-tiles over all blocks (stream-K, arXiv:2301.03598): who begins an output tile owns
// it and adds the others' partial sums in order, so the result is the same in every run.
//
// Set by the compiler's command line: BM rows of x a tile, MI 64-row slabs of W a warpgroup, WGS consumer warpgroups,
// STAGES of the pipeline, RANK of LoRA (0 for none), WGMMA(d, a, desc, accumulate) for m64 x BM x k16.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;
#define DI __device__ __forceinline__
struct __align__(64) TensorMap { u8 opaque[128]; };  // CUtensorMap

constexpr int SLAB = 2304;                   // bytes of a 64 x 64 tile: 2048 of codes, 256 of scales
constexpr int SLABS = MI * WGS;              // of a block's tile: 64 rows of W each
constexpr int CONSUMERS = 128 * WGS;
constexpr int X_BYTES = BM * 128, W_BYTES = SLABS * SLAB;
constexpr int PITCH = 128 * MI + 16;         // bytes of a row of the output stage: 16 more, against bank conflicts
constexpr int OUT_BYTES = (BM * PITCH + 1023) / 1024 * 1024;  // a warpgroup's; holds its h first
constexpr int REGS = MI * BM / 2;            // accumulators a thread
constexpr int R = RANK ? RANK : 16;

DI u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DI void barrier_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count)); }
DI void arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
DI void arrive_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DI void wait(u32 bar, u32 parity) {
  u32 done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  } while (!done);
}
DI void bulk_copy(u32 to, const u8* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(bar) : "memory");
}
DI void tensor_copy(u32 to, const TensorMap* map, int column, int row, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
               "l"(map), "r"(column), "r"(row), "r"(bar) : "memory");
}
DI void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DI void warpgroup_sync(int warpgroup) { asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 2) : "memory"); }
DI void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }
DI void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DI void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DI void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DI void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// Rows of 128 bytes in the 128-byte swizzle, 8 rows a group of 1024 bytes.
DI u64 descriptor(u32 address) { return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62; }

DI u32 times(u32 a, u32 b) { u32 r; asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DI u32 twice_low(u32 a) { u32 r; asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l}; }" : "=r"(r) : "r"(a)); return r; }
DI u32 twice_high(u32 a) { u32 r; asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h}; }" : "=r"(r) : "r"(a)); return r; }
DI u32 pick(u32 a, u32 selector) { u32 r; asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(a), "r"(selector)); return r; }
// The scales of one step's two rows, bytes with 5 exponent and 3 mantissa bits, to two bfloat16 of scale * 2^119.
DI u32 scales(u32 word, int step) { return pick(word, step ? 0x4341u : 0x4240u) * 16 + 236 * 128 * 0x10001u; }
// Eight codes to two rows' fragments. A code's bits, where bfloat16 has its sign, low exponent and high mantissa bits,
// are its value times 2^-126; with the scale's 2^119 the product is exact.
DI void decode(u32 w, u32 scale, u32* a) {
  constexpr u32 mask = 0x81C081C0u;
  a[0] = times(w & mask, twice_low(scale));
  a[1] = times(w << 3 & mask, twice_high(scale));
  a[2] = times(w << 6 & mask, twice_low(scale));
  a[3] = times((w << 1 & 0x80008000u) | (w >> 3 & 0x01800180u) | (w >> 7 & 0x00400040u), twice_high(scale));
}
DI u32 pack2(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1)
nvfp4_matmul(const __grid_constant__ TensorMap x, const u8* __restrict__ w, u16* __restrict__ y,
             const float* __restrict__ tensor_scale, const u16* __restrict__ h, const u16* __restrict__ b,
             float* __restrict__ partial, u32* __restrict__ flag, int M, int N, int K, int first_slice, int second_slice) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 base = (shared(memory) + 1023) & ~1023u;
  const u32 xs = base, out = xs + STAGES * X_BYTES, ws = out + WGS * OUT_BYTES, full = ws + STAGES * W_BYTES;
  const u32 empty = full + 8 * STAGES;
  const int tid = threadIdx.x;
  if (tid == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, WGS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  const int k_tiles = (K + 63) / 64, n_slabs = (N + 63) / 64, m_tiles = (M + BM - 1) / BM;
  const int n_tiles = (n_slabs + SLABS - 1) / SLABS;
  const u32 total = (u32)n_tiles * m_tiles * k_tiles, block = blockIdx.x, blocks = gridDim.x;
  const u32 begin = (u64)total * block / blocks, end = (u64)total * (block + 1) / blocks;

  if (tid >= CONSUMERS) {  // ---- the producers: a thread a warp, since one alone is too slow for small tiles
    if constexpr (REGS > 64) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (tid & 31) return;
    const int warp = (tid - CONSUMERS) >> 5;
    if constexpr (!RANK) {  // with LoRA, the kernel before this one has waited for x
      if (warp == 3) grid_wait();
    }
    int stage = 0;
    u32 parity = 1;
    for (u32 it = begin; it < end;) {
      const u32 tile = it / k_tiles, stop = min(end, (tile + 1) * k_tiles);
      const int slab = tile / m_tiles * SLABS, live = min(SLABS, n_slabs - slab), m0 = tile % m_tiles * BM;
      int k = it - tile * k_tiles;
      const u8* from = w + ((u64)(slab + warp) * k_tiles + k) * SLAB;
      for (; it < stop; it++, k++, from += SLAB) {
        wait(empty + 8 * stage, parity);
        const u32 bar = full + 8 * stage;
        if (warp == 3) {
          arrive_expect(bar, live * SLAB + X_BYTES);
          tensor_copy(xs + stage * X_BYTES, &x, k * 64, m0, bar);
        }
#pragma unroll
        for (int i = 0; i < SLABS; i += 4)
          if (i + warp < live) bulk_copy(ws + stage * W_BYTES + (i + warp) * SLAB, from + (u64)i * k_tiles * SLAB, SLAB, bar);
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
      }
    }
    return;
  }

  // ---- the consumers
  if constexpr (REGS > 64) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int warpgroup = tid >> 7, warp = tid >> 5 & 3, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const float scale = *tensor_scale * 128.f;
  const u32 my_out = out + warpgroup * OUT_BYTES;
  int stage = 0;
  u32 parity = 0;
  for (u32 it = begin; it < end;) {
    const u32 tile = it / k_tiles, k_first = it - tile * k_tiles, stop = min(end, (tile + 1) * k_tiles);
    const int slab0 = tile / m_tiles * SLABS + warpgroup * MI, m0 = tile % m_tiles * BM;
    float acc[MI][BM / 2];
    u32 a[2][8];
#pragma unroll
    for (int i = 0; i < MI; i++)
#pragma unroll
      for (int j = 0; j < BM / 2; j++) acc[i][j] = 0.f;
    int held = -1;
    for (; it < stop; it++) {
      wait(full + 8 * stage, parity);
      const u64 x_desc = descriptor(xs + stage * X_BYTES);
#pragma unroll
      for (int i = 0; i < MI; i++) {
        const u32 at = ws + stage * W_BYTES + (warpgroup * MI + i) * SLAB;
        u32 code[4], s[2];
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(code[0]), "=r"(code[1]), "=r"(code[2]), "=r"(code[3]) : "r"(at + warp * 512 + lane * 16));
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(s[0]), "=r"(s[1]) : "r"(at + 2048 + warp * 64 + g * 8));
#pragma unroll
        for (int half = 0; half < 2; half++) {  // 32 columns: decoded while the 32 before are multiplied
#pragma unroll
          for (int j = 0; j < 2; j++)
            decode(code[half * 2 + j], scales(s[half], j), a[half] + 4 * j);
          wgmma_fence();
          WGMMA(acc[i], (a[half]), x_desc + half * 4);
          WGMMA(acc[i], (a[half] + 4), x_desc + half * 4 + 2);
          wgmma_commit();
          wgmma_wait<1>();
          if (i == 0 && half == 0 && held >= 0 && (tid & 127) == 0) arrive(empty + 8 * held);
        }
      }
      held = stage;
      if (++stage == STAGES) { stage = 0; parity ^= 1; }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < MI; i++)
#pragma unroll
      for (int j = 0; j < BM / 2; j++) asm volatile("" : "+f"(acc[i][j])::"memory");
    if ((tid & 127) == 0) arrive(empty + 8 * held);

    if (k_first) {  // a part of another block's tile
      float4* mine = (float4*)partial + (u64)block * (REGS / 4) * CONSUMERS + tid;
#pragma unroll
      for (int i = 0; i < MI; i++)
#pragma unroll
        for (int j = 0; j < BM / 8; j++)
          __stcg(mine + (i * (BM / 8) + j) * CONSUMERS, make_float4(acc[i][4 * j], acc[i][4 * j + 1], acc[i][4 * j + 2], acc[i][4 * j + 3]));
      __threadfence();
      consumers_sync();
      if (tid == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag + block) : "memory");
      continue;
    }
    const u32 tile_end = (tile + 1) * k_tiles;
    if (stop < tile_end) {
      u32 other = block + 1;
      for (; other < blocks && (u64)total * other / blocks < tile_end; other++) {
        u32 ready;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(ready) : "l"(flag + other) : "memory"); while (!ready);
        const float4* theirs = (const float4*)partial + (u64)other * (REGS / 4) * CONSUMERS + tid;
#pragma unroll
        for (int i = 0; i < MI; i++)
#pragma unroll
          for (int j = 0; j < BM / 8; j++) {
            const float4 v = __ldcg(theirs + (i * (BM / 8) + j) * CONSUMERS);
            acc[i][4 * j] += v.x; acc[i][4 * j + 1] += v.y; acc[i][4 * j + 2] += v.z; acc[i][4 * j + 3] += v.w;
          }
      }
      consumers_sync();  // all have read: the next launch finds the flags down
      for (u32 i = block + 1 + tid; i < other; i += CONSUMERS) flag[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < MI; i++)
#pragma unroll
      for (int j = 0; j < BM / 2; j++) acc[i][j] *= scale;

    if constexpr (RANK > 0) {
      grid_wait();  // h is there
#pragma unroll
      for (int i = 0; i < MI; i++) {
        const int n0 = (slab0 + i) * 64, slice = (n0 >= first_slice) + (n0 >= second_slice), slices = 1 + (first_slice < N) + (second_slice < N);
        warpgroup_sync(warpgroup);
        for (int chunk = tid & 127; chunk < BM * (R / 8); chunk += 128) {
          const int row = chunk / (R / 8), c = chunk % (R / 8);
          uint4 v = make_uint4(0, 0, 0, 0);
          if (m0 + row < M) v = __ldcg((const uint4*)(h + (u64)(m0 + row) * (slices * R) + slice * R + c * 8));
          asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(my_out + row * 128 + ((c ^ (row & 7)) << 4)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
        }
        fence_async();
        warpgroup_sync(warpgroup);
        const int n = n0 + warp * 16 + g;
        const u32 *up = (const u32*)(b + (u64)min(n, N - 1) * R), *low = (const u32*)(b + (u64)min(n + 8, N - 1) * R);
        u32 f[R / 16][4];
#pragma unroll
        for (int j = 0; j < R / 16; j++) {
          f[j][0] = up[j * 8 + t]; f[j][1] = low[j * 8 + t]; f[j][2] = up[j * 8 + t + 4]; f[j][3] = low[j * 8 + t + 4];
        }
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < R / 16; j++) WGMMA(acc[i], (f[j]), descriptor(my_out) + 2 * j);
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int j = 0; j < BM / 2; j++) asm volatile("" : "+f"(acc[i][j])::"memory");
      }
    }

    warpgroup_sync(warpgroup);  // the stage is free
#pragma unroll
    for (int i = 0; i < MI; i++)
#pragma unroll
      for (int j = 0; j < BM / 8; j++) {
        const u32 to = my_out + (8 * j + (lane & 7)) * PITCH + i * 128 + warp * 32 + (lane >> 3 & 1) * 16;
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(pack2(acc[i][4 * j], acc[i][4 * j + 1])),
                     "r"(pack2(acc[i][4 * j + 2], acc[i][4 * j + 3])) : "memory");
      }
    warpgroup_sync(warpgroup);
    for (int chunk = tid & 127; chunk < BM * 8 * MI; chunk += 128) {
      const int row = chunk / (8 * MI), c = chunk % (8 * MI), n = slab0 * 64 + c * 8;
      if (m0 + row >= M || n >= N) continue;
      uint4 v;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(my_out + row * PITCH + c * 16));
      u16* to = y + (u64)(m0 + row) * N + n;
      if (N % 8 == 0) {
        *(uint4*)to = v;
      } else {
        const u32 part[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 8; i++)
          if (n + i < N) to[i] = part[i / 2] >> (i % 2 * 16);
      }
    }
  }
}
