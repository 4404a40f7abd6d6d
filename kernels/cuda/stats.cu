// Looks at captured states: finiteness and size of rows and of samples, and their FP8 form.
// Twins: reference::stats.

struct Stats {
    double sum_squares;
    float absmax;
    u32 non_finite;
};

struct StatsArgs {
    Mat x;
    u64 per_row;
    u32 rows, cols;
};

struct SegmentArgs {
    u64 per_row, bounds, out;
    u32 segments, rows;
};

struct QuantiseArgs {
    u64 codes;
    i64 codes_stride;
    u64 scales, errors;
    Mat x;
    u32 rows, cols;
};

__device__ __forceinline__ double warp_sum_double(double x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
}

// Merges over a block of 256 threads; the first thread has the result.
__device__ __forceinline__ Stats block_merge(Stats mine) {
    __shared__ Stats parts[8];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    mine.sum_squares = warp_sum_double(mine.sum_squares);
    mine.absmax = warp_max(mine.absmax);
    mine.non_finite = __reduce_add_sync(FULL_WARP, mine.non_finite);
    if (lane == 0) parts[warp] = mine;
    __syncthreads();
    for (u32 w = 1; threadIdx.x == 0 && w < 8; w++) {
        mine.sum_squares += parts[w].sum_squares;
        mine.absmax = fmaxf(mine.absmax, parts[w].absmax);
        mine.non_finite += parts[w].non_finite;
    }
    return mine;
}

template <typename T, int V>
__device__ __forceinline__ void stats_of_row(const StatsArgs& a) {
    i64 r = blockIdx.x;
    float sum = 0.0f, absmax = 0.0f;
    u32 non_finite = 0;
    for (u32 c = threadIdx.x * V; c < a.cols; c += 256 * V) {
        float x[V];
        load(x, row_of<const T>(a.x, r) + c);
#pragma unroll
        for (int i = 0; i < V; i++) {
            float magnitude = fabsf(x[i]);
            if (magnitude < INFINITY_F) {
                sum += x[i] * x[i];
                absmax = fmaxf(absmax, magnitude);
            } else {
                non_finite++;
            }
        }
    }
    Stats mine = {(double)sum, absmax, non_finite};
    mine = block_merge(mine);
    if (threadIdx.x == 0) reinterpret_cast<Stats*>(a.per_row)[r] = mine;
}

extern "C" __global__ void __launch_bounds__(256) row_stats_bf16_v8(StatsArgs a) {
    stats_of_row<bf16, 8>(a);
}
extern "C" __global__ void __launch_bounds__(256) row_stats_bf16_v1(StatsArgs a) {
    stats_of_row<bf16, 1>(a);
}
extern "C" __global__ void __launch_bounds__(256) row_stats_f32_v8(StatsArgs a) {
    stats_of_row<float, 8>(a);
}
extern "C" __global__ void __launch_bounds__(256) row_stats_f32_v1(StatsArgs a) {
    stats_of_row<float, 1>(a);
}

extern "C" __global__ void __launch_bounds__(256) segment_stats(SegmentArgs a) {
    const Stats* per_row = reinterpret_cast<const Stats*>(a.per_row);
    const u32* bounds = reinterpret_cast<const u32*>(a.bounds);
    u32 end = min(bounds[blockIdx.x + 1], a.rows);
    Stats mine = {0.0, 0.0f, 0};
    for (u32 r = bounds[blockIdx.x] + threadIdx.x; r < end; r += 256) {
        Stats row = per_row[r];
        mine.sum_squares += row.sum_squares;
        mine.absmax = fmaxf(mine.absmax, row.absmax);
        mine.non_finite += row.non_finite;
    }
    mine = block_merge(mine);
    if (threadIdx.x == 0) reinterpret_cast<Stats*>(a.out)[blockIdx.x] = mine;
}

__device__ __forceinline__ void store_codes(u8* to, const u32 (&codes)[1]) { *to = (u8)codes[0]; }
__device__ __forceinline__ void store_codes(u8* to, const u32 (&codes)[8]) {
    u32 low = codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24;
    u32 high = codes[4] | codes[5] << 8 | codes[6] << 16 | codes[7] << 24;
    *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
}

template <typename T, int V>
__device__ __forceinline__ void quantise_row(const QuantiseArgs& a) {
    i64 r = blockIdx.x;
    float absmax = 0.0f, nan = 0.0f;
    for (u32 c = threadIdx.x * V; c < a.cols; c += 256 * V) {
        float x[V];
        load(x, row_of<const T>(a.x, r) + c);
#pragma unroll
        for (int i = 0; i < V; i++) {
            absmax = fmaxf(absmax, fabsf(x[i]));
            if (x[i] != x[i]) nan = 1.0f;
        }
    }
    absmax = block_max(absmax);
    if (block_max(nan) > 0.0f) absmax = NAN_F;
    float scale = absmax / 448.0f;
    if (threadIdx.x == 0) reinterpret_cast<float*>(a.scales)[r] = scale;
    u8* codes = reinterpret_cast<u8*>(a.codes) + r * a.codes_stride;
    float lost = 0.0f, squares = 0.0f;
    for (u32 c = threadIdx.x * V; c < a.cols; c += 256 * V) {
        float x[V];
        u32 code[V];
        load(x, row_of<const T>(a.x, r) + c);
#pragma unroll
        for (int i = 0; i < V; i++) {
            float value = scale == 0.0f ? 0.0f : x[i] / scale;
            code[i] = float_to_e4m3(value);
            float error = value - e4m3_to_float(code[i]);
            lost += error * error;
            squares += value * value;
        }
        store_codes(codes + c, code);
    }
    lost = block_sum(lost);
    squares = block_sum(squares);
    if (threadIdx.x == 0) reinterpret_cast<float2*>(a.errors)[r] = make_float2(lost, squares);
}

extern "C" __global__ void __launch_bounds__(256) quantise_fp8_bf16_v8(QuantiseArgs a) {
    quantise_row<bf16, 8>(a);
}
extern "C" __global__ void __launch_bounds__(256) quantise_fp8_bf16_v1(QuantiseArgs a) {
    quantise_row<bf16, 1>(a);
}
extern "C" __global__ void __launch_bounds__(256) quantise_fp8_f32_v8(QuantiseArgs a) {
    quantise_row<float, 8>(a);
}
extern "C" __global__ void __launch_bounds__(256) quantise_fp8_f32_v1(QuantiseArgs a) {
    quantise_row<float, 1>(a);
}
