// AdamW and the sum of squares of gradients. Twin: trainer's ops::cpu::adamw.

struct SquaresArgs {
    Mat x;
    u64 out;
    u32 rows, cols;
};

struct AdamWArgs {
    // `param` is the rounded copy of `master`, or the same matrix.
    Mat param, master, first, second, gradient;
    u32 rows, cols;
    float rate, beta1, beta2, epsilon, kept, first_part, second_part, gradient_scale;
};

#define SQUARE_BLOCKS 1024

// A sum for each of 1024 blocks, in f64; their order is fixed.
template <typename T, int V>
__device__ __forceinline__ void squares(const SquaresArgs& a) {
    __shared__ double parts[256];
    double total = 0.0;
    u64 steps = a.cols / V, all = steps * a.rows;
    for (u64 at = (u64)blockIdx.x * 256 + threadIdx.x; at < all; at += (u64)SQUARE_BLOCKS * 256) {
        float x[V], sum = 0.0f;
        load(x, row_of<const T>(a.x, at / steps) + at % steps * V);
#pragma unroll
        for (int i = 0; i < V; i++) sum += x[i] * x[i];
        total += sum;
    }
    parts[threadIdx.x] = total;
    for (u32 half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    }
    if (threadIdx.x == 0) reinterpret_cast<double*>(a.out)[blockIdx.x] = parts[0];
}

template <typename P, typename G, int V>
__device__ __forceinline__ void adamw(const AdamWArgs& a) {
    i64 r = tile_row(), c = tile_col<V>();
    if (r >= a.rows || c >= a.cols) return;
    float x[V], m[V], v[V], g[V];
    float* master = row_of<float>(a.master, r) + c;
    float *first = row_of<float>(a.first, r) + c, *second = row_of<float>(a.second, r) + c;
    load(x, master);
    load(m, first);
    load(v, second);
    load(g, row_of<const G>(a.gradient, r) + c);
#pragma unroll
    for (int i = 0; i < V; i++) {
        float gradient = g[i] * a.gradient_scale;
        m[i] = m[i] * a.beta1 + gradient * (1.0f - a.beta1);
        v[i] = v[i] * a.beta2 + gradient * gradient * (1.0f - a.beta2);
        float root = sqrtf(v[i] / a.second_part) + a.epsilon;
        x[i] = x[i] * a.kept - m[i] / a.first_part / root * a.rate;
    }
    store(master, x);
    store(first, m);
    store(second, v);
    if (a.param.address != a.master.address) store(row_of<P>(a.param, r) + c, x);
}

#define MAKE_SQUARES(T)                                                                           \
    extern "C" __global__ void KERNEL1(train_squares, T, v8)(SquaresArgs a) { squares<T, 8>(a); } \
    extern "C" __global__ void KERNEL1(train_squares, T, v1)(SquaresArgs a) { squares<T, 1>(a); }
#define MAKE_ADAMW(P, G)                                                                          \
    extern "C" __global__ void KERNEL2(train_adamw, P, G, v8)(AdamWArgs a) { adamw<P, G, 8>(a); } \
    extern "C" __global__ void KERNEL2(train_adamw, P, G, v1)(AdamWArgs a) { adamw<P, G, 1>(a); }

MAKE_SQUARES(bf16)
MAKE_SQUARES(float)
FOR_TYPE_PAIRS(MAKE_ADAMW)
