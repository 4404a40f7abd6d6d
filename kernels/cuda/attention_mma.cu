// Causal attention of packed sequences on the tensor cores of sm_80 and later: bf16, a running
// softmax over tiles of 64 keys. A block takes 128 queries of one head, a warp 16 of them. Keys and
// values come through a double buffer by asynchronous copies. Heads of other widths lie in tiles
// of the next width, with zeros behind them. Twin: attention.

struct AttentionArgs {
    Heads out, q, k, v, k_shared;
    u64 lse, cu_q, cu_k;
    u32 heads, kv_heads, qk_dim, v_dim, shared_dim;
    float scale;
};

#define QUERIES 128
#define KEYS 64
#define THREADS 256
#define SHARED_WIDTH 64

// Starts to copy ROWS rows of one head, beginning with `first`; rows from `end` on, and values from
// `width` on, become zeros.
template <int WIDTH, int ROWS>
__device__ __forceinline__ void copy_tile(u32 to, Heads x, u32 head, i64 first, i64 end,
                                          u32 width) {
    const bf16* base = reinterpret_cast<const bf16*>(x.address) + head * x.head_stride;
#pragma unroll
    for (u32 i = threadIdx.x; i < ROWS * (WIDTH / 8); i += THREADS) {
        u32 r = i / (WIDTH / 8), piece = i % (WIDTH / 8);
        bool real = first + r < end && piece * 8 < width;
        copy_async(to + place<WIDTH>(r, piece),
                   base + (real ? (first + r) * x.row_stride + piece * 8 : first * x.row_stride),
                   real);
    }
}

// The same for keys whose last SHARED_WIDTH values all heads share.
template <int WIDTH>
__device__ __forceinline__ void copy_shared_keys(u32 to, Heads k, Heads shared, u32 head, i64 first,
                                                 i64 end) {
    const bf16* base = reinterpret_cast<const bf16*>(k.address) + head * k.head_stride;
    const bf16* rest = reinterpret_cast<const bf16*>(shared.address);
    constexpr u32 OWN = (WIDTH - SHARED_WIDTH) / 8;
#pragma unroll
    for (u32 i = threadIdx.x; i < KEYS * (WIDTH / 8); i += THREADS) {
        u32 r = i / (WIDTH / 8), piece = i % (WIDTH / 8);
        bool real = first + r < end;
        i64 row = real ? first + r : first;
        const bf16* from = piece < OWN ? base + row * k.row_stride + piece * 8
                                       : rest + row * shared.row_stride + (piece - OWN) * 8;
        copy_async(to + place<WIDTH>(r, piece), from, real);
    }
}

// Running softmax of the two rows that a thread holds parts of.
struct Softmax {
    float most[2];
    float sum[2];
};

// Turns scores into weights, 2^(score * scale - most), and scales what was summed before.
template <int N>
__device__ __forceinline__ void soften(float (&s)[KEYS / 8][4], float (&o)[N][4], Softmax& soft,
                                       float scale) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = soft.most[half];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
            most = fmaxf(most, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2));
        // A row that has seen no key yet keeps minus infinity; its weights must not be NaN.
        float origin = most == -INFINITY_F ? 0.0f : most * scale;
        float shrink = exp2_fast(soft.most[half] * scale - origin);
        soft.most[half] = most;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; i++) {
                s[n][i] = exp2_fast(s[n][i] * scale - origin);
                sum += s[n][i];
            }
        }
        soft.sum[half] = soft.sum[half] * shrink + sum;
#pragma unroll
        for (int n = 0; n < N; n++) {
            o[n][2 * half] *= shrink;
            o[n][2 * half + 1] *= shrink;
        }
    }
}

template <int QK, int V, bool SHARED, bool PADDED>
__device__ __forceinline__ void attend(const AttentionArgs& a) {
    extern __shared__ __align__(128) u8 memory[];
    constexpr u32 K_BYTES = KEYS * QK * 2, V_BYTES = KEYS * V * 2;
    u32 k_tiles = shared_address(memory), v_tiles = k_tiles + 2 * K_BYTES;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
    u32 qk_dim = PADDED ? a.qk_dim : QK, v_dim = PADDED ? a.v_dim : V;
    const u32* cu_q = reinterpret_cast<const u32*>(a.cu_q) + blockIdx.z;
    const u32* cu_k = reinterpret_cast<const u32*>(a.cu_k) + blockIdx.z;
    i64 q_start = cu_q[0], q_end = cu_q[1], k_start = cu_k[0], k_end = cu_k[1];
    i32 queries = (i32)(q_end - q_start), keys = (i32)(k_end - k_start);
    // The tiles with most keys go first.
    i32 first = ((i32)gridDim.x - 1 - (i32)blockIdx.x) * QUERIES;
    if (first >= queries) return;
    u32 kv_head = (u32)((u64)head * a.kv_heads / a.heads);
    // Query i sees the keys up to i + ahead.
    i32 ahead = keys - queries;
    i32 tiles = (min(first + QUERIES, queries) + ahead + KEYS - 1) / KEYS;

    // Queries go through the memory of the keys into registers.
    u32 q[QK / 16][4];
    copy_tile<QK, QUERIES>(k_tiles, a.q, head, q_start + first, q_end, qk_dim);
    commit();
    wait<0>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < QK / 16; step++)
        load_matrices(q[step], k_tiles + place<QK>(warp * 16 + lane % 16, step * 2 + lane / 16));
    __syncthreads();

    auto copy_keys = [&](i32 tile) {
        if (tile < tiles) {
            u32 to = k_tiles + (tile & 1) * K_BYTES;
            i64 row = k_start + (i64)tile * KEYS;
            if constexpr (SHARED)
                copy_shared_keys<QK>(to, a.k, a.k_shared, kv_head, row, k_end);
            else
                copy_tile<QK, KEYS>(to, a.k, kv_head, row, k_end, qk_dim);
        }
        commit();
    };
    auto copy_values = [&](i32 tile) {
        if (tile < tiles)
            copy_tile<V, KEYS>(v_tiles + (tile & 1) * V_BYTES, a.v, kv_head,
                               k_start + (i64)tile * KEYS, k_end, v_dim);
        commit();
    };

    float o[V / 8][4] = {};
    Softmax soft = {{-INFINITY_F, -INFINITY_F}, {0.0f, 0.0f}};
    float scale = a.scale * 1.4426950408889634f;
    // The keys that the first and the last query of this warp see end here.
    i32 warp_first = first + (i32)warp * 16 + ahead, warp_last = warp_first + 15;
    copy_keys(0);
    copy_values(0);
    for (i32 tile = 0; tile < tiles; tile++) {
        bool active = tile * KEYS <= warp_last;
        wait<1>();
        __syncthreads();
        copy_keys(tile + 1);
        float s[KEYS / 8][4] = {};
        if (active) {
            u32 k_tile = k_tiles + (tile & 1) * K_BYTES;
#pragma unroll
            for (int step = 0; step < QK / 16; step++) {
#pragma unroll
                for (int n = 0; n < KEYS / 16; n++) {
                    u32 b[4];
                    load_matrices(b, k_tile + place<QK>(n * 16 + lane % 8 + (lane / 16) * 8,
                                                        step * 2 + lane / 8 % 2));
                    multiply_add(s[2 * n], q[step], b[0], b[1]);
                    multiply_add(s[2 * n + 1], q[step], b[2], b[3]);
                }
            }
            if (tile * KEYS + KEYS - 1 > warp_first) {
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        i32 key = tile * KEYS + n * 8 + (i32)(lane % 4) * 2 + i % 2;
                        i32 limit = warp_first + (i32)(lane / 4) + i / 2 * 8;
                        if (key > limit) s[n][i] = -INFINITY_F;
                    }
                }
            }
            soften(s, o, soft, scale);
        }
        wait<1>();
        __syncthreads();
        copy_values(tile + 1);
        if (active) {
            u32 v_tile = v_tiles + (tile & 1) * V_BYTES;
#pragma unroll
            for (int step = 0; step < KEYS / 16; step++) {
                u32 p[4] = {pack_bf16(s[2 * step][0], s[2 * step][1]),
                            pack_bf16(s[2 * step][2], s[2 * step][3]),
                            pack_bf16(s[2 * step + 1][0], s[2 * step + 1][1]),
                            pack_bf16(s[2 * step + 1][2], s[2 * step + 1][3])};
#pragma unroll
                for (int n = 0; n < V / 16; n++) {
                    u32 b[4];
                    load_matrices_transposed(
                        b, v_tile + place<V>(step * 16 + lane % 16, n * 2 + lane / 16));
                    multiply_add(o[2 * n], p, b[0], b[1]);
                    multiply_add(o[2 * n + 1], p, b[2], b[3]);
                }
            }
        }
    }
    wait<0>();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = soft.sum[half];
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        i32 query = first + (i32)warp * 16 + (i32)(lane / 4) + half * 8;
        if (query >= queries) continue;
        i64 row = q_start + query;
        float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
        bf16* to = reinterpret_cast<bf16*>(a.out.address) + row * a.out.row_stride +
                   head * a.out.head_stride;
#pragma unroll
        for (int n = 0; n < V / 8; n++)
            if (!PADDED || n * 8 < v_dim)
                *reinterpret_cast<u32*>(to + n * 8 + lane % 4 * 2) =
                    pack_bf16(o[n][2 * half] * factor, o[n][2 * half + 1] * factor);
        if (a.lse && lane % 4 == 0)
            reinterpret_cast<float*>(a.lse)[row * a.heads + head] =
                soft.most[half] * a.scale + logf(sum);
    }
}

#define MAKE(blocks, name, QK, V, SHARED, PADDED)                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks) name(AttentionArgs a) { \
        attend<QK, V, SHARED, PADDED>(a);                                                 \
    }

MAKE(1, attention_mma_192_128, 192, 128, false, false)
MAKE(1, attention_mma_192_128_shared, 192, 128, true, false)
MAKE(1, attention_mma_128_128, 128, 128, false, false)
MAKE(2, attention_mma_64_64, 64, 64, false, false)
MAKE(1, attention_mma_192_128_padded, 192, 128, false, true)
MAKE(1, attention_mma_128_128_padded, 128, 128, false, true)
MAKE(2, attention_mma_64_64_padded, 64, 64, false, true)
MAKE(2, attention_mma_32_32_padded, 32, 32, false, true)
MAKE(2, attention_mma_32_16_padded, 32, 16, false, true)
