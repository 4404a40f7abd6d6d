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

#define SHARED_WIDTH 64

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

// The computation of 64 queries, all 128 threads of warpgroup `group` = 0 or 1.
template <int QK, int V>
__device__ __forceinline__ void consume(const AttentionArgs& a, const Task& task,
                                        Memory<QK, V> memory, u32 group) {
    i32 first = task.first + (i32)group * 64 + (i32)(threadIdx.x / 32 % 4) * 16;
    i32 least = first + task.ahead + 1, end = least + (i32)(threadIdx.x % 32 / 4);
    i32 ends[2] = {end, end + 8};
    Mixed<V> mixed;
    Pace pace = {};
    mix<QK, V>(mixed, memory, group, task.tiles, ends, least, a.scale, pace);
    write_mixed<V>(mixed, a.out, task.head, task.q_start + first, task.q_end,
                   reinterpret_cast<float*>(a.lse), a.heads, a.scale);
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
        barrier_init(memory.q_empty(), CONSUMERS);
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
