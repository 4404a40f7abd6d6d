// Attention of one step of the training-time test against the step-0 keys, by warpgroup products of
// Hopper (sm_90a): bf16. One warpgroup copies (TMA), two compute 64 queries each. Each query row
// has its own end of what it sees; ends ascend within a document. Twin: trainer's
// ops::cpu::attention. Empty for other architectures.

#if __CUDA_ARCH__ == 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The copies of a block, by one thread.
template <int QK, int V>
__device__ __forceinline__ void produce(const TrainAttentionArgs& a, Memory<QK, V> memory) {
    const u32* visible = reinterpret_cast<const u32*>(a.visible);
    Pace pace = {};
    for (Walk walk(a.documents, a.heads, a.blocks); walk.next();) {
        Segment segment = reinterpret_cast<const Segment*>(a.segments)[walk.document];
        // The rows that see most keys go first.
        u32 first = segment.q_start + (a.blocks - 1 - walk.block) * ROWS;
        if (first >= segment.q_end) continue;
        u32 kv_head = walk.head / (a.heads / a.kv_heads);
        u32 seen = visible[min(first + ROWS, segment.q_end) - 1] - segment.k_start;
        u32 tiles = (seen + ROWS - 1) / ROWS;
        // The first use of memory passes at once: the phase before the first counts as over.
        barrier_wait(memory.q_empty(), pace.items++ & 1 ^ 1);
        put_item(memory.item(), memory.item_full(),
                 {first, segment.q_end, segment.k_start, walk.head, tiles});
        barrier_expect(memory.q_full(), memory.K_BYTES);
        copy_tile<QK, ROWS>(memory.q(), a.q_map, memory.q_full(), walk.head, first);
        for (u32 tile = 0; tile < tiles; tile++) {
            u32 stage = pace.tiles & 1, parity = (pace.tiles >> 1 & 1) ^ 1;
            i64 row = segment.k_start + (i64)tile * ROWS;
            barrier_wait(memory.k_empty(stage), parity);
            barrier_expect(memory.k_full(stage), memory.K_BYTES);
            copy_tile<QK, ROWS>(memory.k(stage), a.k_map, memory.k_full(stage), kv_head, row);
            barrier_wait(memory.v_empty(stage), parity);
            barrier_expect(memory.v_full(stage), memory.V_BYTES);
            copy_tile<V, ROWS>(memory.v(stage), a.v_map, memory.v_full(stage), kv_head, row);
            pace.tiles++;
        }
    }
    barrier_wait(memory.q_empty(), pace.items & 1 ^ 1);
    put_item(memory.item(), memory.item_full(), {0, 0, 0, 0, STOP});
}

template <int QK, int V>
__device__ __forceinline__ void attend(const TrainAttentionArgs& a) {
    extern __shared__ u8 raw[];
    Memory<QK, V> memory = {(shared_address(raw) + 1023) & ~1023u};
    if (threadIdx.x == 0) {
        barrier_init(memory.item_full(), 1);
        barrier_init(memory.q_full(), 1);
        barrier_init(memory.q_empty(), CONSUMERS);
        for (u32 stage = 0; stage < 2; stage++) {
            barrier_init(memory.k_full(stage), 1);
            barrier_init(memory.v_full(stage), 1);
            barrier_init(memory.k_empty(stage), CONSUMER_WARPS);
            barrier_init(memory.v_empty(stage), CONSUMER_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) produce(a, memory);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const u32* visible = reinterpret_cast<const u32*>(a.visible);
    u32 group = threadIdx.x / 128 - 1;
    Pace pace = {};
    while (true) {
        barrier_wait(memory.item_full(), pace.items & 1);
        Item item = take_item(memory.item());
        if (item.tiles == STOP) return;
        u32 row = item.first + group * 64 + threadIdx.x / 32 % 4 * 16;
        auto seen = [&](u32 query) {
            return (i32)(visible[min(query, item.end - 1)] - item.k_start);
        };
        u32 mine = row + threadIdx.x % 32 / 4;
        i32 ends[2] = {seen(mine), seen(mine + 8)};
        Mixed<V> mixed;
        mix<QK, V>(mixed, memory, group, (i32)item.tiles, ends, seen(row), a.scale, pace);
        write_mixed<V>(mixed, a.out, item.head, row, item.end, reinterpret_cast<float*>(a.lse),
                       a.heads, a.scale);
    }
}

#define KERNEL(name, qk, v)                              \
    extern "C" __global__ void __launch_bounds__(384, 1) \
        JOIN(JOIN(name, qk), v)(const __grid_constant__ TrainAttentionArgs a)

KERNEL(train_attention_wgmma, 64, 64) { attend<64, 64>(a); }
KERNEL(train_attention_wgmma, 128, 128) { attend<128, 128>(a); }
KERNEL(train_attention_wgmma, 192, 128) { attend<192, 128>(a); }

#endif
