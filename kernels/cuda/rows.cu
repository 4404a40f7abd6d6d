// Element-wise functions of rows: copy and conversion, sums, SiLU, zeros, embedding, and the split
// of latent heads. Twins: reference::rows, activation.

struct RowsArgs {
    Mat out, x, y;
    u32 rows, cols;
};

struct EmbedArgs {
    Mat out, table;
    u64 ids;
    u32 rows, cols, first, table_rows;
};

struct LatentArgs {
    Mat keys, values, kv, k_pe;
    u32 rows, heads, nope, rope, v;
};

template <typename T, typename U, int V>
__device__ __forceinline__ void copy_rows(const RowsArgs& a) {
    i64 r = tile_row(), c = tile_col<V>();
    if (r >= a.rows || c >= a.cols) return;
    float x[V];
    load(x, row_of<const T>(a.x, r) + c);
    store(row_of<U>(a.out, r) + c, x);
}

// out = x + y, where out and x are the same matrix.
template <typename T, typename U, int V>
__device__ __forceinline__ void add_rows(const RowsArgs& a) {
    i64 r = tile_row(), c = tile_col<V>();
    if (r >= a.rows || c >= a.cols) return;
    float x[V], y[V];
    load(x, row_of<const U>(a.x, r) + c);
    load(y, row_of<const T>(a.y, r) + c);
#pragma unroll
    for (int i = 0; i < V; i++) x[i] += y[i];
    store(row_of<U>(a.out, r) + c, x);
}

template <typename T, typename U, int V>
__device__ __forceinline__ void silu_mul_rows(const RowsArgs& a) {
    i64 r = tile_row(), c = tile_col<V>();
    if (r >= a.rows || c >= a.cols) return;
    float gate[V], up[V];
    load(gate, row_of<const T>(a.x, r) + c);
    load(up, row_of<const T>(a.y, r) + c);
#pragma unroll
    for (int i = 0; i < V; i++) gate[i] = gate[i] / (1.0f + __expf(-gate[i])) * up[i];
    store(row_of<U>(a.out, r) + c, gate);
}

template <typename T, int V>
__device__ __forceinline__ void zero_rows(const RowsArgs& a) {
    i64 r = tile_row(), c = tile_col<V>();
    if (r >= a.rows || c >= a.cols) return;
    float x[V] = {};
    store(row_of<T>(a.out, r) + c, x);
}

template <typename T, typename U, int V>
__device__ __forceinline__ void embed_rows(const EmbedArgs& a) {
    i64 r = tile_row(), c = tile_col<V>();
    if (r >= a.rows || c >= a.cols) return;
    u32 id = reinterpret_cast<const u32*>(a.ids)[r];
    float x[V] = {};
    // An id below `first` wraps to a number beyond the table.
    if (id - a.first < a.table_rows) load(x, row_of<const T>(a.table, id - a.first) + c);
    store(row_of<U>(a.out, r) + c, x);
}

// Along a row run all k_nope, then all copies of k_pe, then all values, so that neighbouring
// threads mostly write neighbouring places.
template <typename T, typename U, int V>
__device__ __forceinline__ void expand_latent_rows(const LatentArgs& a) {
    i64 r = tile_row();
    u32 c = (u32)tile_col<V>();
    if (r >= a.rows || c >= a.heads * (a.nope + a.rope + a.v)) return;
    u32 key = a.nope + a.rope, source = a.nope + a.v;
    float x[V];
    T* to;
    if (c < a.heads * a.nope) {
        u32 head = c / a.nope, i = c % a.nope;
        load(x, row_of<const T>(a.kv, r) + head * source + i);
        to = row_of<T>(a.keys, r) + head * key + i;
    } else if (c < a.heads * key) {
        u32 head = (c - a.heads * a.nope) / a.rope, i = (c - a.heads * a.nope) % a.rope;
        load(x, row_of<const U>(a.k_pe, r) + i);
        to = row_of<T>(a.keys, r) + head * key + a.nope + i;
    } else {
        u32 head = (c - a.heads * key) / a.v, i = (c - a.heads * key) % a.v;
        load(x, row_of<const T>(a.kv, r) + head * source + a.nope + i);
        to = row_of<T>(a.values, r) + head * a.v + i;
    }
    store(to, x);
}

#define MAKE_PAIR(base, function, Args, T, U)                                            \
    extern "C" __global__ void KERNEL2(base, T, U, v8)(Args a) { function<T, U, 8>(a); } \
    extern "C" __global__ void KERNEL2(base, T, U, v1)(Args a) { function<T, U, 1>(a); }
#define MAKE_COPY(T, U) MAKE_PAIR(copy, copy_rows, RowsArgs, T, U)
#define MAKE_ADD(T, U) MAKE_PAIR(add, add_rows, RowsArgs, T, U)
#define MAKE_SILU(T, U) MAKE_PAIR(silu_mul, silu_mul_rows, RowsArgs, T, U)
#define MAKE_EMBED(T, U) MAKE_PAIR(embed, embed_rows, EmbedArgs, T, U)
#define MAKE_ONE(T)                                                                        \
    extern "C" __global__ void KERNEL2(zero, T, T, v8)(RowsArgs a) { zero_rows<T, 8>(a); } \
    extern "C" __global__ void KERNEL2(zero, T, T, v1)(RowsArgs a) { zero_rows<T, 1>(a); }
#define MAKE_LATENT(T, U) MAKE_PAIR(expand_latent, expand_latent_rows, LatentArgs, T, U)

FOR_TYPE_PAIRS(MAKE_COPY)
FOR_TYPE_PAIRS(MAKE_ADD)
FOR_TYPE_PAIRS(MAKE_SILU)
FOR_TYPE_PAIRS(MAKE_EMBED)
FOR_TYPE_PAIRS(MAKE_LATENT)
MAKE_ONE(bf16)
MAKE_ONE(float)
