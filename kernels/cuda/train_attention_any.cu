// Attention of one step of the training-time test for any head widths up to 256 and both types: a
// warp for each row and head. Twin: trainer's ops::cpu::attention.

#define WARPS 8

struct TrainAttentionArgs {
    // `out` is written by the forward pass and is the gradient of the output in the backward pass.
    Heads q, k, v, out, d_first, d_second;
    u64 lse, delta, visible, segments;
    u32 heads, kv_heads, qk_dim, v_dim, accumulate;
    float scale;
};

struct Segment {
    u32 q_start, q_end, k_start, k_end;
};

// A lane's part of a row of up to 256 values: V neighbours, then those 32 * V further, and so on.
template <int V>
struct Part {
    float x[8];
};

__device__ __forceinline__ void load_some(float (&x)[1], const bf16* from) {
    x[0] = to_float(*from);
}
__device__ __forceinline__ void load_some(float (&x)[1], const float* from) { x[0] = *from; }
__device__ __forceinline__ void load_some(float (&x)[4], const float* from) {
    float4 v = *reinterpret_cast<const float4*>(from);
    x[0] = v.x;
    x[1] = v.y;
    x[2] = v.z;
    x[3] = v.w;
}
__device__ __forceinline__ void load_some(float (&x)[4], const bf16* from) {
    uint2 v = *reinterpret_cast<const uint2*>(from);
    x[0] = __uint_as_float(v.x << 16);
    x[1] = __uint_as_float(v.x & 0xffff0000u);
    x[2] = __uint_as_float(v.y << 16);
    x[3] = __uint_as_float(v.y & 0xffff0000u);
}
__device__ __forceinline__ void store_some(bf16* to, const float (&x)[1]) { *to = to_bf16(x[0]); }
__device__ __forceinline__ void store_some(float* to, const float (&x)[1]) { *to = x[0]; }
__device__ __forceinline__ void store_some(float* to, const float (&x)[4]) {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
}
__device__ __forceinline__ void store_some(bf16* to, const float (&x)[4]) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
}

template <typename T>
__device__ __forceinline__ T* head_row(Heads x, i64 row, u32 head) {
    return reinterpret_cast<T*>(x.address) + row * x.row_stride + head * x.head_stride;
}

template <typename T, int V>
__device__ __forceinline__ Part<V> read(const T* row, u32 width) {
    Part<V> part;
#pragma unroll
    for (int step = 0; step < 8 / V; step++) {
        u32 at = (step * 32 + threadIdx.x % 32) * V;
        float x[V] = {};
        if (at < width) load_some(x, row + at);
#pragma unroll
        for (int i = 0; i < V; i++) part.x[step * V + i] = x[i];
    }
    return part;
}

template <typename T, int V>
__device__ __forceinline__ void write(T* row, u32 width, const Part<V>& part) {
#pragma unroll
    for (int step = 0; step < 8 / V; step++) {
        u32 at = (step * 32 + threadIdx.x % 32) * V;
        float x[V];
#pragma unroll
        for (int i = 0; i < V; i++) x[i] = part.x[step * V + i];
        if (at < width) store_some(row + at, x);
    }
}

template <int V>
__device__ __forceinline__ float dot(const Part<V>& a, const Part<V>& b) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += a.x[i] * b.x[i];
    return warp_sum(sum);
}

// a = a * keep + b * factor
template <int V>
__device__ __forceinline__ void blend(Part<V>& a, float keep, const Part<V>& b, float factor) {
#pragma unroll
    for (int i = 0; i < 8; i++) a.x[i] = a.x[i] * keep + b.x[i] * factor;
}

template <typename T, int V>
__device__ __forceinline__ void add(T* row, u32 width, const Part<V>& part) {
    Part<V> sum = read<T, V>(row, width);
    blend(sum, 1.0f, part, 1.0f);
    write<T, V>(row, width, sum);
}

template <typename T, int V>
__device__ __forceinline__ void attend(const TrainAttentionArgs& a) {
    Segment segment = reinterpret_cast<const Segment*>(a.segments)[blockIdx.z];
    i64 row = (i64)segment.q_start + blockIdx.x * WARPS + threadIdx.x / 32;
    u32 head = blockIdx.y, kv_head = head / (a.heads / a.kv_heads);
    if (row >= segment.q_end) return;
    Part<V> q = read<T, V>(head_row<const T>(a.q, row, head), a.qk_dim), out = {};
    float most = -INFINITY_F, total = 0.0f;
    i64 end = reinterpret_cast<const u32*>(a.visible)[row];
    for (i64 key = segment.k_start; key < end; key++) {
        float score = a.scale * dot(q, read<T, V>(head_row<const T>(a.k, key, kv_head), a.qk_dim));
        float peak = fmaxf(most, score), shrink = expf(most - peak), weight = expf(score - peak);
        total = total * shrink + weight;
        most = peak;
        blend(out, shrink, read<T, V>(head_row<const T>(a.v, key, kv_head), a.v_dim), weight);
    }
    Part<V> mean = {};
    blend(mean, 1.0f, out, 1.0f / total);
    write<T, V>(head_row<T>(a.out, row, head), a.v_dim, mean);
    if (threadIdx.x % 32 == 0)
        reinterpret_cast<float*>(a.lse)[row * a.heads + head] = most + logf(total);
}

template <typename T, int V>
__device__ __forceinline__ void descend_queries(const TrainAttentionArgs& a) {
    Segment segment = reinterpret_cast<const Segment*>(a.segments)[blockIdx.z];
    i64 row = (i64)segment.q_start + blockIdx.x * WARPS + threadIdx.x / 32;
    u32 head = blockIdx.y, kv_head = head / (a.heads / a.kv_heads);
    if (row >= segment.q_end) return;
    Part<V> q = read<T, V>(head_row<const T>(a.q, row, head), a.qk_dim), sum = {};
    Part<V> upstream = read<T, V>(head_row<const T>(a.out, row, head), a.v_dim);
    float lse = reinterpret_cast<const float*>(a.lse)[row * a.heads + head];
    float delta = reinterpret_cast<const float*>(a.delta)[row * a.heads + head];
    i64 end = reinterpret_cast<const u32*>(a.visible)[row];
    for (i64 key = segment.k_start; key < end; key++) {
        Part<V> k = read<T, V>(head_row<const T>(a.k, key, kv_head), a.qk_dim);
        float weight = expf(a.scale * dot(q, k) - lse);
        float along = dot(upstream, read<T, V>(head_row<const T>(a.v, key, kv_head), a.v_dim));
        blend(sum, 1.0f, k, weight * (along - delta) * a.scale);
    }
    T* to = head_row<T>(a.d_first, row, head);
    if (a.accumulate)
        add<T, V>(to, a.qk_dim, sum);
    else
        write<T, V>(to, a.qk_dim, sum);
}

template <typename T, int V>
__device__ __forceinline__ void descend_keys(const TrainAttentionArgs& a) {
    Segment segment = reinterpret_cast<const Segment*>(a.segments)[blockIdx.z];
    i64 key = (i64)segment.k_start + blockIdx.x * WARPS + threadIdx.x / 32;
    u32 kv_head = blockIdx.y, group = a.heads / a.kv_heads;
    if (key >= segment.k_end) return;
    const u32* visible = reinterpret_cast<const u32*>(a.visible);
    u32 low = segment.q_start, high = segment.q_end;
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (visible[middle] > key)
            high = middle;
        else
            low = middle + 1;
    }
    Part<V> k = read<T, V>(head_row<const T>(a.k, key, kv_head), a.qk_dim), d_key = {};
    Part<V> v = read<T, V>(head_row<const T>(a.v, key, kv_head), a.v_dim), d_value = {};
    for (u32 head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (i64 row = low; row < segment.q_end; row++) {
            Part<V> q = read<T, V>(head_row<const T>(a.q, row, head), a.qk_dim);
            Part<V> upstream = read<T, V>(head_row<const T>(a.out, row, head), a.v_dim);
            float weight = expf(a.scale * dot(q, k) -
                                reinterpret_cast<const float*>(a.lse)[row * a.heads + head]);
            float pull = weight * (dot(upstream, v) -
                                   reinterpret_cast<const float*>(a.delta)[row * a.heads + head]);
            blend(d_key, 1.0f, q, pull * a.scale);
            blend(d_value, 1.0f, upstream, weight);
        }
    }
    T *to_key = head_row<T>(a.d_first, key, kv_head),
      *to_value = head_row<T>(a.d_second, key, kv_head);
    if (a.accumulate) {
        add<T, V>(to_key, a.qk_dim, d_key);
        add<T, V>(to_value, a.v_dim, d_value);
    } else {
        write<T, V>(to_key, a.qk_dim, d_key);
        write<T, V>(to_value, a.v_dim, d_value);
    }
}

#define MAKE_ONE(base, function, Args, T, V, suffix)                                      \
    extern "C" __global__ void KERNEL1(base, T, suffix)(const __grid_constant__ Args a) { \
        function<T, V>(a);                                                                \
    }
#define MAKE(base, function, Args)              \
    MAKE_ONE(base, function, Args, bf16, 4, v4) \
    MAKE_ONE(base, function, Args, bf16, 1, v1) \
    MAKE_ONE(base, function, Args, float, 4, v4) MAKE_ONE(base, function, Args, float, 1, v1)

MAKE(train_attention_any, attend, TrainAttentionArgs)
MAKE(train_attention_keys_any, descend_keys, TrainAttentionArgs)
MAKE(train_attention_queries_any, descend_queries, TrainAttentionArgs)
