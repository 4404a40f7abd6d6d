// What the two sources of training attention by warpgroup products are given: forward and backward
// pass. Twin of the arguments: kernels' cuda::train_attention.

#if __CUDA_ARCH__ == 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct TrainAttentionArgs {
    TensorMap q_map, k_map, v_map, out_map;
    // `out` is written by the forward pass and is the gradient of the output in the backward pass.
    Heads q, k, v, out, d_first, d_second;
    u64 lse, delta, visible, segments;
    u32 heads, kv_heads, qk_dim, v_dim, accumulate;
    float scale;
    u32 blocks, documents;
};

struct Segment {
    u32 q_start, q_end, k_start, k_end;
};

#endif
