// Mixture of experts: the choice of experts, grouping rows by expert, gathering, weighted sums.
// Twins: router, reference::moe. Nothing here depends on the order in which blocks run.

struct RouteArgs {
    Mat logits;
    u64 bias, indices, weights, margins;
    u32 rows, experts, top_k, groups, kept_groups, normalise, softmax;
    float scale;
};

struct PermuteArgs {
    u64 indices, counts, offsets, sources, places, scratch;
    u32 choices, top_k, first, held, chunks, align;
};

struct GatherArgs {
    Mat out, x;
    u64 sources;
    u32 rows, cols, x_rows;
};

struct GatherPanelsArgs {
    u64 out;
    Mat x;
    u64 sources, end;
    u32 cols, x_rows, panel_rows;
};

struct CombineArgs {
    Mat out, x;
    u64 places, weights;
    u32 rows, cols, top_k, x_rows;
};

struct Best {
    float score;
    u32 index;
};

// The larger score, of equal ones that of the lower index; NONE loses to everything.
__device__ __forceinline__ Best better(Best a, Best b) {
    if (a.index == NONE) return b;
    if (b.index == NONE) return a;
    if (b.score > a.score || (b.score == a.score && b.index < a.index)) return b;
    return a;
}

__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        Best other;
        other.score = __shfl_xor_sync(FULL_WARP, best.score, step);
        other.index = __shfl_xor_sync(FULL_WARP, best.index, step);
        best = better(best, other);
    }
    return best;
}

// The best of the experts that are still open. NaN counts as minus infinity; `taken` marks closed
// ones.
__device__ __forceinline__ Best best_open(const float* selection, const float* scores,
                                          u32 experts) {
    u32 lane = threadIdx.x % 32;
    Best best = {0.0f, NONE};
    for (u32 e = lane; e < experts; e += 32) {
        // A closed expert has a negative score; those of sigmoid never are.
        if (scores[e] < 0.0f) continue;
        float s = selection[e];
        Best candidate = {s == s ? s : -INFINITY_F, e};
        best = better(best, candidate);
    }
    return warp_best(best);
}

// Leaves open only the experts of the groups with the largest sums of their two best.
__device__ __forceinline__ void close_groups(const RouteArgs& a, const float* selection,
                                             float* scores) {
    u32 lane = threadIdx.x % 32, size = a.experts / a.groups;
    Best mine = {0.0f, NONE};
    if (lane < a.groups) {
        float first = -INFINITY_F, second = -INFINITY_F;
        for (u32 e = lane * size; e < (lane + 1) * size; e++) {
            float s = selection[e];
            if (s > first) {
                second = first;
                first = s;
            } else if (s > second) {
                second = s;
            }
        }
        float sum = size > 1 ? first + second : first;
        mine.score = sum == sum ? sum : -INFINITY_F;
        mine.index = lane;
    }
    u32 kept = 0;
    for (u32 k = 0; k < a.kept_groups; k++) {
        Best best = warp_best(mine);
        kept |= 1u << best.index;
        if (lane == best.index) mine.index = NONE;
    }
    for (u32 e = lane; e < a.experts; e += 32)
        if (!(kept >> (e / size) & 1)) scores[e] = -1.0f;
    __syncwarp();
}

// What makes scores of a row's logits: the sigmoid of each, or its share of all.
struct Scores {
    bool softmax;
    float most, sum;

    __device__ __forceinline__ float of(float logit) const {
        if (softmax) return expf(logit - most) / sum;
        return 1.0f / (1.0f + expf(-logit));
    }
};

__device__ __forceinline__ Scores scores_of(const RouteArgs& a, const float* logits) {
    Scores scores = {a.softmax != 0, -INFINITY_F, 0.0f};
    if (!scores.softmax) return scores;
    u32 lane = threadIdx.x % 32;
    for (u32 e = lane; e < a.experts; e += 32) scores.most = fmaxf(scores.most, logits[e]);
    scores.most = warp_max(scores.most);
    for (u32 e = lane; e < a.experts; e += 32) scores.sum += expf(logits[e] - scores.most);
    scores.sum = warp_sum(scores.sum);
    return scores;
}

// A warp for each row.
extern "C" __global__ void __launch_bounds__(128) route_top_k(RouteArgs a) {
    extern __shared__ float memory[];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    i64 r = (i64)blockIdx.x * 4 + warp;
    if (r >= a.rows) return;
    float* selection = memory + warp * 2 * a.experts;
    float* scores = selection + a.experts;
    const float* logits = row_of<const float>(a.logits, r);
    const float* bias = reinterpret_cast<const float*>(a.bias);
    Scores rule = scores_of(a, logits);
    for (u32 e = lane; e < a.experts; e += 32) {
        float s = rule.of(logits[e]);
        scores[e] = s;
        selection[e] = s + bias[e];
    }
    __syncwarp();
    if (a.kept_groups < a.groups) close_groups(a, selection, scores);
    float last = INFINITY_F, sum = 0.0f;
    u32* indices = reinterpret_cast<u32*>(a.indices) + r * a.top_k;
    float* weights = reinterpret_cast<float*>(a.weights) + r * a.top_k;
    for (u32 k = 0; k < a.top_k; k++) {
        Best best = best_open(selection, scores, a.experts);
        if (best.index >= a.experts) best.index = 0;
        float weight = scores[best.index];
        last = selection[best.index];
        sum += weight;
        __syncwarp();
        if (lane == 0) {
            indices[k] = best.index;
            weights[k] = weight;
            scores[best.index] = -1.0f;
        }
        __syncwarp();
    }
    Best rejected = best_open(selection, scores, a.experts);
    if (lane == 0) {
        float next = rejected.index == NONE ? -INFINITY_F : rejected.score;
        reinterpret_cast<float*>(a.margins)[r] = last - next;
        float divisor = a.normalise ? sum + 1e-20f : 1.0f;
        for (u32 k = 0; k < a.top_k; k++) weights[k] = weights[k] / divisor * a.scale;
    }
}

// The larger the number, the larger the key; NaN counts as minus infinity, no key is 0.
__device__ __forceinline__ u32 sort_key(float x) {
    // Minus zero becomes zero, which it equals.
    u32 bits = __float_as_uint(x == x ? x + 0.0f : -INFINITY_F);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ u32 warp_max(u32 x) {
    u32 y;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}
__device__ __forceinline__ u32 warp_min(u32 x) {
    u32 y;
    asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}

// Experts of a lane that are chosen from in registers.
#define OWN 12

// Number of the expert with the largest of a warp's keys, of equal ones the lowest; it is taken.
__device__ __forceinline__ u32 take_best(u32 (&keys)[OWN], u32& key, u32& own) {
    u32 lane = threadIdx.x % 32, best = warp_max(key);
    u32 expert = warp_min(key == best && best ? own * 32 + lane : NONE);
    if (expert % 32 != lane || expert == NONE) return expert;
    u32 taken = own;
    key = 0;
#pragma unroll
    for (u32 i = 0; i < OWN; i++) {
        if (i == taken) keys[i] = 0;
        if (keys[i] > key) {
            key = keys[i];
            own = i;
        }
    }
    return expert;
}

// The same as route_top_k for one group of at most 32 OWN experts, of which at most 32 are chosen.
extern "C" __global__ void __launch_bounds__(128) route_top_k_few(RouteArgs a) {
    __shared__ float memory[4][32 * OWN];
    u32 lane = threadIdx.x % 32;
    i64 r = (i64)blockIdx.x * 4 + threadIdx.x / 32;
    if (r >= a.rows) return;
    float* scores = memory[threadIdx.x / 32];
    const float* logits = row_of<const float>(a.logits, r);
    const float* bias = reinterpret_cast<const float*>(a.bias);
    Scores rule = scores_of(a, logits);
    u32 keys[OWN], key = 0, own = 0;
#pragma unroll
    for (u32 i = 0; i < OWN; i++) {
        u32 e = i * 32 + lane;
        keys[i] = 0;
        if (e < a.experts) {
            float s = rule.of(logits[e]);
            scores[e] = s;
            keys[i] = sort_key(s + bias[e]);
        }
        if (keys[i] > key) {
            key = keys[i];
            own = i;
        }
    }
    __syncwarp();
    float sum = 0.0f, weight = 0.0f, last = 0.0f;
    u32 index = 0;
    for (u32 k = 0; k < a.top_k; k++) {
        u32 best = take_best(keys, key, own);
        float score = scores[best];
        sum += score;
        if (lane == k) {
            weight = score;
            index = best;
        }
        if (k + 1 == a.top_k) last = score + bias[best];
    }
    u32 rejected = take_best(keys, key, own);
    float next = -INFINITY_F;
    if (rejected != NONE) {
        float s = scores[rejected] + bias[rejected];
        if (s == s) next = s;
    }
    if (lane == 0) reinterpret_cast<float*>(a.margins)[r] = last - next;
    if (lane >= a.top_k) return;
    float divisor = a.normalise ? sum + 1e-20f : 1.0f;
    reinterpret_cast<u32*>(a.indices)[r * a.top_k + lane] = index;
    reinterpret_cast<float*>(a.weights)[r * a.top_k + lane] = weight / divisor * a.scale;
}

#define CHUNK 512

// Number of a choice's expert among those held, or NONE.
__device__ __forceinline__ u32 held_expert(const PermuteArgs& a, u32 choice) {
    if (choice >= a.choices) return NONE;
    u32 expert = reinterpret_cast<const u32*>(a.indices)[choice] - a.first;
    return expert < a.held ? expert : NONE;
}

// One warp goes through a chunk in order and calls `f(choice, expert, rank)`, where rank counts the
// earlier choices of the same expert in the chunk.
template <typename F>
__device__ __forceinline__ void for_chunk(const PermuteArgs& a, u32* counters, F f) {
    u32 lane = threadIdx.x;
    for (u32 e = lane; e < a.held; e += 32) counters[e] = 0;
    __syncwarp();
    for (u32 i = 0; i < CHUNK; i += 32) {
        u32 choice = blockIdx.x * CHUNK + i + lane;
        u32 expert = held_expert(a, choice);
        u32 same = __match_any_sync(FULL_WARP, expert);
        u32 before = __popc(same & ((1u << lane) - 1));
        u32 seen = expert == NONE ? 0 : counters[expert];
        __syncwarp();
        if (expert != NONE && before == 0) counters[expert] = seen + __popc(same);
        __syncwarp();
        f(choice, expert, seen + before);
    }
}

// scratch[e][chunk] = choices of expert e in the chunk.
extern "C" __global__ void __launch_bounds__(32) permute_count(PermuteArgs a) {
    extern __shared__ u32 counters[];
    for_chunk(a, counters, [](u32, u32, u32) {});
    u32* scratch = reinterpret_cast<u32*>(a.scratch);
    for (u32 e = threadIdx.x; e < a.held; e += 32)
        scratch[(u64)e * a.chunks + blockIdx.x] = counters[e];
}

// Turns the counts of an expert into the number of its choices in earlier chunks.
extern "C" __global__ void __launch_bounds__(256) permute_scan(PermuteArgs a) {
    __shared__ u32 sums[256];
    u32* counts = reinterpret_cast<u32*>(a.scratch) + (u64)blockIdx.x * a.chunks;
    u32 total = 0;
    for (u32 start = 0; start < a.chunks; start += 256) {
        u32 chunk = start + threadIdx.x;
        u32 mine = chunk < a.chunks ? counts[chunk] : 0;
        sums[threadIdx.x] = mine;
        __syncthreads();
        for (u32 step = 1; step < 256; step <<= 1) {
            u32 left = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
            __syncthreads();
            sums[threadIdx.x] += left;
            __syncthreads();
        }
        if (chunk < a.chunks) counts[chunk] = total + sums[threadIdx.x] - mine;
        total += sums[255];
        __syncthreads();
    }
    if (threadIdx.x == 0) reinterpret_cast<u32*>(a.counts)[blockIdx.x] = total;
}

// offsets = running sum of counts, each rounded up to a multiple of `align`; at most 1024 experts.
extern "C" __global__ void __launch_bounds__(1024) permute_offsets(PermuteArgs a) {
    __shared__ u32 sums[1024];
    const u32* counts = reinterpret_cast<const u32*>(a.counts);
    u32* offsets = reinterpret_cast<u32*>(a.offsets);
    u32 count = threadIdx.x < a.held ? counts[threadIdx.x] : 0;
    sums[threadIdx.x] = (count + a.align - 1) / a.align * a.align;
    __syncthreads();
    for (u32 step = 1; step < 1024; step <<= 1) {
        u32 left = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads();
        sums[threadIdx.x] += left;
        __syncthreads();
    }
    if (threadIdx.x == 0) offsets[0] = 0;
    if (threadIdx.x < a.held) offsets[threadIdx.x + 1] = sums[threadIdx.x];
}

extern "C" __global__ void __launch_bounds__(32) permute_place(PermuteArgs a) {
    extern __shared__ u32 counters[];
    const u32* scratch = reinterpret_cast<const u32*>(a.scratch);
    const u32* offsets = reinterpret_cast<const u32*>(a.offsets);
    u32* places = reinterpret_cast<u32*>(a.places);
    u32* sources = reinterpret_cast<u32*>(a.sources);
    for_chunk(a, counters, [&](u32 choice, u32 expert, u32 rank) {
        if (choice >= a.choices) return;
        u32 place = NONE;
        if (expert != NONE) {
            place = offsets[expert] + scratch[(u64)expert * a.chunks + blockIdx.x] + rank;
            sources[place] = choice / a.top_k;
        }
        places[choice] = place;
    });
}

template <typename T, typename U, int V>
__device__ __forceinline__ void gather(const GatherArgs& a) {
    i64 r = tile_row(), c = tile_col<V>();
    if (r >= a.rows || c >= a.cols) return;
    u32 source = reinterpret_cast<const u32*>(a.sources)[r];
    float x[V] = {};
    // A number outside the matrix gives zeros rather than a fault.
    if (source < a.x_rows) load(x, row_of<const T>(a.x, source) + c);
    store(row_of<U>(a.out, r) + c, x);
}

// Rows as the products of experts want them: panels of 64 columns, the sixteen-byte pieces of a row
// exchanged by its number modulo eight. 64 threads write eight rows of a panel, side by side.
extern "C" __global__ void __launch_bounds__(256) gather_panels(GatherPanelsArgs a) {
    u32 piece = threadIdx.x % 8, row = threadIdx.x / 8 % 8, end = *reinterpret_cast<u32*>(a.end);
    const u32* sources = reinterpret_cast<const u32*>(a.sources);
    for (u32 r = blockIdx.x * 8 + row; r < end; r += gridDim.x * 8) {
        u32 source = sources[r];
        // What lies between experts is read by nobody, but must not lead out of x.
        const uint4* from = reinterpret_cast<const uint4*>(
            row_of<const bf16>(a.x, source < a.x_rows ? source : 0) + piece * 8);
        uint4* to = reinterpret_cast<uint4*>(a.out) + (u64)r * 8 + (piece ^ row);
#pragma unroll 4
        for (u32 panel = threadIdx.x / 64; panel < a.cols / 64; panel += 4)
            to[(u64)panel * a.panel_rows * 8] = from[panel * 8];
    }
}

template <typename T, typename U, int V>
__device__ __forceinline__ void combine_rows(const CombineArgs& a) {
    i64 r = tile_row(), c = tile_col<V>();
    if (r >= a.rows || c >= a.cols) return;
    const u32* places = reinterpret_cast<const u32*>(a.places) + r * a.top_k;
    const float* weights = reinterpret_cast<const float*>(a.weights) + r * a.top_k;
    float sum[V];
    load(sum, row_of<const U>(a.out, r) + c);
    for (u32 k = 0; k < a.top_k; k++) {
        u32 place = places[k];
        if (place >= a.x_rows) continue;
        float weight = weights[k], x[V];
        load(x, row_of<const T>(a.x, place) + c);
#pragma unroll
        for (int i = 0; i < V; i++) sum[i] += weight * x[i];
    }
    store(row_of<U>(a.out, r) + c, sum);
}

#define MAKE_MOE(T, U)                                                        \
    extern "C" __global__ void KERNEL2(gather_rows, T, U, v8)(GatherArgs a) { \
        gather<T, U, 8>(a);                                                   \
    }                                                                         \
    extern "C" __global__ void KERNEL2(gather_rows, T, U, v1)(GatherArgs a) { \
        gather<T, U, 1>(a);                                                   \
    }                                                                         \
    extern "C" __global__ void KERNEL2(combine, T, U, v8)(CombineArgs a) {    \
        combine_rows<T, U, 8>(a);                                             \
    }                                                                         \
    extern "C" __global__ void KERNEL2(combine, T, U, v1)(CombineArgs a) {    \
        combine_rows<T, U, 1>(a);                                             \
    }

FOR_TYPE_PAIRS(MAKE_MOE)
