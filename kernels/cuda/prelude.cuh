// What all kernels share: types, vectors of eight values, sums over a block. Put before every
// source by the loader; includes nothing, so that NVRTC needs no headers.
//
// Every kernel takes one struct, laid out as its Rust twin in src/cuda. Rows of matrices start
// `stride` values apart, which may be more than they hold. V values are handled a step: eight
// (addresses and strides are then multiples of sixteen bytes, columns of eight) or one.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef long long i64;
typedef unsigned long long u64;

struct bf16 {
    u16 bits;
};

struct Mat {
    u64 address;
    i64 stride;
};

struct Heads {
    u64 address;
    i64 row_stride;
    i64 head_stride;
};

#define NONE 0xffffffffu
#define FULL_WARP 0xffffffffu
#define INFINITY_F __int_as_float(0x7f800000)
#define NAN_F __int_as_float(0x7fc00000)

template <typename T>
__device__ __forceinline__ T* row_of(Mat m, i64 row) {
    return reinterpret_cast<T*>(m.address) + row * m.stride;
}

__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float to_float(float x) { return x; }

// Nearest bf16, ties to even; NaN stays NaN.
__device__ __forceinline__ bf16 to_bf16(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// Two values in one register, the first in the low half.
__device__ __forceinline__ u32 pack_bf16(float first, float second) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
    return y;
}

__device__ __forceinline__ void from_float(bf16& y, float x) { y = to_bf16(x); }
__device__ __forceinline__ void from_float(float& y, float x) { y = x; }

// The value as it will be read back from memory.
__device__ __forceinline__ float rounded(float x, const bf16*) { return to_float(to_bf16(x)); }
__device__ __forceinline__ float rounded(float x, const float*) { return x; }

template <typename T>
__device__ __forceinline__ void load(float (&x)[1], const T* from) {
    x[0] = to_float(*from);
}

template <typename T>
__device__ __forceinline__ void store(T* to, const float (&x)[1]) {
    from_float(*to, x[0]);
}

__device__ __forceinline__ void load(float (&x)[8], const bf16* from) {
    uint4 v = *reinterpret_cast<const uint4*>(from);
    u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = __uint_as_float(w[i] << 16);
        x[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ void load(float (&x)[8], const float* from) {
    float4 a = reinterpret_cast<const float4*>(from)[0];
    float4 b = reinterpret_cast<const float4*>(from)[1];
    x[0] = a.x;
    x[1] = a.y;
    x[2] = a.z;
    x[3] = a.w;
    x[4] = b.x;
    x[5] = b.y;
    x[6] = b.z;
    x[7] = b.w;
}

__device__ __forceinline__ void store(bf16* to, const float (&x)[8]) {
    uint4 v = make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                         pack_bf16(x[6], x[7]));
    *reinterpret_cast<uint4*>(to) = v;
}

__device__ __forceinline__ void store(float* to, const float (&x)[8]) {
    reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, step));
    return x;
}

// x * y + z on two bf16 at once, rounded once.
__device__ __forceinline__ u32 fma_bf16x2(u32 x, u32 y, u32 z) {
    u32 w;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(w) : "r"(x), "r"(y), "r"(z));
    return w;
}

// Sum over a block of up to 1024 threads, whole warps, given to all of them. The order is fixed.
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float parts[32];
    x = warp_sum(x);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();
    if (lane == 0) parts[warp] = x;
    __syncthreads();
    x = lane < (int)blockDim.x / 32 ? parts[lane] : 0.0f;
    return warp_sum(x);
}

__device__ __forceinline__ float block_max(float x) {
    __shared__ float parts[32];
    x = warp_max(x);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();
    if (lane == 0) parts[warp] = x;
    __syncthreads();
    x = lane < (int)blockDim.x / 32 ? parts[lane] : -INFINITY_F;
    return warp_max(x);
}

// Row and first column of a thread in a launch that Rust's `tiled` laid out.
__device__ __forceinline__ i64 tile_row() { return (i64)blockIdx.x * blockDim.y + threadIdx.y; }
template <int V>
__device__ __forceinline__ i64 tile_col() {
    return ((i64)blockIdx.y * blockDim.x + threadIdx.x) * V;
}

// Exact for all 256 codes of E4M3 (no infinities; 0x7f and 0xff are NaN).
__device__ __forceinline__ float e4m3_to_float(u32 code) {
    u32 magnitude = code & 0x7f;
    // The exponent field counts from -7 where that of f32 counts from -127; this scales subnormal
    // numbers too.
    float x = __uint_as_float(magnitude << 20) * __uint_as_float(0x7b800000u);
    if (magnitude == 0x7f) x = NAN_F;
    return code & 0x80 ? -x : x;
}

// Nearest E4M3 code, ties to even; magnitudes above 448 become 448, NaN stays NaN.
__device__ __forceinline__ u32 float_to_e4m3(float x) {
    u32 sign = (__float_as_uint(x) >> 24) & 0x80;
    float magnitude = fabsf(x);
    if (!(magnitude <= INFINITY_F)) return sign | 0x7f;
    if (magnitude >= 448.0f) return sign | 0x7e;
    if (magnitude < 0.015625f) return sign | (u32)rintf(magnitude * 512.0f);
    u32 bits = __float_as_uint(magnitude);
    u32 code = ((bits + 0x7ffffu + ((bits >> 20) & 1)) >> 20) - (120u << 3);
    return sign | (code < 0x7e ? code : 0x7e);
}

// `make` is called with every pair of types.
#define FOR_TYPE_PAIRS(make) make(bf16, bf16) make(bf16, float) make(float, bf16) make(float, float)
#define NAME_bf16 bf16
#define NAME_float f32
#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)
// The name of a kernel for two types and a width, as Rust spells it.
#define KERNEL2(base, from, to, v) JOIN(JOIN(JOIN(base, NAME_##from), NAME_##to), v)
#define KERNEL1(base, type, v) JOIN(JOIN(base, NAME_##type), v)
