// Products of a layer's routed experts for Hopper (sm_90a): INT4 weights are decoded on the way
// into the tensor cores and never lie in memory as bf16. A block computes 128 outputs of up to 256
// rows, transposed: the weights are the left operand, in registers, the rows the right one, in
// shared memory. Two threads copy, two warpgroups decode and multiply 64 outputs each. Twins:
// experts. Empty for other architectures.
//
// Rows come in panels: [k / 64][rows][64], every 128 bytes swizzled as the tensor cores want them.
// Codes and scales come in the order of the registers that they are decoded into.

#if __CUDA_ARCH__ == 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct ExpertArgs {
    u64 out, x, codes, scales, offsets;
    // Values from a row of `out` to the next; of panels: rows.
    i64 out_stride;
    u32 x_rows, experts, m, k;
};

// Rows of an expert start at multiples of this.
#define ALIGN 32
#define MAX_EXPERTS 512
// Rows of a tile, at most.
#define MOST_ROWS 256
// A stage holds 64 inputs of the rows and of two blocks of 64 outputs.
#define STAGES 6
#define X_BYTES (MOST_ROWS * 128)
#define CODE_BYTES 2048
#define SCALE_BYTES 256
#define STAGE_BYTES (X_BYTES + 2 * (CODE_BYTES + SCALE_BYTES))
// One arrival a warp that multiplies.
#define CONSUMER_WARPS 8

// Arrives, and expects bytes of copies.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
// Starts to copy bytes, multiples of sixteen, that the barrier then counts.
__device__ __forceinline__ void copy_bulk(u32 to, const u8* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
// Matrix descriptor for the 128-byte swizzle: groups of eight 128-byte rows 1024 bytes apart.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return (u64)(address >> 4 & 0x3fff) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

#define FLOATS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FLOATS16(i) FLOATS4(i), FLOATS4(i + 4), FLOATS4(i + 8), FLOATS4(i + 12)
#define LIST0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define LIST1 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST2 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define LIST3 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LIST4 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define LIST5 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define LIST6 \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define LIST7                                                                                      \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
    "%127"
// d += a b^T: a [64, 16] in registers, b [N, 16] in shared memory, k along rows.
#define MAKE_MULTIPLY(N, LIST, A, ...)                                                         \
    __device__ __forceinline__ void multiply(float (&d)[N / 2], const u32* a, u64 b) {         \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" LIST "}, " A \
                     ", 1, 1, 1, 0;"                                                           \
                     : __VA_ARGS__                                                             \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                    \
    }
MAKE_MULTIPLY(128, LIST0 LIST1 LIST2 LIST3, "{%64, %65, %66, %67}, %68", FLOATS16(0), FLOATS16(16),
              FLOATS16(32), FLOATS16(48))
MAKE_MULTIPLY(192, LIST0 LIST1 LIST2 LIST3 LIST4 LIST5, "{%96, %97, %98, %99}, %100", FLOATS16(0),
              FLOATS16(16), FLOATS16(32), FLOATS16(48), FLOATS16(64), FLOATS16(80))
MAKE_MULTIPLY(224, LIST0 LIST1 LIST2 LIST3 LIST4 LIST5 LIST6, "{%112, %113, %114, %115}, %116",
              FLOATS16(0), FLOATS16(16), FLOATS16(32), FLOATS16(48), FLOATS16(64), FLOATS16(80),
              FLOATS16(96))
MAKE_MULTIPLY(256, LIST0 LIST1 LIST2 LIST3 LIST4 LIST5 LIST6 LIST7,
              "{%128, %129, %130, %131}, %132", FLOATS16(0), FLOATS16(16), FLOATS16(32),
              FLOATS16(48), FLOATS16(64), FLOATS16(80), FLOATS16(96), FLOATS16(112))

// Addresses of everything in shared memory.
struct Memory {
    u32 base;
    __device__ u32 x(u32 stage) const { return base + stage * X_BYTES; }
    __device__ u32 codes(u32 stage) const {
        return base + STAGES * X_BYTES + stage * 2 * CODE_BYTES;
    }
    __device__ u32 scales(u32 stage) const {
        return base + STAGES * (X_BYTES + 2 * CODE_BYTES) + stage * 2 * SCALE_BYTES;
    }
    __device__ u32 full(u32 stage) const { return base + STAGES * STAGE_BYTES + 8 * stage; }
    __device__ u32 empty(u32 stage) const { return full(STAGES + stage); }
};

// A stage of the ring and the parity that its barriers are waited for with.
struct Turn {
    u32 stage, parity;
    __device__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Where rows and tiles of each expert start, for all threads of a block. Rows count in units of
// ALIGN.
struct Table {
    u32 rows[MAX_EXPERTS + 1], tiles[MAX_EXPERTS + 1];
};

// Outputs 128 * block and up of some rows of an expert.
struct Tile {
    u32 expert, block, row, rows;
};

// Parts of nearly equal numbers of rows that an expert is cut into.
__device__ __forceinline__ u32 parts(u32 rows) {
    return (rows + MOST_ROWS / ALIGN - 1) / (MOST_ROWS / ALIGN);
}

// The tiles of a block, one in `step`. Neighbours differ in outputs first, so that they share rows.
struct Tiles {
    const Table& table;
    u32 blocks, experts, expert, next, step;

    __device__ bool take(Tile& tile) {
        if (next >= table.tiles[experts]) return false;
        while (next >= table.tiles[expert + 1]) expert++;
        u32 local = next - table.tiles[expert];
        u32 first = table.rows[expert], rows = table.rows[expert + 1] - first;
        u32 part = local / blocks, all = parts(rows), start = rows * part / all;
        tile.expert = expert;
        tile.block = local % blocks;
        tile.row = (first + start) * ALIGN;
        tile.rows = (rows * (part + 1) / all - start) * ALIGN;
        next += step;
        return true;
    }
};

__device__ __forceinline__ void make_table(const ExpertArgs& a, Table& table, u32 blocks) {
    const u32* offsets = reinterpret_cast<const u32*>(a.offsets);
    for (u32 e = threadIdx.x; e <= a.experts; e += blockDim.x) table.rows[e] = offsets[e] / ALIGN;
    __syncthreads();
    if (threadIdx.x < 32) {
        u32 total = 0;
        if (threadIdx.x == 0) table.tiles[0] = 0;
        for (u32 base = 0; base < a.experts; base += 32) {
            u32 e = base + threadIdx.x, sum = 0;
            if (e < a.experts) sum = parts(table.rows[e + 1] - table.rows[e]) * blocks;
#pragma unroll
            for (u32 step = 1; step < 32; step <<= 1) {
                u32 left = __shfl_up_sync(FULL_WARP, sum, step);
                if (threadIdx.x >= step) sum += left;
            }
            if (e < a.experts) table.tiles[e + 1] = total + sum;
            total += __shfl_sync(FULL_WARP, sum, 31);
        }
    }
    __syncthreads();
}

// The copies of rows, by one thread.
__device__ __forceinline__ void copy_rows(const ExpertArgs& a, Memory memory, Tiles tiles) {
    // The first use of a stage passes at once: the phase before the first counts as over.
    Turn turn = {0, 1};
    Tile tile;
    while (tiles.take(tile)) {
        const u8* x = reinterpret_cast<const u8*>(a.x) + (u64)tile.row * 128;
        for (u32 step = a.k / 64; step > 0; step--) {
            barrier_wait(memory.empty(turn.stage), turn.parity);
            u32 full = memory.full(turn.stage);
            barrier_expect(full, tile.rows * 128);
            copy_bulk(memory.x(turn.stage), x, tile.rows * 128, full);
            x += (u64)a.x_rows * 128;
            turn.next();
        }
    }
}

// The copies of codes and scales, by one thread.
__device__ __forceinline__ void copy_weights(const ExpertArgs& a, Memory memory, Tiles tiles) {
    Turn turn = {0, 1};
    Tile tile;
    u32 steps = a.k / 64;
    while (tiles.take(tile)) {
        // Number of a square of 64 outputs and inputs, from which both addresses follow.
        u32 square = (tile.expert * (a.m / 64) + tile.block * 2) * steps;
        for (u32 end = square + steps; square < end; square++) {
            barrier_wait(memory.empty(turn.stage), turn.parity);
            u32 full = memory.full(turn.stage);
            barrier_expect(full, 2 * (CODE_BYTES + SCALE_BYTES));
#pragma unroll
            for (u32 group = 0; group < 2; group++) {
                u64 from = square + group * steps;
                copy_bulk(memory.codes(turn.stage) + group * CODE_BYTES,
                          reinterpret_cast<const u8*>(a.codes) + from * CODE_BYTES, CODE_BYTES,
                          full);
                copy_bulk(memory.scales(turn.stage) + group * SCALE_BYTES,
                          reinterpret_cast<const u8*>(a.scales) + from * SCALE_BYTES, SCALE_BYTES,
                          full);
            }
            turn.next();
        }
    }
}

// (x & y) | z, which the compiler makes two instructions of.
__device__ __forceinline__ u32 and_or(u32 x, u32 y, u32 z) {
    u32 w;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(w) : "r"(x), "r"(y), "r"(z));
    return w;
}

// 64 inputs of the 64 outputs of a block as left operands, four registers for each 16 inputs.
__device__ __forceinline__ void decode(u32 (&a)[16], u32 codes, u32 scales) {
    u32 thread = threadIdx.x % 128, word[4], scale[2];
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(codes + thread * 16)
                 : "memory");
    // Of the thread's first and second output: low half for inputs up to 32, high half after.
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(scale[0]), "=r"(scale[1])
                 : "r"(scales + thread / 4 * 8)
                 : "memory");
#pragma unroll
    for (int step = 0; step < 4; step++) {
        u32 factor[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            factor[i] = __byte_perm(scale[i], 0, step < 2 ? 0x1010 : 0x3232);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // As 128 + code, less 136, times the scale: only the last step rounds.
            u32 pair = and_or(word[step] >> (4 * i), 0x000f000fu, 0x43004300u);
            pair = fma_bf16x2(pair, 0x3f803f80u, 0xc308c308u);
            a[4 * step + i] = fma_bf16x2(pair, factor[i % 2], 0x80008000u);
        }
    }
}

// The weights of a stage for warpgroup `group`, when they are there.
__device__ __forceinline__ void decode_stage(u32 (&a)[16], Memory memory, Turn turn, u32 group) {
    barrier_wait(memory.full(turn.stage), turn.parity);
    decode(a, memory.codes(turn.stage) + group * CODE_BYTES,
           memory.scales(turn.stage) + group * SCALE_BYTES);
}

template <int N>
__device__ __forceinline__ void multiply_stage(float (&d)[N / 2], const u32 (&a)[16], u32 x) {
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; step++) multiply(d, a + 4 * step, descriptor(x + step * 32));
    products_commit();
}

// Outputs 2 i and 2 i + 1 of sixteen lie in one thread.
template <int N>
__device__ __forceinline__ void write(const ExpertArgs& a, const float (&d)[N / 2],
                                      const Tile& tile, u32 block) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    bf16* to = reinterpret_cast<bf16*>(a.out) + (i64)(tile.row + lane % 4 * 2) * a.out_stride +
               block * 64 + warp * 16 + lane / 4 * 2;
#pragma unroll
    for (u32 i = 0; i < N / 8; i++) {
        if (8 * i >= tile.rows) break;
        *reinterpret_cast<u32*>(to) = pack_bf16(d[4 * i], d[4 * i + 2]);
        *reinterpret_cast<u32*>(to + a.out_stride) = pack_bf16(d[4 * i + 1], d[4 * i + 3]);
        to += 8 * a.out_stride;
    }
}

__device__ __forceinline__ float silu_mul(float gate, float up) {
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// Eight gates and the eight ups of the same columns lie in a warp; neighbouring columns are put
// together before they are written in panels.
template <int N>
__device__ __forceinline__ void write_gated(const ExpertArgs& a, const float (&d)[N / 2],
                                            const Tile& tile, u32 block) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    u32 odd = lane / 4 % 2, row = lane % 4 * 2 + odd, piece = block % 2 * 4 + warp;
    u8* to = reinterpret_cast<u8*>(a.out) +
             ((u64)(block / 2) * (u64)a.out_stride + tile.row + row) * 128 + ((piece ^ row) << 4) +
             lane / 8 * 4;
#pragma unroll
    for (u32 i = 0; i < N / 8; i++) {
        if (8 * i >= tile.rows) break;
        float first = silu_mul(d[4 * i], d[4 * i + 2]);
        float second = silu_mul(d[4 * i + 1], d[4 * i + 3]);
        float other = __shfl_xor_sync(FULL_WARP, odd ? first : second, 4);
        *reinterpret_cast<u32*>(to) = odd ? pack_bf16(other, second) : pack_bf16(first, other);
        to += 8 * 128;
    }
}

// One tile of at most N rows, all 128 threads of warpgroup `group` = 0 or 1. While the tensor cores
// multiply one stage, the weights of the next are decoded.
template <bool GATED, int N>
__device__ __forceinline__ void consume(const ExpertArgs& a, Memory memory, const Tile& tile,
                                        Turn& turn, u32 group) {
    // Set, or the compiler keeps the registers of every size of tile alive between tiles.
    float d[N / 2] = {};
    u32 even[16], odd[16], last = 0;
    decode_stage(even, memory, turn, group);
    for (u32 step = 0; step < a.k / 64; step += 2) {
        multiply_stage<N>(d, even, memory.x(turn.stage));
        products_wait<1>();
        if (step > 0) release(memory.empty(last));
        last = turn.stage;
        turn.next();
        decode_stage(odd, memory, turn, group);
        multiply_stage<N>(d, odd, memory.x(turn.stage));
        products_wait<1>();
        release(memory.empty(last));
        last = turn.stage;
        turn.next();
        if (step + 2 < a.k / 64) decode_stage(even, memory, turn, group);
    }
    products_wait<0>();
    release(memory.empty(last));
    pin(d);
    if constexpr (GATED) {
        write_gated<N>(a, d, tile, tile.block * 2 + group);
    } else {
        write<N>(a, d, tile, tile.block * 2 + group);
    }
}

template <bool GATED>
__device__ __forceinline__ void multiply_experts(const ExpertArgs& a) {
    extern __shared__ u8 raw[];
    u32 start = shared_address(raw), base = (start + 1023) & ~1023u;
    Memory memory = {base};
    Table& table = *reinterpret_cast<Table*>(raw + (memory.full(2 * STAGES) - start));
    make_table(a, table, a.m / 128);
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; stage++) {
            barrier_init(memory.full(stage), 2);
            barrier_init(memory.empty(stage), CONSUMER_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    Tiles tiles = {table, a.m / 128, a.experts, 0, blockIdx.x, gridDim.x};
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) copy_rows(a, memory, tiles);
        if (threadIdx.x == 32) copy_weights(a, memory, tiles);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    u32 group = threadIdx.x / 128 - 1;
    Turn turn = {0, 0};
    Tile tile;
    while (tiles.take(tile)) {
        // Few sizes, or the compiler runs out of registers; smaller tiles leave the last rows idle.
        if (tile.rows > 224)
            consume<GATED, 256>(a, memory, tile, turn, group);
        else if (tile.rows > 192)
            consume<GATED, 224>(a, memory, tile, turn, group);
        else if (tile.rows > 128)
            consume<GATED, 192>(a, memory, tile, turn, group);
        else
            consume<GATED, 128>(a, memory, tile, turn, group);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) experts_gate_up(ExpertArgs a) {
    multiply_experts<true>(a);
}
extern "C" __global__ void __launch_bounds__(384, 1) experts_down(ExpertArgs a) {
    multiply_experts<false>(a);
}

#endif
