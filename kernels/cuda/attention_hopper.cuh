// Pieces of attention by warpgroup products (wgmma) of Hopper, put after hopper.cuh before the
// sources that use them: products, copies by TMA, the running softmax, the forward loop of a
// warpgroup over tiles of keys, and how results are written. Empty for other architectures.

#if __CUDA_ARCH__ == 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Queries of a block, and keys of a tile of the forward loop.
#define ROWS 128
// Bytes of [ROWS, 64] values: the unit of the 128-byte swizzle.
#define BLOCK_BYTES (ROWS * 128)
// One arrival a warp that computes.
#define CONSUMER_WARPS 8
#define CONSUMERS (CONSUMER_WARPS * 32)
#define LOG2E 1.4426950408889634f

// Makes ordinary writes to shared memory visible to the tensor cores.
__device__ __forceinline__ void fence_for_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// What the copy engine knows of a tensor [rows, heads, width], made by the driver.
struct alignas(64) TensorMap {
    u64 words[16];
};

// Announces bytes that copies will bring, and arrives.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Starts to copy COUNT rows of one head, from `row` on, in blocks of 64 columns. Rows behind the
// tensor become zeros; those of the next document are copied, and hidden by whoever uses them.
template <int WIDTH, int COUNT>
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap& map, u32 barrier, u32 head,
                                          i64 row) {
#pragma unroll
    for (int block = 0; block < WIDTH / 64; block++)
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
            "[%1, {%3, %4, %5}], [%2];" ::"r"(to + block * COUNT * 128),
            "l"(&map), "r"(barrier), "r"(block * 64), "r"(head), "r"((i32)row)
            : "memory");
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Matrix descriptors for the 128-byte swizzle: groups of eight 128-byte rows 1024 bytes apart,
// blocks of 64 columns BLOCK bytes apart. The low word is made the same for all lanes in a way the
// compiler sees, so that steps within a tile are additions to uniform registers.
template <int BLOCK>
__device__ __forceinline__ u32 low_word(u32 address) {
    return __shfl_sync(FULL_WARP, (address >> 4 & 0x3fff) | BLOCK >> 4 << 16, 0);
}
__device__ __forceinline__ u64 descriptor(u32 low, int offset) {
    return (u64)(1u << 30 | 1024 >> 4) << 32 | (low + (offset >> 4));
}

#define NAMES16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES32 \
    NAMES16     \
    ", "        \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES64                                                                      \
    NAMES32                                                                          \
    ", "                                                                             \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
    ", "                                                                             \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define EIGHT(sign, i)                                                                          \
    sign(d[i]), sign(d[i + 1]), sign(d[i + 2]), sign(d[i + 3]), sign(d[i + 4]), sign(d[i + 5]), \
        sign(d[i + 6]), sign(d[i + 7])
#define CHANGED(x) "+f"(x)
#define WRITTEN(x) "=f"(x)
#define LIST16(sign) EIGHT(sign, 0), EIGHT(sign, 8)
#define LIST32(sign) LIST16(sign), EIGHT(sign, 16), EIGHT(sign, 24)
#define LIST64(sign) \
    LIST32(sign), EIGHT(sign, 32), EIGHT(sign, 40), EIGHT(sign, 48), EIGHT(sign, 56)

// d = a b^T for the first step, d += a b^T for the others: a [64, 16] and b [n, 16] in shared
// memory, both with k along rows. The first does not read d: whatever else made those registers
// would have to wait for all products under way.
#define MAKE_SHARED(n, count, a_name, b_name)                                                      \
    __device__ __forceinline__ void multiply_shared(float (&d)[count], u64 a, u64 b, bool first) { \
        if (first)                                                                                 \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" NAMES##count \
                         "}, " a_name ", " b_name ", 0, 1, 1, 0, 0;\n"                             \
                         : LIST##count(WRITTEN)                                                    \
                         : "l"(a), "l"(b));                                                        \
        else                                                                                       \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" NAMES##count \
                         "}, " a_name ", " b_name ", 1, 1, 1, 0, 0;\n"                             \
                         : LIST##count(CHANGED)                                                    \
                         : "l"(a), "l"(b));                                                        \
    }
MAKE_SHARED(32, 16, "%16", "%17")
MAKE_SHARED(64, 32, "%32", "%33")
MAKE_SHARED(128, 64, "%64", "%65")

// d += a b: a [64, 16] in registers, b [16, n] in shared memory, n along rows.
#define MAKE_REGISTERS(n, count, a_names, b_name)                                              \
    __device__ __forceinline__ void multiply_registers(float (&d)[count], const u32(&a)[4],    \
                                                       u64 b) {                                \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" NAMES##count \
                     "}, {" a_names "}, " b_name ", 1, 1, 1, 1;\n"                             \
                     : LIST##count(CHANGED)                                                    \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                    \
    }
MAKE_REGISTERS(64, 32, "%32, %33, %34, %35", "%36")
MAKE_REGISTERS(128, 64, "%64, %65, %66, %67", "%68")

// Addresses of everything in shared memory.
template <int QK, int V>
struct Memory {
    static constexpr u32 K_BYTES = QK / 64 * BLOCK_BYTES, V_BYTES = V / 64 * BLOCK_BYTES;
    u32 base;
    __device__ u32 q() const { return base; }
    __device__ u32 k(u32 stage) const { return base + K_BYTES * (1 + stage); }
    __device__ u32 v(u32 stage) const { return base + K_BYTES * 3 + V_BYTES * stage; }
    __device__ u32 barriers() const { return base + K_BYTES * 3 + V_BYTES * 2; }
    __device__ u32 q_full() const { return barriers(); }
    __device__ u32 k_full(u32 stage) const { return barriers() + 8 + 8 * stage; }
    __device__ u32 v_full(u32 stage) const { return barriers() + 24 + 8 * stage; }
    __device__ u32 k_empty(u32 stage) const { return barriers() + 40 + 8 * stage; }
    __device__ u32 v_empty(u32 stage) const { return barriers() + 56 + 8 * stage; }
    __device__ u32 q_empty() const { return barriers() + 72; }
    __device__ u32 item() const { return barriers() + 80; }
    __device__ u32 item_full() const { return barriers() + 112; }
};

// How many tiles and items went through a block's stages.
struct Pace {
    u32 tiles, items;
};

// What a block works on next, as its copying warp tells the others; STOP tiles for the end.
struct Item {
    // First row, end of the document's rows, first key of the document.
    u32 first, end, k_start;
    u32 head, tiles;
    // Tiles of one head of a group.
    u32 each;
};
#define STOP NONE

__device__ __forceinline__ void put_item(u32 to, u32 full, const Item& item) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(item.first),
                 "r"(item.end), "r"(item.k_start), "r"(item.head)
                 : "memory");
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to + 16), "r"(item.tiles), "r"(item.each)
                 : "memory");
    barrier_arrive(full);
}
__device__ __forceinline__ Item take_item(u32 from) {
    Item item;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(item.first), "=r"(item.end), "=r"(item.k_start), "=r"(item.head)
                 : "r"(from)
                 : "memory");
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(item.tiles), "=r"(item.each)
                 : "r"(from + 16)
                 : "memory");
    return item;
}

// Goes over a block's share of all (document, head, rows), two at a time: as much as the one
// precedes the middle of its document the other follows it, so that all pairs are equal work.
struct Walk {
    u32 documents, heads, blocks;
    u32 document, head, block;
    u32 pair, second;

    __device__ Walk(u32 documents, u32 heads, u32 blocks)
        : documents(documents), heads(heads), blocks(blocks), pair(blockIdx.x), second(0) {}

    __device__ bool next() {
        u32 pairs = (blocks + 1) / 2;
        while (pair < documents * heads * pairs) {
            u32 place = pair % pairs, rest = pair / pairs;
            head = rest % heads;
            document = rest / heads;
            block = second ? blocks - 1 - place : place;
            bool middle = second && block == place;
            if (second) pair += gridDim.x;
            second ^= 1;
            if (!middle) return true;
        }
        return false;
    }
};

// Which of STAGES stages is next, and the parity of its phase.
template <u32 STAGES>
struct Ring {
    u32 stage, parity;
    __device__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Hides from two rows of a thread the keys from `ends` on: columns of `s`, of which the first is
// key `first_key`.
__device__ __forceinline__ void mask(float (&s)[64], i32 first_key, const i32 (&ends)[2]) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 64; i++) {
        i32 key = first_key + i / 4 * 8 + (i32)(lane % 4) * 2 + i % 2;
        if (key >= ends[i / 2 % 2]) s[i] = -INFINITY_F;
    }
}

// Running softmax of the two rows that a thread holds parts of.
struct Softmax {
    float most[2], sum[2], shrink[2];
};

// Turns scores into weights, 2^((score - most) * scale); `shrink` is what earlier sums are to be
// multiplied by.
__device__ __forceinline__ void soften(float (&s)[64], Softmax& soft, float scale) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = soft.most[half];
#pragma unroll
        for (int i = 0; i < 16; i++)
            most = fmaxf(most, fmaxf(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]));
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2));
        // A row that has seen no key yet keeps minus infinity; its weights must not be NaN.
        float origin = most == -INFINITY_F ? 0.0f : most * scale;
        soft.shrink[half] = exp2_fast(soft.most[half] * scale - origin);
        soft.most[half] = most;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float& x = s[4 * i + 2 * half];
            float& y = s[4 * i + 2 * half + 1];
            x = exp2_fast(x * scale - origin);
            y = exp2_fast(y * scale - origin);
            sum += x + y;
        }
        soft.sum[half] = soft.sum[half] * soft.shrink[half] + sum;
    }
}

// Weights as the left operand of the next product.
__device__ __forceinline__ void pack(u32 (&p)[8][4], const float (&s)[64]) {
#pragma unroll
    for (int step = 0; step < 8; step++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            p[step][i] = pack_bf16(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
}

// d = a b^T: a [64, WIDTH] of tiles of A_ROWS rows, b [n, WIDTH] of tiles of B_ROWS rows.
template <int WIDTH, int A_ROWS, int B_ROWS, int N>
__device__ __forceinline__ void multiply_rows(float (&d)[N], u32 a, u32 b) {
    u32 a_low = low_word<A_ROWS * 128>(a), b_low = low_word<B_ROWS * 128>(b);
#pragma unroll
    for (int step = 0; step < WIDTH / 16; step++) {
        int inside = step % 4 * 32, block = step / 4 * 128;
        multiply_shared(d, descriptor(a_low, block * A_ROWS + inside),
                        descriptor(b_low, block * B_ROWS + inside), step == 0);
    }
}

// d [64, WIDTH] += a [64, 16 * STEPS] b [16 * STEPS, WIDTH]: b of a tile of B_ROWS rows.
template <int WIDTH, int B_ROWS, int STEPS>
__device__ __forceinline__ void multiply_columns(float (&d)[WIDTH / 2], const u32 (&a)[STEPS][4],
                                                 u32 b) {
    constexpr int BLOCK = B_ROWS * 128;
    u32 low = low_word<BLOCK>(b);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        if constexpr (WIDTH == 128) {
            multiply_registers(d, a[step], descriptor(low, step * 2048));
        } else {
#pragma unroll
            for (int part = 0; part < WIDTH / 64; part++)
                multiply_registers(reinterpret_cast<float (&)[32]>(d[part * 32]), a[step],
                                   descriptor(low, part * BLOCK + step * 2048));
        }
    }
}

// What the forward loop has: weighted sums of values, not yet divided, of 64 queries.
template <int V>
struct Mixed {
    float o[V / 2];
    Softmax soft;
};

// Attention of 64 queries to `tiles` tiles of keys, all 128 threads of warpgroup `group` = 0 or 1.
// A thread's two rows see the keys before `ends`, all rows of its warp those before `least`.
template <int QK, int V>
__device__ __forceinline__ void mix(Mixed<V>& mixed, Memory<QK, V> memory, u32 group, i32 tiles,
                                    const i32 (&ends)[2], i32 least, float scale, Pace& pace) {
    scale *= LOG2E;
    u32 q = memory.q() + group * 64 * 128;
    float s[64];
    u32 p[8][4];
    Softmax& soft = mixed.soft;
    soft = {{-INFINITY_F, -INFINITY_F}, {0.0f, 0.0f}, {1.0f, 1.0f}};
#pragma unroll
    for (int i = 0; i < V / 2; i++) mixed.o[i] = 0.0f;
    u32 at = pace.tiles;
    pace.tiles += (u32)tiles;
    barrier_wait(memory.q_full(), pace.items++ & 1);
    if (tiles > 0) {
        barrier_wait(memory.k_full(at & 1), at >> 1 & 1);
        products_begin();
        multiply_rows<QK, ROWS, ROWS>(s, q, memory.k(at & 1));
        products_commit();
        products_wait<0>();
        pin(s);
        release(memory.k_empty(at & 1));
        if (ROWS > least) mask(s, 0, ends);
        soften(s, soft, scale);
        pack(p, s);
    }
    for (i32 tile = 1; tile < tiles; tile++, at++) {
        u32 stage = at & 1, next = stage ^ 1;
        barrier_wait(memory.k_full(next), (at + 1) >> 1 & 1);
        products_begin();
        multiply_rows<QK, ROWS, ROWS>(s, q, memory.k(next));
        products_commit();
        barrier_wait(memory.v_full(stage), at >> 1 & 1);
        multiply_columns<V, ROWS>(mixed.o, p, memory.v(stage));
        products_commit();
        products_wait<1>();
        release(memory.k_empty(next));
        if (tile * ROWS + ROWS > least) mask(s, tile * ROWS, ends);
        soften(s, soft, scale);
        products_wait<0>();
        release(memory.v_empty(stage));
#pragma unroll
        for (int i = 0; i < V / 2; i++) mixed.o[i] *= soft.shrink[i / 2 % 2];
        pack(p, s);
    }
    // Every thread has read what the item is, so every thread gives it back.
    barrier_arrive(memory.q_empty());
    if (tiles > 0) {
        barrier_wait(memory.v_full(at & 1), at >> 1 & 1);
        products_begin();
        multiply_columns<V, ROWS>(mixed.o, p, memory.v(at & 1));
        products_commit();
        products_wait<0>();
        pin(mixed.o);
        release(memory.v_empty(at & 1));
    }
}

// Exchanges four words of each of four neighbouring lanes: word n of lane j becomes word j of lane
// n.
__device__ __forceinline__ void transpose(u32 (&x)[4]) {
    bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        u32 other = __shfl_xor_sync(FULL_WARP, odd ? x[i] : x[i + 1], 1);
        if (odd)
            x[i] = other;
        else
            x[i + 1] = other;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 other = __shfl_xor_sync(FULL_WARP, high ? x[i] : x[i + 2], 2);
        if (high)
            x[i] = other;
        else
            x[i + 2] = other;
    }
}

// Writes c [64, WIDTH] of a warpgroup, times `factors` of a thread's two rows, to rows of one head,
// or adds it to what is there. Row 0 of the warp is `first`, none is from `end` on.
template <int WIDTH>
__device__ __forceinline__ void write_rows(Heads to, u32 head, i64 first, i64 end,
                                           const float (&c)[WIDTH / 2], const float (&factors)[2],
                                           bool add) {
    // Sixteen bytes a lane: columns 8 lane .. 8 lane + 7 of each 32.
    i64 row = first + threadIdx.x % 32 / 4;
    bf16* start = reinterpret_cast<bf16*>(to.address) + row * to.row_stride +
                  head * to.head_stride + threadIdx.x % 4 * 8;
    uint4 old[2][WIDTH / 32];
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < WIDTH / 32; n++)
            old[half][n] =
                add && row + 8 * half < end
                    ? *reinterpret_cast<const uint4*>(start + to.row_stride * 8 * half + n * 32)
                    : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int n = 0; n < WIDTH / 32; n++) {
            u32 x[4] = {old[half][n].x, old[half][n].y, old[half][n].z, old[half][n].w};
            if (add) transpose(x);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int at = 4 * (4 * n + i) + 2 * half;
                x[i] = pack_bf16(c[at] * factors[half] + __uint_as_float(x[i] << 16),
                                 c[at + 1] * factors[half] + __uint_as_float(x[i] & 0xffff0000u));
            }
            transpose(x);
            if (row + 8 * half < end)
                *reinterpret_cast<uint4*>(start + to.row_stride * 8 * half + n * 32) =
                    make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}

// Divides and writes; row 0 of the warp is query `first`, none is from `end` on. `lse` is row-major
// [queries, heads], or null.
template <int V>
__device__ __forceinline__ void write_mixed(const Mixed<V>& mixed, Heads out, u32 head, i64 first,
                                            i64 end, float* lse, u32 heads, float scale) {
    u32 lane = threadIdx.x % 32;
    float factors[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = mixed.soft.sum[half];
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        factors[half] = sum == 0.0f ? 0.0f : 1.0f / sum;
        i64 row = first + (i32)(lane / 4) + half * 8;
        if (lse && row < end && lane % 4 == 0)
            lse[row * heads + head] = mixed.soft.most[half] * scale + logf(sum);
    }
    write_rows<V>(out, head, first, end, mixed.o, factors, false);
}

// Values as the left operand of the next product.
template <int N>
__device__ __forceinline__ void pack_columns(u32 (&p)[N / 8][4], const float (&s)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) p[i / 4][i % 4] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

#endif
