// Decodes quantised weights, a block for a piece of a row. Twins: dequant.

struct DequantArgs {
    Mat out;
    u64 packed, scale;
    u32 rows, cols, group, scale_cols;
    float global;
};

__device__ __constant__ float E2M1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                          -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// Each format: `value(r, c)` for one value, `values(x, r, c)` for eight that share a scale.
struct Int4 {
    const DequantArgs& a;
    __device__ float scale(i64 r, u32 c) const {
        return to_float(reinterpret_cast<const bf16*>(a.scale)[r * a.scale_cols + c / a.group]);
    }
    __device__ u32 word(i64 r, u32 c) const {
        return reinterpret_cast<const u32*>(a.packed)[r * ((a.cols + 7) / 8) + c / 8];
    }
    __device__ void values(float (&x)[1], i64 r, u32 c) const {
        i32 q = (i32)(word(r, c) >> (4 * (c % 8)) & 15) - 8;
        x[0] = to_float(to_bf16((float)q * scale(r, c)));
    }
    __device__ void values(float (&x)[8], i64 r, u32 c) const {
        u32 w = word(r, c);
        float s = scale(r, c);
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = to_float(to_bf16((float)((i32)(w >> (4 * i) & 15) - 8) * s));
    }
};

struct Fp8Block {
    const DequantArgs& a;
    __device__ float scale(i64 r, u32 c) const {
        return reinterpret_cast<const float*>(a.scale)[r / a.group * a.scale_cols + c / a.group];
    }
    __device__ const u8* codes(i64 r, u32 c) const {
        return reinterpret_cast<const u8*>(a.packed) + r * a.cols + c;
    }
    __device__ void values(float (&x)[1], i64 r, u32 c) const {
        x[0] = e4m3_to_float(*codes(r, c)) * scale(r, c);
    }
    __device__ void values(float (&x)[8], i64 r, u32 c) const {
        uint2 w = *reinterpret_cast<const uint2*>(codes(r, c));
        float s = scale(r, c);
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = e4m3_to_float((i < 4 ? w.x : w.y) >> (8 * (i % 4)) & 0xff) * s;
    }
};

struct Nvfp4 {
    const DequantArgs& a;
    __device__ float scale(i64 r, u32 c) const {
        return e4m3_to_float(reinterpret_cast<const u8*>(a.scale)[r * a.scale_cols + c / 16]) *
               a.global;
    }
    __device__ const u8* bytes(i64 r, u32 c) const {
        return reinterpret_cast<const u8*>(a.packed) + r * ((a.cols + 1) / 2) + c / 2;
    }
    __device__ void values(float (&x)[1], i64 r, u32 c) const {
        x[0] = E2M1[*bytes(r, c) >> (4 * (c % 2)) & 15] * scale(r, c);
    }
    __device__ void values(float (&x)[8], i64 r, u32 c) const {
        u32 w = *reinterpret_cast<const u32*>(bytes(r, c));
        float s = scale(r, c);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            // Two bits of exponent and one of mantissa where f32 has eight and 23; the factor
            // 2^126 makes up for the exponents' different zero.
            u32 code = w >> (4 * i) & 15;
            float magnitude = __uint_as_float((code & 7) << 22) * __uint_as_float(0x7e800000u);
            x[i] = (code & 8 ? -magnitude : magnitude) * s;
        }
    }
};

template <typename Format, typename T, int V>
__device__ __forceinline__ void decode(const DequantArgs& a) {
    Format format = {a};
    i64 r = blockIdx.x;
    u32 first = blockIdx.y * 4 * 256 * V + threadIdx.x * V;
#pragma unroll
    for (int step = 0; step < 4; step++) {
        u32 c = first + step * 256 * V;
        if (c >= a.cols) return;
        float x[V];
        format.values(x, r, c);
        store(row_of<T>(a.out, r) + c, x);
    }
}

#define MAKE_DEQUANT(name, Format, T)                                                       \
    extern "C" __global__ void __launch_bounds__(256) KERNEL1(name, T, v8)(DequantArgs a) { \
        decode<Format, T, 8>(a);                                                            \
    }                                                                                       \
    extern "C" __global__ void __launch_bounds__(256) KERNEL1(name, T, v1)(DequantArgs a) { \
        decode<Format, T, 1>(a);                                                            \
    }

struct Int4RunArgs {
    u64 out, packed, scale, words;
    u32 scale_shift;
};

// Eight values as bf16, without gaps between rows. For few blocks beside products: all loads of a
// step come before its stores, and no value goes through f32.
__device__ __forceinline__ uint4 decode_int4(u32 word, u32 scale) {
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // Codes i and i + 4 as 128 + code, less 136, times the scale: only the last step rounds.
        u32 codes = (word >> (4 * i) & 0x000f000fu) | 0x43004300u;
        u32 integers = fma_bf16x2(codes, 0x3f803f80u, 0xc308c308u);
        pairs[i] = fma_bf16x2(integers, scale, 0x80008000u);
    }
    return make_uint4(
        __byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[2], pairs[3], 0x5410),
        __byte_perm(pairs[0], pairs[1], 0x7632), __byte_perm(pairs[2], pairs[3], 0x7632));
}

#define RUN_THREADS 1024
#define RUN_STEPS 8

extern "C" __global__ void __launch_bounds__(RUN_THREADS) dequant_int4_run(Int4RunArgs a) {
    const u32* packed = reinterpret_cast<const u32*>(a.packed);
    const u16* scale = reinterpret_cast<const u16*>(a.scale);
    uint4* out = reinterpret_cast<uint4*>(a.out);
    u32 words = (u32)a.words, step = gridDim.x * RUN_THREADS * RUN_STEPS;
    for (u32 start = blockIdx.x * RUN_THREADS * RUN_STEPS + threadIdx.x; start < words;
         start += step) {
        u32 word[RUN_STEPS], factor[RUN_STEPS];
        if (start + (RUN_STEPS - 1) * RUN_THREADS < words) {
#pragma unroll
            for (int i = 0; i < RUN_STEPS; i++) {
                word[i] = packed[start + i * RUN_THREADS];
                factor[i] = scale[(start + i * RUN_THREADS) >> a.scale_shift];
            }
#pragma unroll
            for (int i = 0; i < RUN_STEPS; i++)
                out[start + i * RUN_THREADS] = decode_int4(word[i], factor[i] * 0x10001u);
            continue;
        }
#pragma unroll
        for (int i = 0; i < RUN_STEPS; i++) {
            u32 at = start + i * RUN_THREADS;
            word[i] = at < words ? packed[at] : 0;
            factor[i] = at < words ? scale[at >> a.scale_shift] : 0;
        }
#pragma unroll
        for (int i = 0; i < RUN_STEPS; i++) {
            u32 at = start + i * RUN_THREADS;
            if (at < words) out[at] = decode_int4(word[i], factor[i] * 0x10001u);
        }
    }
}

MAKE_DEQUANT(dequant_int4, Int4, bf16)
MAKE_DEQUANT(dequant_int4, Int4, float)
MAKE_DEQUANT(dequant_fp8_block, Fp8Block, bf16)
MAKE_DEQUANT(dequant_fp8_block, Fp8Block, float)
MAKE_DEQUANT(dequant_nvfp4, Nvfp4, bf16)
MAKE_DEQUANT(dequant_nvfp4, Nvfp4, float)

struct Int4OrderArgs {
    u64 to_codes, to_scales, codes, scales;
    u32 rows, cols, up;
};

// Row of the matrix at place r of sixteen of a product: outputs 2 i and 2 i + 1 at i and i + 8, or
// gate i and up i, where ups start at row `up`.
__device__ __forceinline__ u32 ordered_row(const Int4OrderArgs& a, u32 block, u32 r) {
    return a.up ? block * 8 + r % 8 + (r < 8 ? 0 : a.up) : block * 16 + r % 8 * 2 + r / 8;
}

// Codes and scales in the order of the left operands of products, by squares of 64 rows and
// columns: a thread for each word of eight codes, and for the scales that go with some of them.
extern "C" __global__ void __launch_bounds__(256) order_int4(Int4OrderArgs a) {
    u32 word = blockIdx.x * 256 + threadIdx.x;
    if (word >= a.rows * (a.cols / 8)) return;
    u32 square = word / 512, lane = word / 4 % 32, step = word % 4;
    u32 block = square / (a.cols / 64) * 4 + word / 128 % 4;
    u32 col = square % (a.cols / 64) * 64 + step * 16, shift = lane % 4 * 8, codes = 0;
    const u32* from = reinterpret_cast<const u32*>(a.codes);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 row = ordered_row(a, block, lane / 4 + i % 2 * 8);
        u32 pair = from[(u64)row * (a.cols / 8) + col / 8 + i / 2] >> shift;
        codes |= (pair & 15) << (4 * i) | (pair >> 4 & 15) << (4 * i + 16);
    }
    reinterpret_cast<u32*>(a.to_codes)[word] = codes;
    // Two scales of each of two rows for eight lanes of a warp.
    if (lane % 4 != 0) return;
    u32 row = ordered_row(a, block, lane / 4 + step / 2 * 8);
    u16 scale = reinterpret_cast<const u16*>(
        a.scales)[(u64)row * (a.cols / 32) + square % (a.cols / 64) * 2 + step % 2];
    reinterpret_cast<u16*>(a.to_scales)[word / 128 * 32 + lane / 4 * 4 + step] = scale;
}
