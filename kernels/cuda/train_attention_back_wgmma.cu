// Gradients of the attention of one step of the training-time test through the step-0 keys, by
// warpgroup products of Hopper (sm_90a): bf16. One warpgroup copies (TMA), two compute 64 keys or
// 64 queries each; scores and their gradients stay in registers. Sums have one order, whatever runs
// when. Twin: trainer's ops::cpu::attention. Empty for other architectures.

#if __CUDA_ARCH__ == 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct TrainAttentionArgs {
    TensorMap q_map, k_map, v_map, out_map;
    // `out` is written by the forward pass and is the gradient of the output in the backward pass.
    Heads q, k, v, out, d_first, d_second;
    u64 lse, delta, visible, segments;
    u32 heads, kv_heads, qk_dim, v_dim, accumulate;
    float scale;
};

struct Segment {
    u32 q_start, q_end, k_start, k_end;
};

// Shared memory of the gradients of keys and values: 128 of them are resident, tiles of N queries
// and of their gradients stream through three stages, with three numbers for each query.
template <int QK, int V, int N>
struct KeysMemory {
    static constexpr u32 STAGES = 3, RESIDENT = ROWS * (QK + V) * 2, TILE = N * (QK + V) * 2;
    static constexpr u32 COLUMNS = N * 4;
    u32 base;
    __device__ u32 k() const { return base; }
    __device__ u32 v() const { return base + ROWS * QK * 2; }
    __device__ u32 q(u32 stage) const { return base + RESIDENT + TILE * stage; }
    __device__ u32 out(u32 stage) const { return q(stage) + N * QK * 2; }
    __device__ u32 column(u32 stage, u32 of) const {
        return base + RESIDENT + TILE * STAGES + COLUMNS * (3 * stage + of);
    }
    __device__ u32 resident() const { return column(STAGES, 0); }
    __device__ u32 full(u32 stage) const { return resident() + 8 + 8 * stage; }
    __device__ u32 empty(u32 stage) const { return full(STAGES) + 8 * stage; }
};

// What a block of keys works on: tiles of queries, of one head of the group after the other.
struct KeysTask {
    Segment segment;
    i64 first, col_start;
    i32 tiles, total;
    u32 kv_head, group;
};

// Copies four bytes, or writes zeros.
__device__ __forceinline__ void copy_word(u32 to, u64 base, i64 at, bool real) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to),
                 "l"(base + (real ? at * 4 : 0)), "r"(real ? 4 : 0)
                 : "memory");
}

template <int QK, int V, int N>
__device__ __forceinline__ void produce_queries(const TrainAttentionArgs& a, const KeysTask& task,
                                                KeysMemory<QK, V, N> memory) {
    u32 lane = threadIdx.x, stage = 0, parity = 1, head = task.kv_head * task.group;
    if (lane == 0) {
        barrier_expect(memory.resident(), memory.RESIDENT);
        copy_tile<QK, ROWS>(memory.k(), a.k_map, memory.resident(), task.kv_head, task.first);
        copy_tile<V, ROWS>(memory.v(), a.v_map, memory.resident(), task.kv_head, task.first);
    }
    i64 col = task.col_start;
    for (i32 t = 0; t < task.total; t++) {
        barrier_wait(memory.empty(stage), parity);
        u32 full = memory.full(stage);
        if (lane == 0) {
            barrier_expect(full, memory.TILE);
            copy_tile<QK, N>(memory.q(stage), a.q_map, full, head, col);
            copy_tile<V, N>(memory.out(stage), a.out_map, full, head, col);
        }
#pragma unroll
        for (u32 i = lane; i < N; i += 32) {
            i64 query = col + i;
            bool real = query < task.segment.q_end;
            copy_word(memory.column(stage, 0) + i * 4, a.lse, query * a.heads + head, real);
            copy_word(memory.column(stage, 1) + i * 4, a.delta, query * a.heads + head, real);
            copy_word(memory.column(stage, 2) + i * 4, a.visible, query, real);
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
        col += N;
        if (col >= task.segment.q_end) {
            col = task.col_start;
            head++;
        }
        if (++stage == memory.STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ float2 column_pair(u32 address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
    return x;
}

__device__ __forceinline__ u32 shared_word(u32 address) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
}

// Scores of 64 keys and N queries to weights; `ends` are where the queries' views end. Keys from
// `row` on, this thread's `row` and `row + 8`.
template <int N>
__device__ __forceinline__ void weigh_columns(float (&s)[N / 2], u32 lse, u32 ends, float scale,
                                              u32 row, bool masked) {
    u32 pair = threadIdx.x % 4 * 8;
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        float2 origin = column_pair(lse + n * 32 + pair);
        float x = origin.x * LOG2E, y = origin.y * LOG2E;
        s[4 * n] = exp2_fast(s[4 * n] * scale - x);
        s[4 * n + 1] = exp2_fast(s[4 * n + 1] * scale - y);
        s[4 * n + 2] = exp2_fast(s[4 * n + 2] * scale - x);
        s[4 * n + 3] = exp2_fast(s[4 * n + 3] * scale - y);
    }
    if (!masked) return;
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        float2 end = column_pair(ends + n * 32 + pair);
        u32 x = __float_as_uint(end.x), y = __float_as_uint(end.y);
        if (row >= x) s[4 * n] = 0.0f;
        if (row >= y) s[4 * n + 1] = 0.0f;
        if (row + 8 >= x) s[4 * n + 2] = 0.0f;
        if (row + 8 >= y) s[4 * n + 3] = 0.0f;
    }
}

// Gradients of scores, from weights and what they are to change by.
template <int N>
__device__ __forceinline__ void pull_columns(float (&d)[N / 2], const u32 (&p)[N / 16][4],
                                             u32 delta) {
    u32 pair = threadIdx.x % 4 * 8;
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        float2 mean = column_pair(delta + n * 32 + pair);
        u32 low = p[n / 2][n % 2 * 2], high = p[n / 2][n % 2 * 2 + 1];
        d[4 * n] = __uint_as_float(low << 16) * (d[4 * n] - mean.x);
        d[4 * n + 1] = __uint_as_float(low & 0xffff0000u) * (d[4 * n + 1] - mean.y);
        d[4 * n + 2] = __uint_as_float(high << 16) * (d[4 * n + 2] - mean.x);
        d[4 * n + 3] = __uint_as_float(high & 0xffff0000u) * (d[4 * n + 3] - mean.y);
    }
}

// Gradients of 64 keys and values, all 128 threads of warpgroup `group`. Scores and their gradients
// have keys as rows, so that both are left operands in registers.
template <int QK, int V, int N>
__device__ __forceinline__ void consume_queries(const TrainAttentionArgs& a, const KeysTask& task,
                                                KeysMemory<QK, V, N> memory, u32 group) {
    float d_k[QK / 2] = {}, d_v[V / 2] = {};
    u32 k = memory.k() + group * 64 * 128, v = memory.v() + group * 64 * 128;
    i64 warp_first = task.first + group * 64 + threadIdx.x / 32 % 4 * 16;
    u32 row = (u32)warp_first + threadIdx.x % 32 / 4;
    float scale = a.scale * LOG2E;
    u32 stage = 0, parity = 0;
    barrier_wait(memory.resident(), 0);
    i32 place = 0;
    for (i32 t = 0; t < task.total; t++) {
        float s[N / 2], d[N / 2];
        u32 p[N / 16][4], ds[N / 16][4];
        u32 q = memory.q(stage), out = memory.out(stage);
        barrier_wait(memory.full(stage), parity);
        products_begin();
        multiply_rows<QK, ROWS, N>(s, k, q);
        products_commit();
        multiply_rows<V, ROWS, N>(d, v, out);
        products_commit();
        u32 least = shared_word(memory.column(stage, 2));
        bool masked = ++place == task.tiles || (u32)warp_first + 16 > least;
        products_wait<1>();
        pin(s);
        weigh_columns<N>(s, memory.column(stage, 0), memory.column(stage, 2), scale, row, masked);
        pack_columns(p, s);
        products_begin();
        multiply_columns<V, N>(d_v, p, out);
        products_commit();
        products_wait<1>();
        pin(d);
        pull_columns<N>(d, p, memory.column(stage, 1));
        pack_columns(ds, d);
        products_begin();
        multiply_columns<QK, N>(d_k, ds, q);
        products_commit();
        products_wait<0>();
        release(memory.empty(stage));
        if (place == task.tiles) place = 0;
        if (++stage == memory.STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    pin(d_k);
    pin(d_v);
    write_rows<QK>(a.d_first, task.kv_head, warp_first, task.segment.k_end, d_k, a.scale,
                   a.accumulate);
    write_rows<V>(a.d_second, task.kv_head, warp_first, task.segment.k_end, d_v, 1.0f,
                  a.accumulate);
}

// Gradients of 128 keys and values.
template <int QK, int V, int N>
__device__ __forceinline__ void descend_keys(const TrainAttentionArgs& a) {
    extern __shared__ u8 raw[];
    KeysMemory<QK, V, N> memory = {(shared_address(raw) + 1023) & ~1023u};
    KeysTask task;
    task.segment = reinterpret_cast<const Segment*>(a.segments)[blockIdx.z];
    // The keys that most queries see go first.
    task.first = (i64)task.segment.k_start + (i64)blockIdx.x * ROWS;
    if (task.first >= task.segment.k_end) return;
    const u32* visible = reinterpret_cast<const u32*>(a.visible);
    u32 low = task.segment.q_start, high = task.segment.q_end;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (visible[middle] > task.first)
            high = middle;
        else
            low = middle + 1;
    }
    task.kv_head = blockIdx.y;
    task.group = a.heads / a.kv_heads;
    task.col_start = low;
    task.tiles = (i32)((task.segment.q_end - low + N - 1) / N);
    task.total = task.tiles * (i32)task.group;
    if (threadIdx.x == 0) {
        barrier_init(memory.resident(), 1);
        for (u32 stage = 0; stage < memory.STAGES; stage++) {
            // The copies' announcement, and each lane's words.
            barrier_init(memory.full(stage), 1 + 32);
            barrier_init(memory.empty(stage), CONSUMER_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x < 32) produce_queries<QK, V, N>(a, task, memory);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        consume_queries<QK, V, N>(a, task, memory, threadIdx.x / 128 - 1);
    }
}

// Shared memory of the gradients of queries: 128 of them and of the output's gradients are
// resident, tiles of N keys stream through K_STAGES stages, of values through two.
template <int QK, int V, int N>
struct QueriesMemory {
    static constexpr u32 K_STAGES = 3, V_STAGES = N == 128 ? 2 : 3;
    static constexpr u32 RESIDENT = ROWS * (QK + V) * 2, K_BYTES = N * QK * 2, V_BYTES = N * V * 2;
    u32 base;
    __device__ u32 q() const { return base; }
    __device__ u32 out() const { return base + ROWS * QK * 2; }
    __device__ u32 k(u32 stage) const { return base + RESIDENT + K_BYTES * stage; }
    __device__ u32 v(u32 stage) const { return k(K_STAGES) + V_BYTES * stage; }
    __device__ u32 resident() const { return v(V_STAGES); }
    __device__ u32 k_full(u32 stage) const { return resident() + 8 + 8 * stage; }
    __device__ u32 k_empty(u32 stage) const { return k_full(K_STAGES) + 8 * stage; }
    __device__ u32 v_full(u32 stage) const { return k_empty(K_STAGES) + 8 * stage; }
    __device__ u32 v_empty(u32 stage) const { return v_full(V_STAGES) + 8 * stage; }
};

// Which of STAGES stages is next, and the parity of its phase.
template <u32 STAGES>
struct Ring {
    u32 stage, parity;
    __device__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Gradients of 64 queries, all 128 threads of warpgroup `group`.
template <int QK, int V, int N>
__device__ __forceinline__ void consume_keys(const TrainAttentionArgs& a, const Segment& segment,
                                             QueriesMemory<QK, V, N> memory, i64 warp_first,
                                             i32 tiles) {
    u32 group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32, head = blockIdx.y;
    u32 q = memory.q() + group * 64 * 128, out = memory.out() + group * 64 * 128;
    const u32* visible = reinterpret_cast<const u32*>(a.visible);
    float lse[2], delta[2], scale = a.scale * LOG2E;
    i32 ends[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        i64 row = min(warp_first + lane / 4 + 8 * half, (i64)segment.q_end - 1);
        lse[half] = reinterpret_cast<const float*>(a.lse)[row * a.heads + head] * LOG2E;
        delta[half] = reinterpret_cast<const float*>(a.delta)[row * a.heads + head];
        ends[half] = (i32)(visible[row] - segment.k_start);
    }
    i32 least = (i32)(visible[min(warp_first, (i64)segment.q_end - 1)] - segment.k_start);
    float d_q[QK / 2] = {};
    Ring<QueriesMemory<QK, V, N>::K_STAGES> at_k = {0, 0};
    Ring<QueriesMemory<QK, V, N>::V_STAGES> at_v = {0, 0};
    barrier_wait(memory.resident(), 0);
    for (i32 tile = 0; tile < tiles; tile++) {
        float s[N / 2], d[N / 2];
        u32 ds[N / 16][4];
        barrier_wait(memory.k_full(at_k.stage), at_k.parity);
        products_begin();
        multiply_rows<QK, ROWS, N>(s, q, memory.k(at_k.stage));
        products_commit();
        barrier_wait(memory.v_full(at_v.stage), at_v.parity);
        multiply_rows<V, ROWS, N>(d, out, memory.v(at_v.stage));
        products_commit();
        products_wait<1>();
        pin(s);
#pragma unroll
        for (int i = 0; i < N / 2; i++) s[i] = exp2_fast(s[i] * scale - lse[i / 2 % 2]);
        if (tile * N + N > least) {
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                i32 key = tile * N + i / 4 * 8 + (i32)(lane % 4) * 2 + i % 2;
                if (key >= ends[i / 2 % 2]) s[i] = 0.0f;
            }
        }
        products_wait<0>();
        pin(d);
        release(memory.v_empty(at_v.stage));
#pragma unroll
        for (int i = 0; i < N / 2; i++) s[i] *= d[i] - delta[i / 2 % 2];
        pack_columns(ds, s);
        products_begin();
        multiply_columns<QK, N>(d_q, ds, memory.k(at_k.stage));
        products_commit();
        products_wait<0>();
        release(memory.k_empty(at_k.stage));
        at_k.advance();
        at_v.advance();
    }
    pin(d_q);
    write_rows<QK>(a.d_first, head, warp_first, segment.q_end, d_q, a.scale, a.accumulate);
}

// Gradients of 128 queries.
template <int QK, int V, int N>
__device__ __forceinline__ void descend_queries(const TrainAttentionArgs& a) {
    extern __shared__ u8 raw[];
    QueriesMemory<QK, V, N> memory = {(shared_address(raw) + 1023) & ~1023u};
    Segment segment = reinterpret_cast<const Segment*>(a.segments)[blockIdx.z];
    // The rows that see most keys go first.
    i64 first = (i64)segment.q_start + (i64)(gridDim.x - 1 - blockIdx.x) * ROWS;
    if (first >= segment.q_end) return;
    u32 head = blockIdx.y, kv_head = head / (a.heads / a.kv_heads);
    u32 end = reinterpret_cast<const u32*>(a.visible)[min(first + ROWS, (i64)segment.q_end) - 1];
    i32 tiles = ((i32)(end - segment.k_start) + N - 1) / N;
    if (threadIdx.x == 0) {
        barrier_init(memory.resident(), 1);
        for (u32 stage = 0; stage < memory.K_STAGES; stage++) {
            barrier_init(memory.k_full(stage), 1);
            barrier_init(memory.k_empty(stage), CONSUMER_WARPS);
        }
        for (u32 stage = 0; stage < memory.V_STAGES; stage++) {
            barrier_init(memory.v_full(stage), 1);
            barrier_init(memory.v_empty(stage), CONSUMER_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x != 0) return;
        barrier_expect(memory.resident(), memory.RESIDENT);
        copy_tile<QK, ROWS>(memory.q(), a.q_map, memory.resident(), head, first);
        copy_tile<V, ROWS>(memory.out(), a.out_map, memory.resident(), head, first);
        Ring<QueriesMemory<QK, V, N>::K_STAGES> at_k = {0, 1};
        Ring<QueriesMemory<QK, V, N>::V_STAGES> at_v = {0, 1};
        for (i32 tile = 0; tile < tiles; tile++) {
            i64 row = segment.k_start + (i64)tile * N;
            u32 k_full = memory.k_full(at_k.stage), v_full = memory.v_full(at_v.stage);
            barrier_wait(memory.k_empty(at_k.stage), at_k.parity);
            barrier_expect(k_full, memory.K_BYTES);
            copy_tile<QK, N>(memory.k(at_k.stage), a.k_map, k_full, kv_head, row);
            barrier_wait(memory.v_empty(at_v.stage), at_v.parity);
            barrier_expect(v_full, memory.V_BYTES);
            copy_tile<V, N>(memory.v(at_v.stage), a.v_map, v_full, kv_head, row);
            at_k.advance();
            at_v.advance();
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        consume_keys<QK, V, N>(a, segment, memory, first + (threadIdx.x / 32 - 4) * 16, tiles);
    }
}

#define KERNEL(name, qk, v)                              \
    extern "C" __global__ void __launch_bounds__(384, 1) \
        JOIN(JOIN(name, qk), v)(const __grid_constant__ TrainAttentionArgs a)
#define MAKE(qk, v, queries, keys)                                                 \
    KERNEL(train_attention_keys_wgmma, qk, v) { descend_keys<qk, v, queries>(a); } \
    KERNEL(train_attention_queries_wgmma, qk, v) { descend_queries<qk, v, keys>(a); }

// Queries and keys of a streamed tile.
MAKE(64, 64, 64, 128)
MAKE(128, 128, 64, 128)
MAKE(192, 128, 32, 64)

#endif
