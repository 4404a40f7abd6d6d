// Root-mean-square norm of rows, alone or after a sum; a block for each row. Twins: norm,
// reference::add_parts.

struct NormArgs {
    Mat out, x, delta;
    u64 weight;
    u32 rows, cols;
    float eps;
};

struct PartsArgs {
    Mat out, x, own;
    u64 received, weight;
    u32 rows, cols, ranks, rank, fresh;
    float eps;
};

// Reads x twice: the second time it comes from a cache.
template <typename T, typename U, int V>
__device__ __forceinline__ void scale_row(const NormArgs& a, i64 r, float sum) {
    float factor = 1.0f / sqrtf(sum / (float)a.cols + a.eps);
    const float* weight = reinterpret_cast<const float*>(a.weight);
    for (u32 c = threadIdx.x * V; c < a.cols; c += blockDim.x * V) {
        float x[V], w[V];
        load(x, row_of<const T>(a.x, r) + c);
        load(w, weight + c);
#pragma unroll
        for (int i = 0; i < V; i++) x[i] = x[i] * factor * w[i];
        store(row_of<U>(a.out, r) + c, x);
    }
}

template <typename T, typename U, int V>
__device__ __forceinline__ void rms_norm_row(const NormArgs& a) {
    i64 r = blockIdx.x;
    float sum = 0.0f;
    for (u32 c = threadIdx.x * V; c < a.cols; c += blockDim.x * V) {
        float x[V];
        load(x, row_of<const T>(a.x, r) + c);
#pragma unroll
        for (int i = 0; i < V; i++) sum += x[i] * x[i];
    }
    scale_row<T, U, V>(a, r, block_sum(sum));
}

// Each thread reads back in `scale_row` only what it wrote itself here.
template <typename T, typename D, typename U, int V>
__device__ __forceinline__ void add_rms_norm_row(const NormArgs& a) {
    i64 r = blockIdx.x;
    float sum = 0.0f;
    for (u32 c = threadIdx.x * V; c < a.cols; c += blockDim.x * V) {
        float x[V], delta[V];
        T* at = row_of<T>(a.x, r) + c;
        load(x, at);
        load(delta, row_of<const D>(a.delta, r) + c);
#pragma unroll
        for (int i = 0; i < V; i++) {
            x[i] = rounded(x[i] + delta[i], at);
            sum += x[i] * x[i];
        }
        store(at, x);
    }
    scale_row<T, U, V>(a, r, block_sum(sum));
}

// x = or += the sum of all ranks' parts; then the norm, if there is a place for it. The part of
// this rank lies apart from those received.
template <typename T, typename U, int V>
__device__ __forceinline__ void add_parts_row(const PartsArgs& a) {
    i64 r = blockIdx.x;
    float squares = 0.0f;
    for (u32 c = threadIdx.x * V; c < a.cols; c += blockDim.x * V) {
        float x[V] = {}, sum[V] = {};
        U* at = row_of<U>(a.x, r) + c;
        if (!a.fresh) load(x, at);
        for (u32 rank = 0; rank < a.ranks; rank++) {
            float part[V];
            const T* received =
                reinterpret_cast<const T*>(a.received) + ((i64)rank * a.rows + r) * a.cols;
            load(part, (rank == a.rank ? row_of<const T>(a.own, r) : received) + c);
#pragma unroll
            for (int i = 0; i < V; i++) sum[i] += part[i];
        }
#pragma unroll
        for (int i = 0; i < V; i++) {
            x[i] = rounded(x[i] + sum[i], at);
            squares += x[i] * x[i];
        }
        store(at, x);
    }
    if (!a.out.address) return;
    NormArgs norm = {a.out, a.x, a.x, a.weight, a.rows, a.cols, a.eps};
    scale_row<U, T, V>(norm, r, block_sum(squares));
}

#define MAKE_NORM(T, U)                                                  \
    extern "C" __global__ void KERNEL2(rms_norm, T, U, v8)(NormArgs a) { \
        rms_norm_row<T, U, 8>(a);                                        \
    }                                                                    \
    extern "C" __global__ void KERNEL2(rms_norm, T, U, v1)(NormArgs a) { rms_norm_row<T, U, 1>(a); }
#define ADD_NORM(T, D, U, v) KERNEL2(JOIN(add_rms_norm, NAME_##T), D, U, v)
#define MAKE_ADD_NORM(T, D, U)                                     \
    extern "C" __global__ void ADD_NORM(T, D, U, v8)(NormArgs a) { \
        add_rms_norm_row<T, D, U, 8>(a);                           \
    }                                                              \
    extern "C" __global__ void ADD_NORM(T, D, U, v1)(NormArgs a) { \
        add_rms_norm_row<T, D, U, 1>(a);                           \
    }
#define MAKE_ADD_NORMS(D, U) MAKE_ADD_NORM(bf16, D, U) MAKE_ADD_NORM(float, D, U)

FOR_TYPE_PAIRS(MAKE_NORM)
FOR_TYPE_PAIRS(MAKE_ADD_NORMS)

#define MAKE_PARTS(T, U)                                                   \
    extern "C" __global__ void KERNEL2(add_parts, T, U, v8)(PartsArgs a) { \
        add_parts_row<T, U, 8>(a);                                         \
    }                                                                      \
    extern "C" __global__ void KERNEL2(add_parts, T, U, v1)(PartsArgs a) { \
        add_parts_row<T, U, 1>(a);                                         \
    }

FOR_TYPE_PAIRS(MAKE_PARTS)
