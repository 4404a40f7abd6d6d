// What a row of the training-time test adds to its attention by the keys it made itself at later
// steps, forward and backward, for both types and all widths up to 256: L lanes for each row and
// head, V neighbouring values a load. Twin: trainer's ops::cpu::attention.

#define MAX_STEPS 15
#define THREADS 256
// Steps whose keys and values are loaded together.
#define TOGETHER 2

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

// A lane's part of a row: V neighbours, then those L * V further, and so on; eight in all.
template <typename T, int V, int L>
struct Part {
    float x[8];

    __device__ void read(const T* row, u32 width) {
#pragma unroll
        for (int step = 0; step < 8 / V; step++) {
            u32 at = (step * L + threadIdx.x % L) * V;
            float part[V] = {};
            if (at < width) load(part, row + at);
#pragma unroll
            for (int i = 0; i < V; i++) x[step * V + i] = part[i];
        }
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
    i64 row;
    u32 head;
    bool real;
};

template <int L>
__device__ __forceinline__ Place place_of(u32 rows, u32 heads) {
    u32 index = blockIdx.x * (THREADS / L) + threadIdx.x / L, row = index / heads;
    return {min(row, rows - 1), index % heads, row < rows};
}

__device__ __forceinline__ i64 own_row(const OwnArgs& a, u32 step, i64 row) {
    return reinterpret_cast<const u32*>(a.own[step])[row];
}

// Takes a row's own keys into its output and its softmax's denominator.
template <typename T, int V, int L>
__device__ __forceinline__ void merge_own(const OwnArgs& a) {
    Place at = place_of<L>(a.rows, a.heads);
    u32 kv_head = at.head / (a.heads / a.kv_heads);
    Part<T, V, L> q, out, k[TOGETHER], v[TOGETHER];
    T* to = head_row<T>(a.out, at.row, at.head);
    q.read(head_row<const T>(a.q, at.row, at.head), a.qk_dim);
    out.read(to, a.v_dim);
    float* lse = reinterpret_cast<float*>(a.lse) + at.row * a.heads + at.head;
    float most = *lse, total = 1.0f;
    for (u32 first = 0; first < a.steps; first += TOGETHER) {
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            if (first + i >= a.steps) break;
            i64 row = own_row(a, first + i, at.row);
            k[i].read(head_row<const T>(a.keys[first + i], row, kv_head), a.qk_dim);
            v[i].read(head_row<const T>(a.values[first + i], row, kv_head), a.v_dim);
        }
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            if (first + i >= a.steps) break;
            float score = a.scale * q.dot(k[i]);
            float peak = fmaxf(most, score), shrink = expf(most - peak);
            float weight = expf(score - peak);
            total = total * shrink + weight;
            most = peak;
            out.blend(shrink, v[i], weight);
        }
    }
    out.blend(1.0f / total, out, 0.0f);
    __syncwarp();
    if (!at.real) return;
    out.write(to, a.v_dim);
    if (threadIdx.x % L == 0) *lse = most + logf(total);
}

// Adds `factor` times a part to a row of gradients that was read into `sum`.
template <typename T, int V, int L>
__device__ __forceinline__ void add_to(T* row, u32 width, Part<T, V, L>& sum,
                                       const Part<T, V, L>& part, float factor) {
    sum.blend(1.0f, part, factor);
    sum.write(row, width);
}

// Writes delta (the output along its gradient) and the own keys' part of the queries' gradient;
// where each query head has keys of its own, adds to the gradients of the own keys and values.
template <typename T, int V, int L>
__device__ __forceinline__ void descend_own(const OwnArgs& a) {
    Place at = place_of<L>(a.rows, a.heads);
    bool alone = a.heads == a.kv_heads;
    u32 kv_head = at.head / (a.heads / a.kv_heads);
    Part<T, V, L> q, upstream, out, sum = {}, k[TOGETHER], v[TOGETHER], d_k[TOGETHER],
                                    d_v[TOGETHER];
    q.read(head_row<const T>(a.q, at.row, at.head), a.qk_dim);
    upstream.read(head_row<const T>(a.d_out, at.row, at.head), a.v_dim);
    out.read(head_row<const T>(a.out, at.row, at.head), a.v_dim);
    float lse = reinterpret_cast<const float*>(a.lse)[at.row * a.heads + at.head];
    float delta = upstream.dot(out);
    for (u32 first = 0; first < a.steps; first += TOGETHER) {
        T *to_k[TOGETHER], *to_v[TOGETHER];
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            if (first + i >= a.steps) break;
            i64 row = own_row(a, first + i, at.row);
            k[i].read(head_row<const T>(a.keys[first + i], row, kv_head), a.qk_dim);
            v[i].read(head_row<const T>(a.values[first + i], row, kv_head), a.v_dim);
            if (!alone) continue;
            to_k[i] = head_row<T>(a.d_keys[first + i], row, kv_head);
            to_v[i] = head_row<T>(a.d_values[first + i], row, kv_head);
            d_k[i].read(to_k[i], a.qk_dim);
            d_v[i].read(to_v[i], a.v_dim);
        }
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            if (first + i >= a.steps) break;
            float weight = expf(a.scale * q.dot(k[i]) - lse);
            float pull = weight * (upstream.dot(v[i]) - delta) * a.scale;
            sum.blend(1.0f, k[i], pull);
            if (!alone || !at.real) continue;
            add_to(to_k[i], a.qk_dim, d_k[i], q, pull);
            add_to(to_v[i], a.v_dim, d_v[i], upstream, weight);
        }
    }
    if (!at.real) return;
    sum.write(head_row<T>(a.d_q, at.row, at.head), a.qk_dim);
    if (threadIdx.x % L == 0) reinterpret_cast<float*>(a.delta)[at.row * a.heads + at.head] = delta;
}

// Adds to the gradients of own keys and values that several query heads share, in the heads' order.
// Comes after `descend_own`, whose delta it reads.
template <typename T, int V, int L>
__device__ __forceinline__ void descend_shared(const OwnArgs& a) {
    Place at = place_of<L>(a.rows, a.kv_heads);
    u32 group = a.heads / a.kv_heads;
    const float* lse = reinterpret_cast<const float*>(a.lse) + at.row * a.heads;
    const float* deltas = reinterpret_cast<const float*>(a.delta) + at.row * a.heads;
    for (u32 step = 0; step < a.steps; step++) {
        i64 row = own_row(a, step, at.row);
        Part<T, V, L> k, v, d_k, d_v;
        T *to_k = head_row<T>(a.d_keys[step], row, at.head),
          *to_v = head_row<T>(a.d_values[step], row, at.head);
        k.read(head_row<const T>(a.keys[step], row, at.head), a.qk_dim);
        v.read(head_row<const T>(a.values[step], row, at.head), a.v_dim);
        d_k.read(to_k, a.qk_dim);
        d_v.read(to_v, a.v_dim);
        for (u32 head = at.head * group; head < (at.head + 1) * group; head++) {
            Part<T, V, L> q, upstream;
            q.read(head_row<const T>(a.q, at.row, head), a.qk_dim);
            upstream.read(head_row<const T>(a.d_out, at.row, head), a.v_dim);
            float weight = expf(a.scale * q.dot(k) - lse[head]);
            d_k.blend(1.0f, q, weight * (upstream.dot(v) - deltas[head]) * a.scale);
            d_v.blend(1.0f, upstream, weight);
        }
        if (!at.real) continue;
        d_k.write(to_k, a.qk_dim);
        d_v.write(to_v, a.v_dim);
    }
}

#define MAKE_ONE(base, function, T, V, L)                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                 \
        JOIN(KERNEL1(base, T, V), L)(const __grid_constant__ OwnArgs a) { \
        function<T, V, L>(a);                                             \
    }
#define MAKE(base, function)              \
    MAKE_ONE(base, function, bf16, 8, 8)  \
    MAKE_ONE(base, function, bf16, 8, 16) \
    MAKE_ONE(base, function, bf16, 8, 32) \
    MAKE_ONE(base, function, bf16, 1, 32) \
    MAKE_ONE(base, function, float, 4, 32) MAKE_ONE(base, function, float, 1, 32)

MAKE(train_attention_own, merge_own)
MAKE(train_attention_own_backward, descend_own)
MAKE(train_attention_own_shared, descend_shared)
