// Tiles of packed NVFP4 (nvfp4_matmul.py) to a bfloat16 matrix [N, K], equal to nvfp4_dequant.reference bit for bit.
// A warp takes a slab of 16 rows and 64 columns; the four lanes that share two rows trade words, so that each writes
// 32 contiguous bytes of either.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

__device__ __forceinline__ u32 pack2(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// Lane t of four holds v[0..3]; afterwards v[i] is what lane i held as v[t].
__device__ __forceinline__ void transpose(u32 (&v)[4], int t) {
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (!(i & d)) {
        const u32 traded = __shfl_xor_sync(~0u, t & d ? v[i] : v[i | d], d);
        (t & d ? v[i] : v[i | d]) = traded;
      }
  }
}

extern "C" __global__ void __launch_bounds__(256)
nvfp4_untile(const uint4* __restrict__ tiles, const float* __restrict__ tensor_scale, u16* __restrict__ out, int N, int K,
             int k_tiles, u32 num_tiles) {
  const u32 tile = blockIdx.x * 2 + (threadIdx.x >> 7);
  if (tile >= num_tiles) return;
  const int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const uint4* from = tiles + (u64)tile * 144;
  const uint4 code = __ldcs(from + warp * 32 + lane);
  const uint2 scale = __ldcs((const uint2*)(from + 128) + warp * 8 + g);
  const float global = *tensor_scale;
  const u32 word[4] = {code.x, code.y, code.z, code.w}, scales[2] = {scale.x, scale.y};
  u32 value[4][4];  // register, step
#pragma unroll
  for (int step = 0; step < 4; step++) {
    const u32 w = word[step];
    const u32 bits[4] = {w & 0x81C081C0u, w << 3 & 0x81C081C0u, w << 6 & 0x81C081C0u,
                         (w << 1 & 0x80008000u) | (w >> 3 & 0x01800180u) | (w >> 7 & 0x00400040u)};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 byte = scales[step >> 1] >> 8 * ((i & 1) * 2 + (step & 1)) & 0xFF;
      const float s = __uint_as_float((byte * 16 + 236 * 128) << 16) * 0x1p-119f * global;
      value[i][step] = pack2(__uint_as_float(bits[i] << 16) * 0x1p126f * s, __uint_as_float(bits[i] & 0xFFFF0000u) * 0x1p126f * s);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) transpose(value[i], t);
  const u32 row_tile = tile / k_tiles;
  const int k = (tile - row_tile * k_tiles) * 64 + t * 16, n = row_tile * 64 + warp * 16 + g;
  if (k >= K) return;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (n + half * 8 >= N) continue;
    uint4* to = (uint4*)(out + (u64)(n + half * 8) * K + k);
    to[0] = make_uint4(value[half][0], value[half][1], value[half][2], value[half][3]);
    to[1] = make_uint4(value[half + 2][0], value[half + 2][1], value[half + 2][2], value[half + 2][3]);
  }
}
