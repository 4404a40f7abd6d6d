// Attention of one step of the training-time test against the step-0 keys, by warpgroup products of
// Hopper (sm_90a): bf16. One warpgroup copies (TMA), two compute 64 queries each. Each query row
// has its own end of what it sees; ends ascend within a document. Twin: trainer's
// ops::cpu::attention. Empty for other architectures.

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

template <int QK, int V>
__device__ __forceinline__ void attend(const TrainAttentionArgs& a) {
    extern __shared__ u8 raw[];
    Memory<QK, V> memory = {(shared_address(raw) + 1023) & ~1023u};
    Segment segment = reinterpret_cast<const Segment*>(a.segments)[blockIdx.z];
    const u32* visible = reinterpret_cast<const u32*>(a.visible);
    u32 head = blockIdx.y, kv_head = head / (a.heads / a.kv_heads);
    i32 queries = (i32)(segment.q_end - segment.q_start);
    // The tiles with most keys go first.
    i32 first = ((i32)gridDim.x - 1 - (i32)blockIdx.x) * ROWS;
    if (first >= queries) return;
    auto seen = [&](i32 query) {
        return (i32)(visible[segment.q_start + min(query, queries - 1)] - segment.k_start);
    };
    i32 tiles = (seen(first + ROWS - 1) + ROWS - 1) / ROWS;
    if (threadIdx.x == 0) {
        barrier_init(memory.q_full(), 1);
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
        if (threadIdx.x != 0) return;
        barrier_expect(memory.q_full(), memory.K_BYTES);
        copy_tile<QK, ROWS>(memory.q(), a.q_map, memory.q_full(), head,
                            (i64)segment.q_start + first);
        for (i32 tile = 0; tile < tiles; tile++) {
            u32 stage = tile & 1, parity = (tile >> 1 & 1) ^ 1;
            i64 row = segment.k_start + (i64)tile * ROWS;
            // The first use of a stage passes at once: the phase before the first counts as over.
            barrier_wait(memory.k_empty(stage), parity);
            barrier_expect(memory.k_full(stage), memory.K_BYTES);
            copy_tile<QK, ROWS>(memory.k(stage), a.k_map, memory.k_full(stage), kv_head, row);
            barrier_wait(memory.v_empty(stage), parity);
            barrier_expect(memory.v_full(stage), memory.V_BYTES);
            copy_tile<V, ROWS>(memory.v(stage), a.v_map, memory.v_full(stage), kv_head, row);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        u32 group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
        i32 row = first + (i32)group * 64 + (i32)(threadIdx.x / 32 % 4) * 16;
        i32 ends[2] = {seen(row + (i32)lane / 4), seen(row + (i32)lane / 4 + 8)};
        Mixed<V> mixed;
        mix<QK, V>(mixed, memory, group, tiles, ends, seen(row), a.scale);
        write_mixed<V>(mixed, a.out, head, (i64)segment.q_start + row, segment.q_end,
                       reinterpret_cast<float*>(a.lse), a.heads, a.scale);
    }
}

#define KERNEL(name, qk, v)                              \
    extern "C" __global__ void __launch_bounds__(384, 1) \
        JOIN(JOIN(name, qk), v)(const __grid_constant__ TrainAttentionArgs a)

KERNEL(train_attention_wgmma, 64, 64) { attend<64, 64>(a); }
KERNEL(train_attention_wgmma, 128, 128) { attend<128, 128>(a); }
KERNEL(train_attention_wgmma, 192, 128) { attend<192, 128>(a); }

#endif
