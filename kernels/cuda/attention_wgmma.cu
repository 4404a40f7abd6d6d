// Causal attention of packed sequences for Hopper (sm_90a): bf16, warpgroup products (wgmma), keys
// and values of 128 positions in two stages each. A block takes 128 queries of one head: one
// warpgroup copies, two compute 64 queries each. While the tensor cores multiply weights and values
// of one tile, the softmax of the next runs. Twin: attention. Empty for other architectures.

#if __CUDA_ARCH__ == 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct AttentionArgs {
    Heads out, q, k, v, k_shared;
    u64 lse, cu_q, cu_k;
    u32 heads, kv_heads, qk_dim, v_dim, shared_dim;
    float scale;
};

// Queries of a block, and keys of a tile.
#define ROWS 128
#define SHARED_WIDTH 64
// Bytes of [ROWS, 64] values: the unit of the 128-byte swizzle.
#define BLOCK_BYTES (ROWS * 128)
// One arrival a warp that computes.
#define CONSUMER_WARPS 8

__device__ __forceinline__ void copy_async(u32 to, const void* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(real ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Makes ordinary writes to shared memory visible to the tensor cores.
__device__ __forceinline__ void fence_for_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Matrix descriptor for the 128-byte swizzle: groups of eight 128-byte rows 1024 bytes apart,
// blocks of 64 columns BLOCK_BYTES apart.
__device__ __forceinline__ u64 descriptor(u32 address) {
    u64 block = BLOCK_BYTES >> 4, group = 1024 >> 4;
    return (u64)(address >> 4 & 0x3fff) | block << 16 | group << 32 | (u64)1 << 62;
}

// d = a b^T, plus d if `keep`: a [64, 16] and b [128, 16] in shared memory, both with k along rows.
__device__ __forceinline__ void multiply_shared(float (&d)[64], u64 a, u64 b, int keep) {
    asm volatile(
        "{\n.reg .pred keep;\n"
        "setp.ne.b32 keep, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, keep, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
          "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
          "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
          "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
          "+f"(d[63])
        : "l"(a), "l"(b), "r"(keep));
}

// d = a b, plus d if `keep`: a [64, 16] in registers, b [16, 128] in shared memory, n along rows.
__device__ __forceinline__ void multiply_registers(float (&d)[64], const u32 (&a)[4], u64 b,
                                                   int keep) {
    asm volatile(
        "{\n.reg .pred keep;\n"
        "setp.ne.b32 keep, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, keep, 1, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
          "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
          "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
          "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
          "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

// Starts to copy ROWS rows of 64 values, from row `first` on; rows from `end` on become zeros.
// Pieces of sixteen bytes are exchanged within a row by its number modulo eight, as the swizzle
// wants.
__device__ __forceinline__ void copy_block(u32 to, const bf16* base, i64 stride, i64 first,
                                           i64 end) {
    u32 thread = threadIdx.x % 128, piece = thread % 8, row = thread / 8;
    to += row * 128 + ((piece ^ (row & 7)) << 4);
    const bf16* from = base + piece * 8;
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++) {
        i64 r = first + row + i * 16;
        bool real = r < end;
        copy_async(to + i * 2048, from + (real ? r : first) * stride, real);
    }
}

template <int WIDTH>
__device__ __forceinline__ void copy_rows(u32 to, Heads x, u32 head, i64 first, i64 end) {
    const bf16* base = reinterpret_cast<const bf16*>(x.address) + head * x.head_stride;
#pragma unroll
    for (int block = 0; block < WIDTH / 64; block++)
        copy_block(to + block * BLOCK_BYTES, base + block * 64, x.row_stride, first, end);
}

// Addresses of everything in shared memory.
template <int QK, int V>
struct Memory {
    static constexpr u32 K_BYTES = QK / 64 * BLOCK_BYTES, V_BYTES = V / 64 * BLOCK_BYTES;
    u32 base;
    __device__ u32 q() const { return base; }
    __device__ u32 k(u32 stage) const { return base + K_BYTES * (1 + stage); }
    __device__ u32 v(u32 stage) const { return base + K_BYTES * 3 + V_BYTES * stage; }
    __device__ u32 barriers() const { return base + K_BYTES * 3 + V_BYTES * 2; }
    __device__ u32 q_full() const { return barriers(); }
    __device__ u32 k_full(u32 stage) const { return barriers() + 8 + 8 * stage; }
    __device__ u32 v_full(u32 stage) const { return barriers() + 24 + 8 * stage; }
    __device__ u32 k_empty(u32 stage) const { return barriers() + 40 + 8 * stage; }
    __device__ u32 v_empty(u32 stage) const { return barriers() + 56 + 8 * stage; }
};

// What a block works on.
struct Task {
    i64 q_start, q_end, k_start, k_end;
    u32 head, kv_head;
    // First query of the block in its sequence; query i sees the keys up to i + ahead.
    i32 first, ahead, tiles;
};

// The copies of a block, all 128 threads of a warpgroup. A full barrier is arrived at one copy
// later, so that two are under way; each thread makes its own writes visible before it arrives.
template <int QK, int V, bool SHARED>
__device__ __forceinline__ void produce(const AttentionArgs& a, const Task& task,
                                        Memory<QK, V> memory) {
    copy_rows<QK>(memory.q(), a.q, task.head, task.q_start + task.first, task.q_end);
    commit_copies();
    u32 pending = memory.q_full();
    for (i32 tile = 0; tile < task.tiles; tile++) {
        u32 stage = tile & 1, parity = (tile >> 1 & 1) ^ 1;
        i64 row = task.k_start + (i64)tile * ROWS;
        // The first use of a stage passes at once: the phase before the first counts as over.
        barrier_wait(memory.k_empty(stage), parity);
        if constexpr (SHARED) {
            copy_rows<QK - SHARED_WIDTH>(memory.k(stage), a.k, task.kv_head, row, task.k_end);
            copy_block(memory.k(stage) + (QK - SHARED_WIDTH) / 64 * BLOCK_BYTES,
                       reinterpret_cast<const bf16*>(a.k_shared.address), a.k_shared.row_stride,
                       row, task.k_end);
        } else {
            copy_rows<QK>(memory.k(stage), a.k, task.kv_head, row, task.k_end);
        }
        commit_copies();
        wait_copies<1>();
        fence_for_products();
        barrier_arrive(pending);
        barrier_wait(memory.v_empty(stage), parity);
        copy_rows<V>(memory.v(stage), a.v, task.kv_head, row, task.k_end);
        commit_copies();
        wait_copies<1>();
        fence_for_products();
        barrier_arrive(memory.k_full(stage));
        pending = memory.v_full(stage);
    }
    wait_copies<0>();
    fence_for_products();
    barrier_arrive(pending);
}

// Hides the keys that a query does not see: columns of `s` beyond its limit.
__device__ __forceinline__ void mask(float (&s)[64], i32 first_key, i32 first_limit) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 64; i++) {
        i32 key = first_key + i / 4 * 8 + (i32)(lane % 4) * 2 + i % 2;
        i32 limit = first_limit + (i32)(lane / 4) + i / 2 % 2 * 8;
        if (key > limit) s[i] = -INFINITY_F;
    }
}

// Running softmax of the two rows that a thread holds parts of.
struct Softmax {
    float most[2], sum[2], shrink[2];
};

// Turns scores into weights, 2^((score - most) * scale); `shrink` is what earlier sums are to be
// multiplied by.
__device__ __forceinline__ void soften(float (&s)[64], Softmax& soft, float scale) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = soft.most[half];
#pragma unroll
        for (int i = 0; i < 16; i++)
            most = fmaxf(most, fmaxf(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]));
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2));
        // A row that has seen no key yet keeps minus infinity; its weights must not be NaN.
        float origin = most == -INFINITY_F ? 0.0f : most * scale;
        soft.shrink[half] = exp2_fast(soft.most[half] * scale - origin);
        soft.most[half] = most;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float& x = s[4 * i + 2 * half];
            float& y = s[4 * i + 2 * half + 1];
            x = exp2_fast(x * scale - origin);
            y = exp2_fast(y * scale - origin);
            sum += x + y;
        }
        soft.sum[half] = soft.sum[half] * soft.shrink[half] + sum;
    }
}

// Weights as the left operand of the next product.
__device__ __forceinline__ void pack(u32 (&p)[8][4], const float (&s)[64]) {
#pragma unroll
    for (int step = 0; step < 8; step++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            p[step][i] = pack_bf16(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
}

template <int QK, int V>
__device__ __forceinline__ void scores(float (&s)[64], u32 q, u32 k) {
#pragma unroll
    for (int step = 0; step < QK / 16; step++) {
        u32 offset = step / 4 * BLOCK_BYTES + step % 4 * 32;
        multiply_shared(s, descriptor(q + offset), descriptor(k + offset), step > 0);
    }
}

__device__ __forceinline__ void weigh(float (&o)[64], const u32 (&p)[8][4], u32 v) {
#pragma unroll
    for (int step = 0; step < 8; step++)
        multiply_registers(o, p[step], descriptor(v + step * 2048), 1);
}

__device__ __forceinline__ void write(const AttentionArgs& a, const Task& task,
                                      const float (&o)[64], const Softmax& soft, i32 first_query) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = soft.sum[half];
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        i64 row = task.q_start + first_query + (i32)(lane / 4) + half * 8;
        if (row >= task.q_end) continue;
        float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
        bf16* to = reinterpret_cast<bf16*>(a.out.address) + row * a.out.row_stride +
                   task.head * a.out.head_stride;
#pragma unroll
        for (int n = 0; n < 16; n++)
            *reinterpret_cast<u32*>(to + n * 8 + lane % 4 * 2) =
                pack_bf16(o[4 * n + 2 * half] * factor, o[4 * n + 2 * half + 1] * factor);
        if (a.lse && lane % 4 == 0)
            reinterpret_cast<float*>(a.lse)[row * a.heads + task.head] =
                soft.most[half] * a.scale + logf(sum);
    }
}

// The computation of 64 queries, all 128 threads of warpgroup `group` = 0 or 1.
template <int QK, int V>
__device__ __forceinline__ void consume(const AttentionArgs& a, const Task& task,
                                        Memory<QK, V> memory, u32 group) {
    u32 warp = threadIdx.x / 32 % 4;
    i32 first_query = task.first + (i32)group * 64 + (i32)warp * 16;
    i32 limit = first_query + task.ahead;
    float scale = a.scale * 1.4426950408889634f;
    u32 q = memory.q() + group * 64 * 128;
    float o[64] = {}, s[64];
    u32 p[8][4];
    Softmax soft = {{-INFINITY_F, -INFINITY_F}, {0.0f, 0.0f}, {1.0f, 1.0f}};
    barrier_wait(memory.q_full(), 0);
    if (task.tiles > 0) {
        barrier_wait(memory.k_full(0), 0);
        products_begin();
        scores<QK, V>(s, q, memory.k(0));
        products_commit();
        products_wait<0>();
        pin(s);
        release(memory.k_empty(0));
        if (ROWS - 1 > limit) mask(s, 0, limit);
        soften(s, soft, scale);
        pack(p, s);
    }
    for (i32 tile = 0; tile + 1 < task.tiles; tile++) {
        u32 stage = tile & 1, next = stage ^ 1;
        barrier_wait(memory.k_full(next), (tile + 1) >> 1 & 1);
        products_begin();
        scores<QK, V>(s, q, memory.k(next));
        products_commit();
        barrier_wait(memory.v_full(stage), tile >> 1 & 1);
        weigh(o, p, memory.v(stage));
        products_commit();
        products_wait<1>();
        release(memory.k_empty(next));
        i32 first_key = (tile + 1) * ROWS;
        if (first_key + ROWS - 1 > limit) mask(s, first_key, limit);
        soften(s, soft, scale);
        products_wait<0>();
        release(memory.v_empty(stage));
#pragma unroll
        for (int i = 0; i < 64; i++) o[i] *= soft.shrink[i / 2 % 2];
        pack(p, s);
    }
    if (task.tiles > 0) {
        u32 tile = (u32)task.tiles - 1;
        barrier_wait(memory.v_full(tile & 1), tile >> 1 & 1);
        products_begin();
        weigh(o, p, memory.v(tile & 1));
        products_commit();
        products_wait<0>();
        pin(o);
    }
    write(a, task, o, soft, first_query);
}

template <int QK, int V, bool SHARED>
__device__ __forceinline__ void attend(const AttentionArgs& a) {
    extern __shared__ u8 raw[];
    Memory<QK, V> memory = {(shared_address(raw) + 1023) & ~1023u};
    const u32* cu_q = reinterpret_cast<const u32*>(a.cu_q) + blockIdx.z;
    const u32* cu_k = reinterpret_cast<const u32*>(a.cu_k) + blockIdx.z;
    Task task = {cu_q[0], cu_q[1], cu_k[0], cu_k[1], blockIdx.y};
    i32 queries = (i32)(task.q_end - task.q_start), keys = (i32)(task.k_end - task.k_start);
    // The blocks with most keys go first.
    task.first = ((i32)gridDim.x - 1 - (i32)blockIdx.x) * ROWS;
    if (task.first >= queries) return;
    task.kv_head = (u32)((u64)task.head * a.kv_heads / a.heads);
    task.ahead = keys - queries;
    task.tiles = max((min(task.first + ROWS, queries) + task.ahead + ROWS - 1) / ROWS, 0);
    if (threadIdx.x == 0) {
        barrier_init(memory.q_full(), 128);
        for (u32 stage = 0; stage < 2; stage++) {
            barrier_init(memory.k_full(stage), 128);
            barrier_init(memory.v_full(stage), 128);
            barrier_init(memory.k_empty(stage), CONSUMER_WARPS);
            barrier_init(memory.v_empty(stage), CONSUMER_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
        produce<QK, V, SHARED>(a, task, memory);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
        consume<QK, V>(a, task, memory, threadIdx.x / 128 - 1);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) attention_wgmma_192_128(AttentionArgs a) {
    attend<192, 128, false>(a);
}
extern "C" __global__ void __launch_bounds__(384, 1)
    attention_wgmma_192_128_shared(AttentionArgs a) {
    attend<192, 128, true>(a);
}
extern "C" __global__ void __launch_bounds__(384, 1) attention_wgmma_128_128(AttentionArgs a) {
    attend<128, 128, false>(a);
}

#endif
