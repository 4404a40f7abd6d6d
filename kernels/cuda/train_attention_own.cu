// What a row of the training-time test adds to its attention by the keys it made itself at later
// steps, forward and backward, for both types and all widths up to 256: L lanes for each row and
// head, V neighbouring values a load. Twin: trainer's ops::cpu::attention.

#define MAX_STEPS 15
#define THREADS 256

struct OwnArgs {
    Heads q, out, d_out, d_q;
    Heads keys[MAX_STEPS], values[MAX_STEPS], d_keys[MAX_STEPS], d_values[MAX_STEPS];
    u64 own[MAX_STEPS];
    u64 lse, delta;
    u32 rows, heads, kv_heads, qk_dim, v_dim, steps;
    float scale;
};

__device__ __forceinline__ void load(float (&x)[4], const float* from) {
    float4 v = *reinterpret_cast<const float4*>(from);
    x[0] = v.x;
    x[1] = v.y;
    x[2] = v.z;
    x[3] = v.w;
}
__device__ __forceinline__ void store(float* to, const float (&x)[4]) {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
}

// A lane's part of a row as it is in memory: V neighbours, then those L * V further, and so on;
// eight in all.
template <typename T, int V>
struct Raw {
    float x[8];
};
template <>
struct Raw<bf16, 8> {
    uint4 x;
};

template <typename T, int V, int L>
__device__ __forceinline__ Raw<T, V> fetch(const T* row, u32 width) {
    Raw<T, V> raw;
#pragma unroll
    for (int step = 0; step < 8 / V; step++) {
        u32 at = (step * L + threadIdx.x % L) * V;
        float part[V] = {};
        if (at < width) load(part, row + at);
#pragma unroll
        for (int i = 0; i < V; i++) raw.x[step * V + i] = part[i];
    }
    return raw;
}
template <>
__device__ __forceinline__ Raw<bf16, 8> fetch<bf16, 8, 8>(const bf16* row, u32 width) {
    u32 at = threadIdx.x % 8 * 8;
    return {at < width ? *reinterpret_cast<const uint4*>(row + at) : make_uint4(0, 0, 0, 0)};
}
template <>
__device__ __forceinline__ Raw<bf16, 8> fetch<bf16, 8, 16>(const bf16* row, u32 width) {
    u32 at = threadIdx.x % 16 * 8;
    return {at < width ? *reinterpret_cast<const uint4*>(row + at) : make_uint4(0, 0, 0, 0)};
}
template <>
__device__ __forceinline__ Raw<bf16, 8> fetch<bf16, 8, 32>(const bf16* row, u32 width) {
    u32 at = threadIdx.x % 32 * 8;
    return {at < width ? *reinterpret_cast<const uint4*>(row + at) : make_uint4(0, 0, 0, 0)};
}

// The same as numbers to compute with.
template <typename T, int V, int L>
struct Part {
    float x[8];

    __device__ Part() = default;
    __device__ Part(const Raw<float, 4>& raw) { copy(raw.x); }
    __device__ Part(const Raw<float, 1>& raw) { copy(raw.x); }
    __device__ Part(const Raw<bf16, 1>& raw) { copy(raw.x); }
    __device__ Part(const Raw<bf16, 8>& raw) {
        u32 words[4] = {raw.x.x, raw.x.y, raw.x.z, raw.x.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[2 * i] = __uint_as_float(words[i] << 16);
            x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
    __device__ void copy(const float (&from)[8]) {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = from[i];
    }

    __device__ void write(T* row, u32 width) const {
#pragma unroll
        for (int step = 0; step < 8 / V; step++) {
            u32 at = (step * L + threadIdx.x % L) * V;
            float part[V];
#pragma unroll
            for (int i = 0; i < V; i++) part[i] = x[step * V + i];
            if (at < width) store(row + at, part);
        }
    }

    // The same sum for all lanes of the row.
    __device__ float dot(const Part& other) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += x[i] * other.x[i];
#pragma unroll
        for (int step = L / 2; step > 0; step >>= 1) sum += __shfl_xor_sync(FULL_WARP, sum, step);
        return sum;
    }

    __device__ void blend(float keep, const Part& other, float factor) {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = x[i] * keep + other.x[i] * factor;
    }
};

template <typename T>
__device__ __forceinline__ T* head_row(Heads x, i64 row, u32 head) {
    return reinterpret_cast<T*>(x.address) + row * x.row_stride + head * x.head_stride;
}

// Row and head of the lanes. Lanes behind the last row work on it once more, for sums need whole
// warps, and write nothing.
struct Place {
    u32 row, head, kv_head;
    bool real;
    // By lane, where the row is among those of step `lane`, and of step `lane + L`.
    u32 own[2];
};

template <int L>
__device__ __forceinline__ Place place_of(const OwnArgs& a, u32 heads) {
    u32 index = blockIdx.x * (THREADS / L) + threadIdx.x / L, row = index / heads;
    Place at = {min(row, a.rows - 1), index % heads};
    at.kv_head = at.head / (heads / a.kv_heads);
    at.real = row < a.rows;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 step = threadIdx.x % L + i * L;
        at.own[i] = step < a.steps ? reinterpret_cast<const u32*>(a.own[step])[at.row] : 0;
    }
    return at;
}

template <int L>
__device__ __forceinline__ u32 own_row(const Place& at, u32 step) {
    u32 low = __shfl_sync(FULL_WARP, at.own[0], step, L);
    u32 high = __shfl_sync(FULL_WARP, at.own[1], step, L);
    return step < L ? low : high;
}

// A row's softmax so far: largest score, sum relative to it, and mixed values.
template <typename T, int V, int L>
struct Mix {
    Part<T, V, L> q, out;
    float most, total;

    // Takes COUNT steps in; all loads go first.
    template <int COUNT>
    __device__ __forceinline__ void take(const OwnArgs& a, const Place& at, u32 first) {
        Raw<T, V> k[COUNT], v[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            u32 step = first + i, row = own_row<L>(at, step);
            k[i] = fetch<T, V, L>(head_row<const T>(a.keys[step], row, at.kv_head), a.qk_dim);
            v[i] = fetch<T, V, L>(head_row<const T>(a.values[step], row, at.kv_head), a.v_dim);
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            float score = a.scale * q.dot(k[i]);
            float peak = fmaxf(most, score), shrink = expf(most - peak);
            float weight = expf(score - peak);
            total = total * shrink + weight;
            most = peak;
            out.blend(shrink, v[i], weight);
        }
    }
};

// Takes a row's own keys into its output and its softmax's denominator.
template <typename T, int V, int L>
__device__ __forceinline__ void merge_own(const OwnArgs& a) {
    Place at = place_of<L>(a, a.heads);
    T* to = head_row<T>(a.out, at.row, at.head);
    Mix<T, V, L> mix;
    mix.q = fetch<T, V, L>(head_row<const T>(a.q, at.row, at.head), a.qk_dim);
    mix.out = fetch<T, V, L>(to, a.v_dim);
    float* lse = reinterpret_cast<float*>(a.lse) + (i64)at.row * a.heads + at.head;
    mix.most = *lse;
    mix.total = 1.0f;
    u32 step = 0;
    for (; step + 3 <= a.steps; step += 3) mix.template take<3>(a, at, step);
    for (; step < a.steps; step++) mix.template take<1>(a, at, step);
    mix.out.blend(1.0f / mix.total, mix.out, 0.0f);
    __syncwarp();
    if (!at.real) return;
    mix.out.write(to, a.v_dim);
    if (threadIdx.x % L == 0) *lse = mix.most + logf(mix.total);
}

// What the gradients through own keys need of a row, and the queries' part of them.
template <typename T, int V, int L>
struct Descent {
    Part<T, V, L> q, upstream, sum;
    float lse, delta;

    // Goes through COUNT steps; all loads go first. ALONE: each query head has keys of its own.
    template <int COUNT, bool ALONE>
    __device__ __forceinline__ void take(const OwnArgs& a, const Place& at, u32 first) {
        Raw<T, V> k[COUNT], v[COUNT], d_k[COUNT], d_v[COUNT];
        T *to_k[COUNT], *to_v[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            u32 step = first + i, row = own_row<L>(at, step);
            k[i] = fetch<T, V, L>(head_row<const T>(a.keys[step], row, at.kv_head), a.qk_dim);
            v[i] = fetch<T, V, L>(head_row<const T>(a.values[step], row, at.kv_head), a.v_dim);
            if constexpr (ALONE) {
                to_k[i] = head_row<T>(a.d_keys[step], row, at.kv_head);
                to_v[i] = head_row<T>(a.d_values[step], row, at.kv_head);
                d_k[i] = fetch<T, V, L>(to_k[i], a.qk_dim);
                d_v[i] = fetch<T, V, L>(to_v[i], a.v_dim);
            }
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            Part<T, V, L> key = k[i];
            float weight = expf(a.scale * q.dot(key) - lse);
            float pull = weight * (upstream.dot(v[i]) - delta) * a.scale;
            sum.blend(1.0f, key, pull);
            if constexpr (ALONE) {
                Part<T, V, L> d_key = d_k[i], d_value = d_v[i];
                d_key.blend(1.0f, q, pull);
                d_value.blend(1.0f, upstream, weight);
                if (at.real) {
                    d_key.write(to_k[i], a.qk_dim);
                    d_value.write(to_v[i], a.v_dim);
                }
            }
        }
    }

    template <bool ALONE>
    __device__ __forceinline__ void take_all(const OwnArgs& a, const Place& at) {
        u32 step = 0;
        for (; step + 2 <= a.steps; step += 2) take<2, ALONE>(a, at, step);
        if (step < a.steps) take<1, ALONE>(a, at, step);
    }
};

// Writes delta (the output along its gradient) and, if there are own keys, their part of the
// queries' gradient; where each query head has keys of its own, adds to the gradients of these.
template <typename T, int V, int L>
__device__ __forceinline__ void descend_own(const OwnArgs& a) {
    Place at = place_of<L>(a, a.heads);
    Descent<T, V, L> descent;
    descent.upstream = fetch<T, V, L>(head_row<const T>(a.d_out, at.row, at.head), a.v_dim);
    Part<T, V, L> out = fetch<T, V, L>(head_row<const T>(a.out, at.row, at.head), a.v_dim);
    i64 place = (i64)at.row * a.heads + at.head;
    if (a.steps) {
        descent.q = fetch<T, V, L>(head_row<const T>(a.q, at.row, at.head), a.qk_dim);
        descent.lse = reinterpret_cast<const float*>(a.lse)[place];
    }
    descent.delta = descent.upstream.dot(out);
    if (at.real && threadIdx.x % L == 0) reinterpret_cast<float*>(a.delta)[place] = descent.delta;
    if (!a.steps) return;
    descent.sum = {};
    if (a.heads == a.kv_heads)
        descent.template take_all<true>(a, at);
    else
        descent.template take_all<false>(a, at);
    if (at.real) descent.sum.write(head_row<T>(a.d_q, at.row, at.head), a.qk_dim);
}

// Adds to the gradients of own keys and values that several query heads share, in the heads' order.
// Comes after `descend_own`, whose delta it reads.
template <typename T, int V, int L>
__device__ __forceinline__ void descend_shared(const OwnArgs& a) {
    Place at = place_of<L>(a, a.kv_heads);
    u32 group = a.heads / a.kv_heads;
    const float* lse = reinterpret_cast<const float*>(a.lse) + (i64)at.row * a.heads;
    const float* deltas = reinterpret_cast<const float*>(a.delta) + (i64)at.row * a.heads;
    for (u32 step = 0; step < a.steps; step++) {
        u32 row = own_row<L>(at, step);
        T *to_k = head_row<T>(a.d_keys[step], row, at.head),
          *to_v = head_row<T>(a.d_values[step], row, at.head);
        Part<T, V, L> k = fetch<T, V, L>(head_row<const T>(a.keys[step], row, at.head), a.qk_dim);
        Part<T, V, L> v = fetch<T, V, L>(head_row<const T>(a.values[step], row, at.head), a.v_dim);
        Part<T, V, L> d_k = fetch<T, V, L>(to_k, a.qk_dim), d_v = fetch<T, V, L>(to_v, a.v_dim);
#pragma unroll 2
        for (u32 head = at.head * group; head < (at.head + 1) * group; head++) {
            Part<T, V, L> q = fetch<T, V, L>(head_row<const T>(a.q, at.row, head), a.qk_dim);
            Part<T, V, L> upstream =
                fetch<T, V, L>(head_row<const T>(a.d_out, at.row, head), a.v_dim);
            float weight = expf(a.scale * q.dot(k) - lse[head]);
            d_k.blend(1.0f, q, weight * (upstream.dot(v) - deltas[head]) * a.scale);
            d_v.blend(1.0f, upstream, weight);
        }
        if (at.real) {
            d_k.write(to_k, a.qk_dim);
            d_v.write(to_v, a.v_dim);
        }
    }
}

#define MAKE_ONE(base, function, blocks, T, V, L)                         \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks)         \
        JOIN(KERNEL1(base, T, V), L)(const __grid_constant__ OwnArgs a) { \
        function<T, V, L>(a);                                             \
    }
// Registers for so many blocks of the first three at a time, of the others two.
#define MAKE(base, function, blocks)              \
    MAKE_ONE(base, function, blocks, bf16, 8, 8)  \
    MAKE_ONE(base, function, blocks, bf16, 8, 16) \
    MAKE_ONE(base, function, blocks, bf16, 8, 32) \
    MAKE_ONE(base, function, 2, bf16, 1, 32)      \
    MAKE_ONE(base, function, 2, float, 4, 32)     \
    MAKE_ONE(base, function, 2, float, 1, 32)

MAKE(train_attention_own, merge_own, 4)
MAKE(train_attention_own_backward, descend_own, 3)
MAKE(train_attention_own_shared, descend_shared, 2)
