// Causal attention of packed sequences for any widths up to 256: a warp for each query and head, a
// lane for each key of a step. Slow, and the measure for the fast kernels. Twin: attention.

struct AttentionArgs {
    Heads out, q, k, v, k_shared;
    u64 lse, cu_q, cu_k;
    u32 heads, kv_heads, qk_dim, v_dim, shared_dim;
    float scale;
};

#define MAX_WIDTH 256

template <typename T>
__device__ __forceinline__ const T* head_of(Heads x, i64 row, u32 head) {
    return reinterpret_cast<const T*>(x.address) + row * x.row_stride + head * x.head_stride;
}

template <typename T>
__device__ __forceinline__ void attend(const AttentionArgs& a) {
    extern __shared__ float memory[];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
    const u32* cu_q = reinterpret_cast<const u32*>(a.cu_q) + blockIdx.z;
    const u32* cu_k = reinterpret_cast<const u32*>(a.cu_k) + blockIdx.z;
    u32 queries = cu_q[1] - cu_q[0], keys = cu_k[1] - cu_k[0];
    u32 query = blockIdx.x * 4 + warp;
    if (query >= queries) return;
    i64 row = cu_q[0] + query;
    u32 kv_head = (u32)((u64)head * a.kv_heads / a.heads);
    // Keys that this query sees; the queries are the last positions of the sequence.
    u32 seen = keys + query + 1 >= queries ? keys + query + 1 - queries : 0;
    float* q = memory + warp * (MAX_WIDTH + 32);
    float* p = q + MAX_WIDTH;
    for (u32 d = lane; d < a.qk_dim; d += 32)
        q[d] = to_float(head_of<T>(a.q, row, head)[d]) * a.scale;
    __syncwarp();
    float out[MAX_WIDTH / 32] = {};
    float most = -INFINITY_F, sum = 0.0f;
    u32 own_dim = a.qk_dim - a.shared_dim;
    for (u32 start = 0; start < seen; start += 32) {
        u32 key = start + lane;
        float score = -INFINITY_F;
        if (key < seen) {
            const T* k = head_of<T>(a.k, (i64)cu_k[0] + key, kv_head);
            const T* shared = head_of<T>(a.k_shared, (i64)cu_k[0] + key, 0);
            score = 0.0f;
            for (u32 d = 0; d < own_dim; d++) score += q[d] * to_float(k[d]);
            for (u32 d = 0; d < a.shared_dim; d++) score += q[own_dim + d] * to_float(shared[d]);
        }
        float now = fmaxf(most, warp_max(score));
        float shrink = expf(most - now);
        float weight = key < seen ? expf(score - now) : 0.0f;
        most = now;
        sum = sum * shrink + warp_sum(weight);
        p[lane] = weight;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < MAX_WIDTH / 32; i++) out[i] *= shrink;
        for (u32 t = 0; t < 32 && start + t < seen; t++) {
            const T* v = head_of<T>(a.v, (i64)cu_k[0] + start + t, kv_head);
#pragma unroll
            for (int i = 0; i < MAX_WIDTH / 32; i++) {
                u32 d = i * 32 + lane;
                if (d < a.v_dim) out[i] += p[t] * to_float(v[d]);
            }
        }
        __syncwarp();
    }
    T* to = reinterpret_cast<T*>(a.out.address) + row * a.out.row_stride + head * a.out.head_stride;
#pragma unroll
    for (int i = 0; i < MAX_WIDTH / 32; i++) {
        u32 d = i * 32 + lane;
        if (d < a.v_dim) from_float(to[d], sum > 0.0f || sum != sum ? out[i] / sum : 0.0f);
    }
    if (a.lse && lane == 0)
        reinterpret_cast<float*>(a.lse)[row * a.heads + head] = most + logf(sum);
}

extern "C" __global__ void __launch_bounds__(128) attention_any_bf16(AttentionArgs a) {
    attend<bf16>(a);
}
extern "C" __global__ void __launch_bounds__(128) attention_any_f32(AttentionArgs a) {
    attend<float>(a);
}
