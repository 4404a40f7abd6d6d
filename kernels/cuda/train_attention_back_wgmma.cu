// Gradients of the attention of one step of the training-time test through the step-0 keys, by
// warpgroup products of Hopper (sm_90a): bf16. One warpgroup copies (TMA), two compute 64 keys or
// 64 queries each; scores and their gradients stay in registers. Sums have one order, whatever runs
// when. Twin: trainer's ops::cpu::attention. Empty for other architectures.

#if __CUDA_ARCH__ == 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)

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
    __device__ u32 item() const { return column(STAGES, 0); }
    __device__ u32 item_full() const { return item() + 24; }
    __device__ u32 ready() const { return item() + 32; }
    __device__ u32 done() const { return item() + 40; }
    __device__ u32 full(u32 stage) const { return item() + 48 + 8 * stage; }
    __device__ u32 words_full(u32 stage) const { return full(STAGES) + 8 * stage; }
    __device__ u32 empty(u32 stage) const { return words_full(STAGES) + 8 * stage; }
};

// Log-sum-exps, deltas and ends of what they see of the queries of a tile, by a whole warp; a query
// that is not there sees nothing.
template <int QK, int V, int N>
__device__ __forceinline__ void put_words(const TrainAttentionArgs& a, KeysMemory<QK, V, N> memory,
                                          u32 stage, u32 head, u32 first, u32 end) {
    u32 words[N / 32][3];
#pragma unroll
    for (int i = 0; i < N / 32; i++) {
        u32 query = first + i * 32 + threadIdx.x;
        i64 at = (i64)query * a.heads + head;
        bool real = query < end;
        words[i][0] = real ? reinterpret_cast<const u32*>(a.lse)[at] : 0;
        words[i][1] = real ? reinterpret_cast<const u32*>(a.delta)[at] : 0;
        words[i][2] = real ? reinterpret_cast<const u32*>(a.visible)[query] : 0;
    }
#pragma unroll
    for (int i = 0; i < N / 32; i++)
#pragma unroll
        for (int of = 0; of < 3; of++)
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(memory.column(stage, of) +
                                                         (i * 32 + threadIdx.x) * 4),
                         "r"(words[i][of])
                         : "memory");
    barrier_arrive(memory.words_full(stage));
}

// The first query of a document that sees `key`, by a whole warp.
__device__ __forceinline__ u32 first_that_sees(const u32* visible, u32 key, u32 low, u32 high) {
    // Queries before `low` do not see it, those from `high` on do.
    while (low < high) {
        u32 step = (high - low + 31) / 32, at = low + threadIdx.x % 32 * step;
        u32 blind = __popc(__ballot_sync(FULL_WARP, at < high && visible[at] <= key));
        if (blind == 0) return low;
        low += (blind - 1) * step + 1;
        high = min(low + step - 1, high);
    }
    return low;
}

// The copies of a block, by a whole warp.
template <int QK, int V, int N>
__device__ __forceinline__ void produce_queries(const TrainAttentionArgs& a,
                                                KeysMemory<QK, V, N> memory) {
    const u32* visible = reinterpret_cast<const u32*>(a.visible);
    u32 lane = threadIdx.x, items = 0, group = a.heads / a.kv_heads;
    Ring<KeysMemory<QK, V, N>::STAGES> ring = {0, 1};
    for (Walk walk(a.documents, a.kv_heads, a.blocks); walk.next();) {
        Segment segment = reinterpret_cast<const Segment*>(a.segments)[walk.document];
        // The keys that most queries see go first.
        u32 first = segment.k_start + walk.block * ROWS;
        if (first >= segment.k_end) continue;
        u32 start = first_that_sees(visible, first, segment.q_start, segment.q_end);
        u32 each = (segment.q_end - start + N - 1) / N, tiles = each * group;
        // The first use of memory passes at once: the phase before the first counts as over.
        barrier_wait(memory.done(), items++ & 1 ^ 1);
        if (lane == 0) {
            put_item(memory.item(), memory.item_full(),
                     {first, segment.k_end, 0, walk.head, tiles, each});
            barrier_expect(memory.ready(), memory.RESIDENT);
            copy_tile<QK, ROWS>(memory.k(), a.k_map, memory.ready(), walk.head, first);
            copy_tile<V, ROWS>(memory.v(), a.v_map, memory.ready(), walk.head, first);
        }
        u32 head = walk.head * group, col = start;
        for (u32 tile = 0; tile < tiles; tile++) {
            u32 stage = ring.stage, full = memory.full(stage);
            barrier_wait(memory.empty(stage), ring.parity);
            if (lane == 0) {
                barrier_expect(full, memory.TILE);
                copy_tile<QK, N>(memory.q(stage), a.q_map, full, head, col);
                copy_tile<V, N>(memory.out(stage), a.out_map, full, head, col);
            }
            put_words(a, memory, stage, head, col, segment.q_end);
            ring.advance();
            col += N;
            if (col >= segment.q_end) {
                col = start;
                head++;
            }
        }
    }
    barrier_wait(memory.done(), items & 1 ^ 1);
    if (lane == 0) put_item(memory.item(), memory.item_full(), {0, 0, 0, 0, STOP});
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
__device__ __forceinline__ void consume_queries(const TrainAttentionArgs& a, const Item& item,
                                                KeysMemory<QK, V, N> memory,
                                                Ring<KeysMemory<QK, V, N>::STAGES>& ring) {
    float d_k[QK / 2] = {}, d_v[V / 2] = {};
    u32 group = threadIdx.x / 128 - 1, warp_first = item.first + (threadIdx.x / 32 - 4) * 16;
    u32 k = memory.k() + group * 64 * 128, v = memory.v() + group * 64 * 128;
    u32 row = warp_first + threadIdx.x % 32 / 4;
    float scale = a.scale * LOG2E;
    // Tiles until the last of a head, which may hold fewer queries than others.
    u32 left = item.each;
    for (u32 tile = 0; tile < item.tiles; tile++) {
        float s[N / 2], d[N / 2];
        u32 p[N / 16][4], ds[N / 16][4];
        u32 stage = ring.stage, q = memory.q(stage), out = memory.out(stage);
        barrier_wait(memory.full(stage), ring.parity);
        products_begin();
        multiply_rows<QK, ROWS, N>(s, k, q);
        products_commit();
        multiply_rows<V, ROWS, N>(d, v, out);
        products_commit();
        barrier_wait(memory.words_full(stage), ring.parity);
        bool last = --left == 0;
        bool masked = last || warp_first + 16 > shared_word(memory.column(stage, 2));
        if (last) left = item.each;
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
        // Every thread has read words of its own, so every thread gives them back.
        barrier_arrive(memory.empty(stage));
        ring.advance();
    }
    barrier_arrive(memory.done());
    pin(d_k);
    pin(d_v);
    float factors[2] = {a.scale, a.scale}, ones[2] = {1.0f, 1.0f};
    write_rows<QK>(a.d_first, item.head, warp_first, item.end, d_k, factors, a.accumulate);
    write_rows<V>(a.d_second, item.head, warp_first, item.end, d_v, ones, a.accumulate);
}

// Gradients of keys and values.
template <int QK, int V, int N>
__device__ __forceinline__ void descend_keys(const TrainAttentionArgs& a) {
    extern __shared__ u8 raw[];
    KeysMemory<QK, V, N> memory = {(shared_address(raw) + 1023) & ~1023u};
    if (threadIdx.x == 0) {
        barrier_init(memory.item_full(), 1);
        barrier_init(memory.ready(), 1);
        barrier_init(memory.done(), CONSUMERS);
        for (u32 stage = 0; stage < memory.STAGES; stage++) {
            barrier_init(memory.full(stage), 1);
            barrier_init(memory.words_full(stage), 32);
            barrier_init(memory.empty(stage), CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x < 32) produce_queries(a, memory);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    Ring<KeysMemory<QK, V, N>::STAGES> ring = {0, 0};
    for (u32 items = 0;; items++) {
        barrier_wait(memory.item_full(), items & 1);
        Item item = take_item(memory.item());
        if (item.tiles == STOP) return;
        barrier_wait(memory.ready(), items & 1);
        consume_queries(a, item, memory, ring);
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
    __device__ u32 item() const { return v(V_STAGES); }
    __device__ u32 item_full() const { return item() + 24; }
    __device__ u32 ready() const { return item() + 32; }
    __device__ u32 done() const { return item() + 40; }
    __device__ u32 k_full(u32 stage) const { return item() + 48 + 8 * stage; }
    __device__ u32 k_empty(u32 stage) const { return k_full(K_STAGES) + 8 * stage; }
    __device__ u32 v_full(u32 stage) const { return k_empty(K_STAGES) + 8 * stage; }
    __device__ u32 v_empty(u32 stage) const { return v_full(V_STAGES) + 8 * stage; }
};

template <int QK, int V, int N>
struct QueriesRings {
    Ring<QueriesMemory<QK, V, N>::K_STAGES> k;
    Ring<QueriesMemory<QK, V, N>::V_STAGES> v;
};

// The copies of a block, by one thread.
template <int QK, int V, int N>
__device__ __forceinline__ void produce_keys(const TrainAttentionArgs& a,
                                             QueriesMemory<QK, V, N> memory) {
    const u32* visible = reinterpret_cast<const u32*>(a.visible);
    QueriesRings<QK, V, N> rings = {{0, 1}, {0, 1}};
    u32 items = 0;
    for (Walk walk(a.documents, a.heads, a.blocks); walk.next();) {
        Segment segment = reinterpret_cast<const Segment*>(a.segments)[walk.document];
        // The rows that see most keys go first.
        u32 first = segment.q_start + (a.blocks - 1 - walk.block) * ROWS;
        if (first >= segment.q_end) continue;
        u32 kv_head = walk.head / (a.heads / a.kv_heads);
        u32 seen = visible[min(first + ROWS, segment.q_end) - 1] - segment.k_start;
        u32 tiles = (seen + N - 1) / N;
        // The first use of memory passes at once: the phase before the first counts as over.
        barrier_wait(memory.done(), items++ & 1 ^ 1);
        put_item(memory.item(), memory.item_full(),
                 {first, segment.q_end, segment.k_start, walk.head, tiles});
        barrier_expect(memory.ready(), memory.RESIDENT);
        copy_tile<QK, ROWS>(memory.q(), a.q_map, memory.ready(), walk.head, first);
        copy_tile<V, ROWS>(memory.out(), a.out_map, memory.ready(), walk.head, first);
        for (u32 tile = 0; tile < tiles; tile++) {
            i64 row = segment.k_start + (i64)tile * N;
            u32 k_full = memory.k_full(rings.k.stage), v_full = memory.v_full(rings.v.stage);
            barrier_wait(memory.k_empty(rings.k.stage), rings.k.parity);
            barrier_expect(k_full, memory.K_BYTES);
            copy_tile<QK, N>(memory.k(rings.k.stage), a.k_map, k_full, kv_head, row);
            barrier_wait(memory.v_empty(rings.v.stage), rings.v.parity);
            barrier_expect(v_full, memory.V_BYTES);
            copy_tile<V, N>(memory.v(rings.v.stage), a.v_map, v_full, kv_head, row);
            rings.k.advance();
            rings.v.advance();
        }
    }
    barrier_wait(memory.done(), items & 1 ^ 1);
    put_item(memory.item(), memory.item_full(), {0, 0, 0, 0, STOP});
}

// Gradients of 64 queries, all 128 threads of a warpgroup.
template <int QK, int V, int N>
__device__ __forceinline__ void consume_keys(const TrainAttentionArgs& a, const Item& item,
                                             QueriesMemory<QK, V, N> memory,
                                             QueriesRings<QK, V, N>& rings) {
    u32 group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
    u32 warp_first = item.first + (threadIdx.x / 32 - 4) * 16;
    u32 q = memory.q() + group * 64 * 128, out = memory.out() + group * 64 * 128;
    const u32* visible = reinterpret_cast<const u32*>(a.visible);
    float lse[2], delta[2], scale = a.scale * LOG2E;
    i32 ends[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        i64 row = min(warp_first + lane / 4 + 8 * half, item.end - 1);
        lse[half] = reinterpret_cast<const float*>(a.lse)[row * a.heads + item.head] * LOG2E;
        delta[half] = reinterpret_cast<const float*>(a.delta)[row * a.heads + item.head];
        ends[half] = (i32)(visible[row] - item.k_start);
    }
    i32 least = (i32)(visible[min(warp_first, item.end - 1)] - item.k_start);
    float d_q[QK / 2] = {};
    for (i32 tile = 0; tile < (i32)item.tiles; tile++) {
        float s[N / 2], d[N / 2];
        u32 ds[N / 16][4], k = memory.k(rings.k.stage);
        barrier_wait(memory.k_full(rings.k.stage), rings.k.parity);
        products_begin();
        multiply_rows<QK, ROWS, N>(s, q, k);
        products_commit();
        barrier_wait(memory.v_full(rings.v.stage), rings.v.parity);
        multiply_rows<V, ROWS, N>(d, out, memory.v(rings.v.stage));
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
        release(memory.v_empty(rings.v.stage));
#pragma unroll
        for (int i = 0; i < N / 2; i++) s[i] *= d[i] - delta[i / 2 % 2];
        pack_columns(ds, s);
        products_begin();
        multiply_columns<QK, N>(d_q, ds, k);
        products_commit();
        products_wait<0>();
        release(memory.k_empty(rings.k.stage));
        rings.k.advance();
        rings.v.advance();
    }
    barrier_arrive(memory.done());
    pin(d_q);
    float factors[2] = {a.scale, a.scale};
    write_rows<QK>(a.d_first, item.head, warp_first, item.end, d_q, factors, a.accumulate);
}

// Gradients of queries.
template <int QK, int V, int N>
__device__ __forceinline__ void descend_queries(const TrainAttentionArgs& a) {
    extern __shared__ u8 raw[];
    QueriesMemory<QK, V, N> memory = {(shared_address(raw) + 1023) & ~1023u};
    if (threadIdx.x == 0) {
        barrier_init(memory.item_full(), 1);
        barrier_init(memory.ready(), 1);
        barrier_init(memory.done(), CONSUMERS);
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
        if (threadIdx.x == 0) produce_keys(a, memory);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    QueriesRings<QK, V, N> rings = {{0, 0}, {0, 0}};
    for (u32 items = 0;; items++) {
        barrier_wait(memory.item_full(), items & 1);
        Item item = take_item(memory.item());
        if (item.tiles == STOP) return;
        barrier_wait(memory.ready(), items & 1);
        consume_keys(a, item, memory, rings);
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
