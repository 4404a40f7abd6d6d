// Row-wise functions of training: gradients of norm and gate, rotation, sums and scatter of rows.
// Twins: trainer's ops::cpu::rows.

struct NormGradArgs {
    Mat d_x, x, gradient;
    u64 weight, partial;
    u32 rows, cols, accumulate;
    float eps;
};

struct ColumnSumArgs {
    u64 out, partial;
    u32 parts, cols, accumulate;
};

// Outputs may be the matrices they are made of.
struct GateArgs {
    Mat d_gate, d_up, act, gradient, gate, up;
    u32 rows, cols;
};

struct TurnArgs {
    Heads out, x;
    Mat cos, sin;
    u64 positions;
    u32 rows, heads, pairs, interleaved;
    float direction;
};

struct SumRowsArgs {
    Mat out, x;
    u64 starts, sources;
    u32 rows, cols, accumulate;
};

struct ScatterArgs {
    Mat out, x;
    u64 places;
    u32 rows, cols;
};

struct FactorArgs {
    Mat x;
    u64 factor;
    u32 rows, cols;
};

// A block takes every gridDim.x-th row. Its part of the weight's gradient is kept in shared memory,
// where each thread touches its own columns only.
template <typename T, int V>
__device__ __forceinline__ void norm_grad(const NormGradArgs& a) {
    extern __shared__ __align__(16) u8 memory[];
    float* d_weight = reinterpret_cast<float*>(memory);
    const float* weight = reinterpret_cast<const float*>(a.weight);
    for (u32 c = threadIdx.x * V; c < a.cols; c += blockDim.x * V) {
#pragma unroll
        for (int i = 0; i < V; i++) d_weight[c + i] = 0.0f;
    }
    for (i64 r = blockIdx.x; r < a.rows; r += gridDim.x) {
        float squares = 0.0f, along = 0.0f;
        for (u32 c = threadIdx.x * V; c < a.cols; c += blockDim.x * V) {
            float x[V], g[V], w[V];
            load(x, row_of<const T>(a.x, r) + c);
            load(g, row_of<const T>(a.gradient, r) + c);
            load(w, weight + c);
#pragma unroll
            for (int i = 0; i < V; i++) {
                squares += x[i] * x[i];
                along += g[i] * w[i] * x[i];
            }
        }
        squares = block_sum(squares);
        along = block_sum(along);
        float scale = 1.0f / sqrtf(squares / (float)a.cols + a.eps);
        float pull = along * scale * scale * scale / (float)a.cols;
        for (u32 c = threadIdx.x * V; c < a.cols; c += blockDim.x * V) {
            float x[V], g[V], w[V];
            load(x, row_of<const T>(a.x, r) + c);
            load(g, row_of<const T>(a.gradient, r) + c);
            load(w, weight + c);
#pragma unroll
            for (int i = 0; i < V; i++) {
                d_weight[c + i] += g[i] * x[i] * scale;
                x[i] = g[i] * w[i] * scale - x[i] * pull;
            }
            if (!a.d_x.address) continue;
            if (a.accumulate) {
                load(g, row_of<const T>(a.d_x, r) + c);
#pragma unroll
                for (int i = 0; i < V; i++) x[i] += g[i];
            }
            store(row_of<T>(a.d_x, r) + c, x);
        }
    }
    float* partial = reinterpret_cast<float*>(a.partial) + (i64)blockIdx.x * a.cols;
    for (u32 c = threadIdx.x * V; c < a.cols; c += blockDim.x * V) {
#pragma unroll
        for (int i = 0; i < V; i++) partial[c + i] = d_weight[c + i];
    }
}

// Sums the parts of each column in their order.
extern "C" __global__ void train_column_sum(ColumnSumArgs a) {
    u32 c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= a.cols) return;
    const float* partial = reinterpret_cast<const float*>(a.partial) + c;
    float* out = reinterpret_cast<float*>(a.out) + c;
    float sum = a.accumulate ? *out : 0.0f;
    for (u32 p = 0; p < a.parts; p++) sum += partial[(i64)p * a.cols];
    *out = sum;
}

template <typename T, int V>
__device__ __forceinline__ void gate_grad(const GateArgs& a) {
    i64 r = tile_row(), c = tile_col<V>();
    if (r >= a.rows || c >= a.cols) return;
    float g[V], gate[V], up[V];
    load(g, row_of<const T>(a.gradient, r) + c);
    load(gate, row_of<const T>(a.gate, r) + c);
    load(up, row_of<const T>(a.up, r) + c);
#pragma unroll
    for (int i = 0; i < V; i++) {
        float open = 1.0f / (1.0f + __expf(-gate[i]));
        float silu = gate[i] * open, act = silu * up[i];
        gate[i] = g[i] * up[i] * (open + silu * (1.0f - open));
        up[i] = g[i] * silu;
        g[i] = act;
    }
    store(row_of<T>(a.d_gate, r) + c, gate);
    store(row_of<T>(a.d_up, r) + c, up);
    store(row_of<T>(a.act, r) + c, g);
}

// Columns of the launch are the pairs of all heads.
template <typename T, int V>
__device__ __forceinline__ void turn(const TurnArgs& a) {
    i64 r = tile_row();
    u32 c = (u32)tile_col<V>();
    if (r >= a.rows || c >= a.heads * a.pairs) return;
    u32 head = c / a.pairs, pair = c % a.pairs;
    u32 position = reinterpret_cast<const u32*>(a.positions)[r];
    const T* from =
        reinterpret_cast<const T*>(a.x.address) + r * a.x.row_stride + head * a.x.head_stride;
    T* to = reinterpret_cast<T*>(a.out.address) + r * a.out.row_stride + head * a.out.head_stride;
    float first[V], second[V], cos[V], sin[V];
    load(cos, row_of<const float>(a.cos, position) + pair);
    load(sin, row_of<const float>(a.sin, position) + pair);
    if (a.interleaved) {
#pragma unroll
        for (int i = 0; i < V; i++) {
            first[i] = to_float(from[2 * (pair + i)]);
            second[i] = to_float(from[2 * (pair + i) + 1]);
        }
    } else {
        load(first, from + pair);
        load(second, from + pair + a.pairs);
    }
#pragma unroll
    for (int i = 0; i < V; i++) {
        float turn = sin[i] * a.direction, x = first[i], y = second[i];
        first[i] = x * cos[i] - y * turn;
        second[i] = y * cos[i] + x * turn;
    }
    if (a.interleaved) {
#pragma unroll
        for (int i = 0; i < V; i++) {
            from_float(to[2 * (pair + i)], first[i]);
            from_float(to[2 * (pair + i) + 1], second[i]);
        }
    } else {
        store(to + pair, first);
        store(to + pair + a.pairs, second);
    }
}

// Row r of `out` is the sum of the rows sources[starts[r] .. starts[r + 1]] of `x`, in that order,
// and with `accumulate` of what was there.
template <typename T, int V>
__device__ __forceinline__ void sum_rows(const SumRowsArgs& a) {
    i64 r = tile_row(), c = tile_col<V>();
    if (r >= a.rows || c >= a.cols) return;
    const u32* starts = reinterpret_cast<const u32*>(a.starts) + r;
    float sum[V] = {};
    if (a.accumulate) {
        if (starts[0] == starts[1]) return;
        load(sum, row_of<const T>(a.out, r) + c);
    }
    for (u32 at = starts[0]; at < starts[1]; at++) {
        float x[V];
        load(x, row_of<const T>(a.x, reinterpret_cast<const u32*>(a.sources)[at]) + c);
#pragma unroll
        for (int i = 0; i < V; i++) sum[i] += x[i];
    }
    store(row_of<T>(a.out, r) + c, sum);
}

// Row places[r] of `out` becomes row r of `x`; places differ.
template <typename T, int V>
__device__ __forceinline__ void scatter_rows(const ScatterArgs& a) {
    i64 r = tile_row(), c = tile_col<V>();
    if (r >= a.rows || c >= a.cols) return;
    float x[V];
    load(x, row_of<const T>(a.x, r) + c);
    store(row_of<T>(a.out, reinterpret_cast<const u32*>(a.places)[r]) + c, x);
}

// Multiplies in place by a number on the device; by 1 costs nothing.
template <typename T, int V>
__device__ __forceinline__ void multiply(const FactorArgs& a) {
    float factor = *reinterpret_cast<const float*>(a.factor);
    i64 r = tile_row(), c = tile_col<V>();
    if (factor == 1.0f || r >= a.rows || c >= a.cols) return;
    float x[V];
    load(x, row_of<const T>(a.x, r) + c);
#pragma unroll
    for (int i = 0; i < V; i++) x[i] *= factor;
    store(row_of<T>(a.x, r) + c, x);
}

#define MAKE_ONE(base, function, Args, T, V, suffix) \
    extern "C" __global__ void KERNEL1(base, T, suffix)(Args a) { function<T, V>(a); }
#define MAKE(base, function, Args)              \
    MAKE_ONE(base, function, Args, bf16, 8, v8) \
    MAKE_ONE(base, function, Args, bf16, 1, v1) \
    MAKE_ONE(base, function, Args, float, 8, v8) MAKE_ONE(base, function, Args, float, 1, v1)

MAKE(train_norm_grad, norm_grad, NormGradArgs)
MAKE(train_gate_grad, gate_grad, GateArgs)
MAKE(train_turn, turn, TurnArgs)
MAKE(train_sum_rows, sum_rows, SumRowsArgs)
MAKE(train_scatter_rows, scatter_rows, ScatterArgs)
MAKE(train_multiply, multiply, FactorArgs)
