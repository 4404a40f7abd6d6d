// Attention of one step of the training-time test against the step-0 keys, forward and backward, on
// the tensor cores of sm_80 and later: bf16. Query rows are those that are trained, so each has its
// own end of what it sees; ends ascend within a document. Twin: trainer's ops::cpu::attention.

struct TrainAttentionArgs {
    // `out` is written by the forward pass and is the gradient of the output in the backward pass.
    Heads q, k, v, out, d_first, d_second;
    u64 lse, delta, visible, segments;
    u32 heads, kv_heads, qk_dim, v_dim, accumulate;
    float scale;
};

#define ROWS 128
#define TILE 64
#define THREADS 256
#define LOG2E 1.4426950408889634f

struct Segment {
    u32 q_start, q_end, k_start, k_end;
};

// Starts to copy COUNT rows of one head, beginning with `first`; rows from `end` on become zeros.
template <int WIDTH, int COUNT>
__device__ __forceinline__ void copy_tile(u32 to, Heads x, u32 head, i64 first, i64 end) {
    const bf16* base = reinterpret_cast<const bf16*>(x.address) + head * x.head_stride;
#pragma unroll
    for (u32 i = threadIdx.x; i < COUNT * (WIDTH / 8); i += THREADS) {
        u32 r = i / (WIDTH / 8), piece = i % (WIDTH / 8);
        bool real = first + r < end;
        copy_async(to + place<WIDTH>(r, piece),
                   base + (real ? first + r : end - 1) * x.row_stride + piece * 8, real);
    }
}

// c [16, COLS] += a [16, WIDTH] b [COLS, WIDTH]^T; a from row `a_row` of its tile, b from `b_row`.
template <int WIDTH, int COLS>
__device__ __forceinline__ void multiply_rows(float (&c)[COLS / 8][4], u32 a_tile, u32 a_row,
                                              u32 b_tile, u32 b_row) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < WIDTH / 16; step++) {
        u32 a[4];
        load_matrices(a, a_tile + place<WIDTH>(a_row + lane % 16, step * 2 + lane / 16));
#pragma unroll
        for (int n = 0; n < COLS / 16; n++) {
            u32 b[4];
            load_matrices(b, b_tile + place<WIDTH>(b_row + n * 16 + lane % 8 + (lane / 16) * 8,
                                                   step * 2 + lane / 8 % 2));
            multiply_add(c[2 * n], a, b[0], b[1]);
            multiply_add(c[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// c [16, WIDTH] += a [16, COLS] b [COLS, WIDTH]; a in registers, b from `b_row` of its tile.
template <int WIDTH, int COLS>
__device__ __forceinline__ void multiply_columns(float (&c)[WIDTH / 8][4],
                                                 const u32 (&a)[COLS / 16][4], u32 b_tile,
                                                 u32 b_row) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < COLS / 16; step++) {
#pragma unroll
        for (int n = 0; n < WIDTH / 16; n++) {
            u32 b[4];
            load_matrices_transposed(
                b, b_tile + place<WIDTH>(b_row + step * 16 + lane % 16, n * 2 + lane / 16));
            multiply_add(c[2 * n], a[step], b[0], b[1]);
            multiply_add(c[2 * n + 1], a[step], b[2], b[3]);
        }
    }
}

// Results of one product as the first operand of the next.
template <int COLS>
__device__ __forceinline__ void pack_rows(u32 (&a)[COLS / 16][4], const float (&c)[COLS / 8][4]) {
#pragma unroll
    for (int j = 0; j < COLS / 16; j++) {
        a[j][0] = pack_bf16(c[2 * j][0], c[2 * j][1]);
        a[j][1] = pack_bf16(c[2 * j][2], c[2 * j][3]);
        a[j][2] = pack_bf16(c[2 * j + 1][0], c[2 * j + 1][1]);
        a[j][3] = pack_bf16(c[2 * j + 1][2], c[2 * j + 1][3]);
    }
}

// Writes c [16, WIDTH] * factor to rows of one head, or adds it to what is there.
template <int WIDTH>
__device__ __forceinline__ void write_rows(Heads to, u32 head, i64 first, i64 end,
                                           const float (&c)[WIDTH / 8][4], float factor, bool add) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        i64 row = first + lane / 4 + 8 * half;
        if (row >= end) continue;
        bf16* base = reinterpret_cast<bf16*>(to.address) + row * to.row_stride +
                     head * to.head_stride + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < WIDTH / 8; n++) {
            u32* at = reinterpret_cast<u32*>(base + n * 8);
            float x = c[n][2 * half] * factor, y = c[n][2 * half + 1] * factor;
            if (add) {
                u32 old = *at;
                x += __uint_as_float(old << 16);
                y += __uint_as_float(old & 0xffff0000u);
            }
            *at = pack_bf16(x, y);
        }
    }
}

template <int QK, int V>
__device__ __forceinline__ void attend(const TrainAttentionArgs& a) {
    extern __shared__ __align__(128) u8 memory[];
    constexpr u32 Q_BYTES = ROWS * QK * 2, K_BYTES = TILE * QK * 2, V_BYTES = TILE * V * 2;
    u32 q_tile = shared_address(memory), stream = q_tile + Q_BYTES;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
    Segment segment = reinterpret_cast<const Segment*>(a.segments)[blockIdx.z];
    const u32* visible = reinterpret_cast<const u32*>(a.visible);
    i32 queries = (i32)(segment.q_end - segment.q_start);
    // The tiles with most keys go first.
    i32 first = ((i32)gridDim.x - 1 - (i32)blockIdx.x) * ROWS;
    if (first >= queries) return;
    u32 kv_head = head / (a.heads / a.kv_heads);
    auto seen = [&](i32 query) {
        return (i32)(visible[segment.q_start + min(query, queries - 1)] - segment.k_start);
    };
    i32 tiles = (seen(first + ROWS - 1) + TILE - 1) / TILE;
    i32 warp_first = first + (i32)warp * 16;
    i32 warp_least = seen(warp_first), warp_most = seen(warp_first + 15);
    i32 ends[2] = {seen(warp_first + (i32)lane / 4), seen(warp_first + (i32)lane / 4 + 8)};

    auto start = [&](i32 tile) {
        if (tile < tiles) {
            u32 to = stream + (tile & 1) * (K_BYTES + V_BYTES);
            i64 row = segment.k_start + (i64)tile * TILE;
            copy_tile<QK, TILE>(to, a.k, kv_head, row, segment.k_end);
            copy_tile<V, TILE>(to + K_BYTES, a.v, kv_head, row, segment.k_end);
        }
        commit();
    };
    copy_tile<QK, ROWS>(q_tile, a.q, head, (i64)segment.q_start + first, segment.q_end);
    start(0);
    float o[V / 8][4] = {};
    float most[2] = {-INFINITY_F, -INFINITY_F}, sum[2] = {0.0f, 0.0f};
    float scale = a.scale * LOG2E;
    for (i32 tile = 0; tile < tiles; tile++) {
        wait<0>();
        __syncthreads();
        start(tile + 1);
        if (tile * TILE >= warp_most) continue;
        u32 k_tile = stream + (tile & 1) * (K_BYTES + V_BYTES);
        float s[TILE / 8][4] = {};
        multiply_rows<QK, TILE>(s, q_tile, warp * 16, k_tile, 0);
        if (tile * TILE + TILE > warp_least) {
#pragma unroll
            for (int n = 0; n < TILE / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    i32 key = tile * TILE + n * 8 + (i32)(lane % 4) * 2 + i % 2;
                    if (key >= ends[i / 2]) s[n][i] = -INFINITY_F;
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float peak = most[half];
#pragma unroll
            for (int n = 0; n < TILE / 8; n++)
                peak = fmaxf(peak, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
            peak = fmaxf(peak, __shfl_xor_sync(FULL_WARP, peak, 1));
            peak = fmaxf(peak, __shfl_xor_sync(FULL_WARP, peak, 2));
            float origin = peak == -INFINITY_F ? 0.0f : peak * scale;
            float shrink = exp2_fast(most[half] * scale - origin);
            most[half] = peak;
            float total = 0.0f;
#pragma unroll
            for (int n = 0; n < TILE / 8; n++) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    s[n][i] = exp2_fast(s[n][i] * scale - origin);
                    total += s[n][i];
                }
            }
            sum[half] = sum[half] * shrink + total;
#pragma unroll
            for (int n = 0; n < V / 8; n++) {
                o[n][2 * half] *= shrink;
                o[n][2 * half + 1] *= shrink;
            }
        }
        u32 p[TILE / 16][4];
        pack_rows<TILE>(p, s);
        multiply_columns<V, TILE>(o, p, k_tile + K_BYTES, 0);
    }
    wait<0>();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        sum[half] += __shfl_xor_sync(FULL_WARP, sum[half], 1);
        sum[half] += __shfl_xor_sync(FULL_WARP, sum[half], 2);
        float factor = sum[half] == 0.0f ? 0.0f : 1.0f / sum[half];
#pragma unroll
        for (int n = 0; n < V / 8; n++) {
            o[n][2 * half] *= factor;
            o[n][2 * half + 1] *= factor;
        }
        i32 query = warp_first + (i32)lane / 4 + 8 * half;
        if (query < queries && lane % 4 == 0)
            reinterpret_cast<float*>(a.lse)[((i64)segment.q_start + query) * a.heads + head] =
                most[half] * a.scale + logf(sum[half]);
    }
    write_rows<V>(a.out, head, (i64)segment.q_start + warp_first, segment.q_end, o, 1.0f, false);
}

// Gradients of keys and values (BY_KEYS: rows are keys, columns queries) or of queries (the other
// way round). A block holds 128 rows and streams tiles of 64 columns; CHUNK of them are in
// registers at a time.
template <int QK, int V, int CHUNK, bool BY_KEYS>
__device__ __forceinline__ void descend(const TrainAttentionArgs& a) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ float col_lse[2][TILE], col_delta[2][TILE];
    __shared__ u32 col_end[2][TILE];
    constexpr u32 X_BYTES = ROWS * QK * 2, Y_BYTES = ROWS * V * 2;
    constexpr u32 SX_BYTES = TILE * QK * 2, SY_BYTES = TILE * V * 2;
    u32 x_tile = shared_address(memory), y_tile = x_tile + X_BYTES, stream = y_tile + Y_BYTES;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Segment segment = reinterpret_cast<const Segment*>(a.segments)[blockIdx.z];
    const u32* visible = reinterpret_cast<const u32*>(a.visible);
    const float* lse = reinterpret_cast<const float*>(a.lse);
    const float* delta = reinterpret_cast<const float*>(a.delta);
    u32 group = a.heads / a.kv_heads;
    i64 row_start = BY_KEYS ? segment.k_start : segment.q_start,
        row_end = BY_KEYS ? segment.k_end : segment.q_end;
    // The rows with most columns go first.
    i64 first = row_start + (i64)(BY_KEYS ? blockIdx.x : gridDim.x - 1 - blockIdx.x) * ROWS;
    if (first >= row_end) return;
    i64 warp_first = first + warp * 16;

    // Columns: for keys the queries that see the first of them, of every head of the group.
    i64 col_start, col_stop;
    if (BY_KEYS) {
        u32 low = segment.q_start, high = segment.q_end;
        while (low < high) {
            u32 middle = (low + high) / 2;
            if (visible[middle] > first)
                high = middle;
            else
                low = middle + 1;
        }
        col_start = low;
        col_stop = segment.q_end;
    } else {
        col_start = segment.k_start;
        col_stop = visible[min(first + ROWS, row_end) - 1];
    }
    i32 tiles = (i32)((col_stop - col_start + TILE - 1) / TILE);
    i32 total = BY_KEYS ? tiles * (i32)group : tiles;
    u32 row_head = blockIdx.y;
    Heads rows_x = BY_KEYS ? a.k : a.q, rows_y = BY_KEYS ? a.v : a.out;
    Heads cols_x = BY_KEYS ? a.q : a.k, cols_y = BY_KEYS ? a.out : a.v;
    auto head_of = [&](i32 t) {
        return BY_KEYS ? row_head * group + (u32)(t / tiles) : row_head / group;
    };

    auto start = [&](i32 t) {
        if (t < total) {
            u32 head = head_of(t), to = stream + (t & 1) * (SX_BYTES + SY_BYTES);
            i64 col = col_start + (i64)(t % tiles) * TILE;
            i64 end = BY_KEYS ? (i64)segment.q_end : (i64)segment.k_end;
            copy_tile<QK, TILE>(to, cols_x, head, col, end);
            copy_tile<V, TILE>(to + SX_BYTES, cols_y, head, col, end);
            if (BY_KEYS && threadIdx.x < TILE) {
                i64 query = col + threadIdx.x;
                bool real = query < end;
                i64 at = real ? query * a.heads + head : 0;
                col_lse[t & 1][threadIdx.x] = real ? lse[at] * LOG2E : 0.0f;
                col_delta[t & 1][threadIdx.x] = real ? delta[at] : 0.0f;
                col_end[t & 1][threadIdx.x] = real ? visible[query] : 0;
            }
        }
        commit();
    };
    copy_tile<QK, ROWS>(x_tile, rows_x, row_head, first, row_end);
    copy_tile<V, ROWS>(y_tile, rows_y, row_head, first, row_end);
    start(0);

    float row_lse[2] = {}, row_delta[2] = {};
    i64 row_seen[2] = {}, warp_most = 0;
    if (!BY_KEYS) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            i64 row = min(warp_first + lane / 4 + 8 * half, row_end - 1);
            row_lse[half] = lse[row * a.heads + row_head] * LOG2E;
            row_delta[half] = delta[row * a.heads + row_head];
            row_seen[half] = visible[row];
        }
        warp_most = visible[min(warp_first + 15, row_end - 1)];
    }
    float first_sum[QK / 8][4] = {};
    float second_sum[BY_KEYS ? V / 8 : 1][4] = {};
    float scale = a.scale * LOG2E;
    for (i32 t = 0; t < total; t++) {
        wait<0>();
        __syncthreads();
        start(t + 1);
        u32 sx = stream + (t & 1) * (SX_BYTES + SY_BYTES), sy = sx + SX_BYTES;
        i64 tile_first = col_start + (i64)(t % tiles) * TILE;
#pragma unroll 1
        for (int chunk = 0; chunk < TILE; chunk += CHUNK) {
            // Ends ascend, but columns past the last have end 0: look at the last real one.
            i64 last = min(tile_first + chunk + CHUNK, col_stop) - 1;
            if (last < tile_first + chunk) continue;
            if (BY_KEYS ? warp_first >= (i64)col_end[t & 1][last - tile_first]
                        : tile_first + chunk >= warp_most)
                continue;
            float s[CHUNK / 8][4] = {};
            multiply_rows<QK, CHUNK>(s, x_tile, warp * 16, sx, chunk);
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    u32 col = chunk + n * 8 + lane % 4 * 2 + i % 2;
                    bool sees = BY_KEYS
                                    ? warp_first + lane / 4 + 8 * (i / 2) < (i64)col_end[t & 1][col]
                                    : tile_first + col < row_seen[i / 2];
                    float origin = BY_KEYS ? col_lse[t & 1][col] : row_lse[i / 2];
                    s[n][i] = sees ? exp2_fast(s[n][i] * scale - origin) : 0.0f;
                }
            }
            u32 p[CHUNK / 16][4];
            pack_rows<CHUNK>(p, s);
            if constexpr (BY_KEYS) multiply_columns<V, CHUNK>(second_sum, p, sy, chunk);
            float d[CHUNK / 8][4] = {};
            multiply_rows<V, CHUNK>(d, y_tile, warp * 16, sy, chunk);
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    u32 col = chunk + n * 8 + lane % 4 * 2 + i % 2;
                    u32 pair = p[n / 2][(n % 2) * 2 + i / 2];
                    float weight = __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
                    d[n][i] =
                        weight * (d[n][i] - (BY_KEYS ? col_delta[t & 1][col] : row_delta[i / 2]));
                }
            }
            u32 ds[CHUNK / 16][4];
            pack_rows<CHUNK>(ds, d);
            multiply_columns<QK, CHUNK>(first_sum, ds, sx, chunk);
        }
    }
    wait<0>();
    write_rows<QK>(a.d_first, row_head, warp_first, row_end, first_sum, a.scale, a.accumulate);
    if constexpr (BY_KEYS)
        write_rows<V>(a.d_second, row_head, warp_first, row_end, second_sum, 1.0f, a.accumulate);
}

#define MAKE(qk, v, chunk)                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                   \
        JOIN(JOIN(train_attention_mma, qk), v)(TrainAttentionArgs a) {         \
        attend<qk, v>(a);                                                      \
    }                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                   \
        JOIN(JOIN(train_attention_keys_mma, qk), v)(TrainAttentionArgs a) {    \
        descend<qk, v, chunk, true>(a);                                        \
    }                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                   \
        JOIN(JOIN(train_attention_queries_mma, qk), v)(TrainAttentionArgs a) { \
        descend<qk, v, chunk, false>(a);                                       \
    }

MAKE(64, 64, 64)
MAKE(128, 128, 64)
MAKE(192, 128, 32)
