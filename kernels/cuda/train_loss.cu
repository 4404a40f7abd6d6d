// Teacher and loss over blocks of the vocabulary: f32 logits come from products, softmaxes are in
// f32. Twin: trainer's ops::cpu::distill.

struct ScanArgs {
    Mat logits;
    u64 most, total, top;
    u32 rows, cols, first;
};

struct PickArgs {
    Mat out, logits;
    u64 ids;
    // Draft tokens `begin .. begin + count` lie in this block of the vocabulary.
    u32 rows, begin, count, first;
};

struct ShareArgs {
    Mat teacher;
    u64 lse;
    u32 rows, cols;
};

struct CompareArgs {
    Mat logits, gradient, teacher, outcomes;
    // By state: log of the softmaxes' denominators over the draft's and the whole vocabulary.
    u64 draft_lse, most, total, top;
    u64 state_of_row, weights, ids;
    u32 rows, cols, first_state, keep;
    // 0: cross-entropy, 1: divergence, 2: divergence and overlap, weighted by exp(-eta overlap).
    u32 loss;
    float eta;
};

struct WeightedArgs {
    u64 out, weights;
    Mat outcomes;
    u32 rows;
};

struct Best {
    float value;
    u32 place;
};

__device__ __forceinline__ Best better(Best a, Best b) {
    return b.value > a.value || (b.value == a.value && b.place < a.place) ? b : a;
}

// The first place of the largest value over a block, given to all threads.
__device__ __forceinline__ Best block_best(Best mine) {
    __shared__ Best parts[32];
#pragma unroll
    for (int step = 16; step > 0; step >>= 1)
        mine = better(mine, {__shfl_xor_sync(FULL_WARP, mine.value, step),
                             __shfl_xor_sync(FULL_WARP, mine.place, step)});
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();
    if (lane == 0) parts[warp] = mine;
    __syncthreads();
    mine = lane < blockDim.x / 32 ? parts[lane] : Best{-INFINITY_F, NONE};
#pragma unroll
    for (int step = 16; step > 0; step >>= 1)
        mine = better(mine, {__shfl_xor_sync(FULL_WARP, mine.value, step),
                             __shfl_xor_sync(FULL_WARP, mine.place, step)});
    return mine;
}

// Two instructions, right to about 2^-21: a row has tens of thousands of them.
__device__ __forceinline__ float exponential(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
}

// Largest value of a row, and the sum of exponentials relative to it.
struct Peak {
    Best best;
    float total;

    // One pass with a running peak, as a row is long. A new peak is rare.
    template <int V>
    __device__ __forceinline__ void take(const float (&x)[V], u32 first) {
        float most = x[0];
#pragma unroll
        for (int i = 1; i < V; i++) most = fmaxf(most, x[i]);
        if (best.place == NONE || most > best.value) {
            total *= exponential(best.value - most);
#pragma unroll
            for (int i = V; i-- > 0;)
                if (x[i] == most) best = {most, first + i};
        }
#pragma unroll
        for (int i = 0; i < V; i++) total += exponential(x[i] - best.value);
    }

    // Over a block, given to all threads.
    __device__ __forceinline__ Peak whole() const {
        Best most = block_best(best);
        float part = best.place == NONE ? 0.0f : total * expf(best.value - most.value);
        return {most, block_sum(part)};
    }
};

#define NOTHING {{-INFINITY_F, NONE}, 0.0f}

template <int V>
__device__ __forceinline__ Peak row_peak(const float* row, u32 cols) {
    Peak peak = NOTHING;
    for (u32 c = threadIdx.x * V; c < cols; c += blockDim.x * V) {
        float x[V];
        load(x, row + c);
        peak.take(x, c);
    }
    return peak.whole();
}

// Takes a block of the vocabulary, from token `first`, into the running softmax of each row.
template <int V>
__device__ __forceinline__ void scan(const ScanArgs& a) {
    i64 r = blockIdx.x;
    Peak here = row_peak<V>(row_of<const float>(a.logits, r), a.cols);
    if (threadIdx.x) return;
    float* most = reinterpret_cast<float*>(a.most) + r;
    float* total = reinterpret_cast<float*>(a.total) + r;
    float before = a.first ? *most : -INFINITY_F, old = a.first ? *total : 0.0f;
    float peak = fmaxf(before, here.best.value);
    *total = (old == 0.0f ? 0.0f : old * expf(before - peak)) +
             here.total * expf(here.best.value - peak);
    *most = peak;
    if (here.best.value > before || !a.first)
        reinterpret_cast<u32*>(a.top)[r] = a.first + here.best.place;
}

// Copies the logits of the draft's tokens out of a block of the vocabulary.
extern "C" __global__ void train_pick(PickArgs a) {
    const u32* ids = reinterpret_cast<const u32*>(a.ids) + a.begin;
    const float* from = row_of<const float>(a.logits, blockIdx.x);
    float* to = row_of<float>(a.out, blockIdx.x) + a.begin;
    for (u32 c = threadIdx.x; c < a.count; c += blockDim.x) to[c] = from[ids[c] - a.first];
}

// Logarithm of the sum of exponentials of each row.
template <int V>
__device__ __forceinline__ void log_sum(const ShareArgs& a) {
    Peak peak = row_peak<V>(row_of<const float>(a.teacher, blockIdx.x), a.cols);
    if (threadIdx.x == 0)
        reinterpret_cast<float*>(a.lse)[blockIdx.x] = peak.best.value + logf(peak.total);
}

// Loss, overlap and rightness of each row, and the gradient of its weighted loss. The draft's row
// is kept in shared memory where it fits, so that it is read once.
template <typename T, int V>
__device__ __forceinline__ void compare(const CompareArgs& a) {
    extern __shared__ __align__(16) float kept[];
    i64 r = blockIdx.x;
    u32 state = reinterpret_cast<const u32*>(a.state_of_row)[r] - a.first_state;
    const float* z = row_of<const float>(a.logits, r);
    const float* t = row_of<const float>(a.teacher, state);
    float draft_lse = reinterpret_cast<const float*>(a.draft_lse)[state];
    // Of the teacher's whole distribution the share that draft tokens have.
    float seen = expf(draft_lse - reinterpret_cast<const float*>(a.most)[state]) /
                 reinterpret_cast<const float*>(a.total)[state];
    float weight = reinterpret_cast<const float*>(a.weights)[r];
    Peak peak = NOTHING;
    float expected = 0.0f, entropy = 0.0f;
    for (u32 c = threadIdx.x * V; c < a.cols; c += blockDim.x * V) {
        float x[V], y[V];
        load(x, z + c);
        load(y, t + c);
        if (a.keep) store(kept + c, x);
        peak.take(x, c);
#pragma unroll
        for (int i = 0; i < V; i++) {
            float p = exponential(y[i] - draft_lse);
            expected += p * x[i];
            if (a.loss) entropy -= p > 0.0f ? p * (y[i] - draft_lse) : 0.0f;
        }
    }
    peak = peak.whole();
    expected = block_sum(expected);
    float lse = peak.best.value + logf(peak.total), overlap = 0.0f, share = 0.0f, along = 1.0f;
    if (a.loss) entropy = block_sum(entropy);
    const float* draft = a.keep ? kept : z;
    if (a.loss == 2) {
        // The gradient needs the overlap, and what the draft gives to tokens it gives too little.
        for (u32 c = threadIdx.x * V; c < a.cols; c += blockDim.x * V) {
            float x[V], y[V];
            load(x, draft + c);
            load(y, t + c);
#pragma unroll
            for (int i = 0; i < V; i++) {
                float q = exponential(x[i] - lse), p = exponential(y[i] - draft_lse) * seen;
                overlap += fminf(p, q);
                share += q < p ? q : 0.0f;
            }
        }
        overlap = block_sum(overlap);
        share = block_sum(share);
        along = expf(-a.eta * overlap);
    }
    float sum = 0.0f;
    for (u32 c = threadIdx.x * V; c < a.cols; c += blockDim.x * V) {
        float x[V], y[V];
        load(x, draft + c);
        load(y, t + c);
#pragma unroll
        for (int i = 0; i < V; i++) {
            float q = exponential(x[i] - lse), p = exponential(y[i] - draft_lse);
            sum += fminf(p * seen, q);
            x[i] = q - p;
            if (a.loss == 2) {
                float missed = q * (share - (q < p * seen ? 1.0f : 0.0f));
                x[i] = along * x[i] + (1.0f - along) * missed;
            }
            x[i] *= weight;
        }
        if (a.gradient.address) store(row_of<T>(a.gradient, r) + c, x);
    }
    if (a.loss != 2) overlap = block_sum(sum);
    if (threadIdx.x) return;
    float* outcome = row_of<float>(a.outcomes, r);
    float cross = lse - expected, divergence = cross - entropy;
    outcome[0] = a.loss == 0   ? cross
                 : a.loss == 1 ? divergence
                               : along * divergence + (1.0f - along) * (1.0f - overlap);
    outcome[1] = overlap;
    u32 place = peak.best.place;
    u32 guess = place == NONE ? NONE : reinterpret_cast<const u32*>(a.ids)[place];
    outcome[2] = guess == reinterpret_cast<const u32*>(a.top)[state] ? 1.0f : 0.0f;
}

// Sum of the rows' weighted losses, by one block in a fixed order.
extern "C" __global__ void train_weighted_loss(WeightedArgs a) {
    float sum = 0.0f;
    for (u32 r = threadIdx.x; r < a.rows; r += blockDim.x)
        sum += row_of<const float>(a.outcomes, r)[0] * reinterpret_cast<const float*>(a.weights)[r];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *reinterpret_cast<float*>(a.out) = sum;
}

extern "C" __global__ void train_scan_v8(ScanArgs a) { scan<8>(a); }
extern "C" __global__ void train_scan_v1(ScanArgs a) { scan<1>(a); }
extern "C" __global__ void train_log_sum_v8(ShareArgs a) { log_sum<8>(a); }
extern "C" __global__ void train_log_sum_v1(ShareArgs a) { log_sum<1>(a); }
extern "C" __global__ void __launch_bounds__(1024) train_compare_bf16_v8(CompareArgs a) {
    compare<bf16, 8>(a);
}
extern "C" __global__ void __launch_bounds__(1024) train_compare_bf16_v1(CompareArgs a) {
    compare<bf16, 1>(a);
}
extern "C" __global__ void __launch_bounds__(1024) train_compare_f32_v8(CompareArgs a) {
    compare<float, 8>(a);
}
extern "C" __global__ void __launch_bounds__(1024) train_compare_f32_v1(CompareArgs a) {
    compare<float, 1>(a);
}
