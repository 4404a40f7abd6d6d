// Rotary embedding in place, from precomputed cosines and sines; a thread for each pair. Twin:
// rope.

struct RopeArgs {
    Heads x;
    u64 cos, sin;
    u32 rows, heads, pairs;
};

template <typename T, bool INTERLEAVED>
__device__ __forceinline__ void rotate(const RopeArgs& a) {
    i64 r = tile_row();
    u32 c = (u32)tile_col<1>();
    if (r >= a.rows || c >= a.heads * a.pairs) return;
    u32 head = c / a.pairs, j = c % a.pairs;
    T* x = reinterpret_cast<T*>(a.x.address) + r * a.x.row_stride + head * a.x.head_stride;
    T* first = INTERLEAVED ? x + 2 * j : x + j;
    T* second = INTERLEAVED ? first + 1 : first + a.pairs;
    float cos = reinterpret_cast<const float*>(a.cos)[r * a.pairs + j];
    float sin = reinterpret_cast<const float*>(a.sin)[r * a.pairs + j];
    float p = to_float(*first), q = to_float(*second);
    from_float(*first, p * cos - q * sin);
    from_float(*second, q * cos + p * sin);
}

extern "C" __global__ void rope_interleaved_bf16(RopeArgs a) { rotate<bf16, true>(a); }
extern "C" __global__ void rope_interleaved_f32(RopeArgs a) { rotate<float, true>(a); }
extern "C" __global__ void rope_half_bf16(RopeArgs a) { rotate<bf16, false>(a); }
extern "C" __global__ void rope_half_f32(RopeArgs a) { rotate<float, false>(a); }
