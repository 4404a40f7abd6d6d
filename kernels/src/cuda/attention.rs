//! Launches of causal attention over packed sequences. Knows nothing of projections or caches.

use super::views::HeadsArg;
use super::{CudaError, DeviceHeads, DeviceMatrix, DeviceVector, Dtype, Launcher, Shape, ensure};

/// Widest head, of queries, keys or values, that attention takes.
pub const MAX_HEAD_WIDTH: usize = 256;

/// Attention of packed sequences. Query head `h` reads key head `h * kv_heads / heads`. A sequence
/// may have more keys than queries: its queries are then its last positions.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// Written: [queries, heads, v_dim].
    pub out: DeviceHeads,
    /// [queries, heads, qk_dim].
    pub q: DeviceHeads,
    /// [keys, kv_heads, qk_dim], or without the shared part if there is one.
    pub k: DeviceHeads,
    /// The last `cols` values of every key, the same for all heads: [keys, cols].
    pub k_shared: Option<DeviceMatrix>,
    /// [keys, kv_heads, v_dim].
    pub v: DeviceHeads,
    /// Natural logarithm of each softmax's denominator, if wanted: row-major [queries, heads].
    pub lse: Option<DeviceVector<f32>>,
    /// First query row of each sequence, and the total: [sequences + 1].
    pub cu_q: DeviceVector<u32>,
    /// First key row of each sequence, and the total: [sequences + 1].
    pub cu_k: DeviceVector<u32>,
    /// Queries of the longest sequence.
    pub longest: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a query and of a whole key.
    pub qk_dim: usize,
    /// Width of a value.
    pub v_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
}

/// Widths of keys and of values that the kernels of [`AttentionVariant::Mma`] have tiles for.
const MMA_TILES: [(usize, usize); 5] = [(32, 16), (32, 32), (64, 64), (128, 128), (192, 128)];

/// A kernel that computes attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AttentionVariant {
    /// One warp a query and head: any widths up to 256, both types; slow.
    Any,
    /// Tensor cores through mma.sync: bf16, multiples of eight up to (192, 128); the tiles have
    /// the widths of [`MMA_TILES`].
    Mma,
    /// Warpgroup products of Hopper: bf16, widths (192, 128), (128, 128); the fastest there.
    Wgmma,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct AttentionArgs {
    out: HeadsArg,
    q: HeadsArg,
    k: HeadsArg,
    v: HeadsArg,
    k_shared: HeadsArg,
    lse: u64,
    cu_q: u64,
    cu_k: u64,
    heads: u32,
    kv_heads: u32,
    qk_dim: u32,
    v_dim: u32,
    /// Width of the shared part of a key, 0 for none.
    shared_dim: u32,
    scale: f32,
}

impl Attention {
    /// The fastest kernel for these shapes that runs on every architecture.
    pub fn variant(&self) -> AttentionVariant {
        if self.mma_tile().is_some() { AttentionVariant::Mma } else { AttentionVariant::Any }
    }

    fn shared_dim(&self) -> usize {
        self.k_shared.map_or(0, |shared| shared.cols)
    }

    /// The narrowest tile that holds the heads, if they lie as that kernel needs them.
    fn mma_tile(&self) -> Option<(usize, usize)> {
        let views = [(&self.out, self.v_dim), (&self.q, self.qk_dim), (&self.v, self.v_dim)];
        let own = (&self.k, self.qk_dim - self.shared_dim());
        let fits = |(view, width): (&DeviceHeads, usize)| {
            view.dtype == Dtype::Bf16 && view.in_vectors() && width.is_multiple_of(8)
        };
        if !views.into_iter().chain([own]).all(fits) {
            return None;
        }
        let (qk, v) = (self.qk_dim, self.v_dim);
        match self.k_shared {
            None => MMA_TILES.into_iter().find(|tile| qk <= tile.0 && v <= tile.1),
            Some(shared) => {
                let fits = shared.in_vectors() && (qk, v, shared.cols) == (192, 128, 64);
                fits.then_some((192, 128))
            }
        }
    }

    fn fits_wgmma(&self) -> bool {
        let (qk, v) = (self.qk_dim, self.v_dim);
        self.mma_tile() == Some((qk, v)) && v == 128
    }

    fn check(&self) -> Result<(), CudaError> {
        let Self { out, q, k, v, cu_q, cu_k, lse, k_shared, .. } = self;
        let fits = out.rows == q.rows
            && k.rows == v.rows
            && [out, k, v].iter().all(|view| view.dtype == q.dtype)
            && k_shared.is_none_or(|m| m.rows == k.rows && m.dtype == q.dtype)
            && self.shared_dim() < self.qk_dim
            && cu_q.len == cu_k.len
            && cu_q.len > 0
            && lse.is_none_or(|lse| lse.len == q.rows * self.heads)
            && self.heads > 0
            && self.kv_heads > 0
            && self.heads.is_multiple_of(self.kv_heads)
            && (1..=MAX_HEAD_WIDTH).contains(&self.qk_dim)
            && (1..=MAX_HEAD_WIDTH).contains(&self.v_dim)
            && self.longest <= q.rows;
        ensure(fits, || format!("{self:?}"))
    }

    fn args(&self) -> AttentionArgs {
        let none = HeadsArg { address: 0, row_stride: 0, head_stride: 0 };
        let shared = |m: DeviceMatrix| DeviceHeads::of(m, 0, 0).arg();
        AttentionArgs {
            out: self.out.arg(),
            q: self.q.arg(),
            k: self.k.arg(),
            v: self.v.arg(),
            k_shared: self.k_shared.map_or(none, shared),
            lse: self.lse.map_or(0, |lse| lse.address),
            cu_q: self.cu_q.address,
            cu_k: self.cu_k.address,
            heads: self.heads as u32,
            kv_heads: self.kv_heads as u32,
            qk_dim: self.qk_dim as u32,
            v_dim: self.v_dim as u32,
            shared_dim: self.shared_dim() as u32,
            scale: self.scale,
        }
    }
}

impl Launcher<'_> {
    /// `out = softmax(scale * q k^T + causal) v` for every sequence and head, by the fastest kernel
    /// for the shapes.
    pub fn attention(&self, call: &Attention) -> Result<(), CudaError> {
        let hopper = self.kernels.arch().name() == "sm_90a" && call.fits_wgmma();
        let variant = if hopper { AttentionVariant::Wgmma } else { call.variant() };
        self.attention_by(variant, call)
    }

    /// The same by the kernel of the caller's choice.
    pub fn attention_by(
        &self,
        variant: AttentionVariant,
        call: &Attention,
    ) -> Result<(), CudaError> {
        call.check()?;
        let sequences = call.cu_q.len - 1;
        if sequences == 0 || call.longest == 0 {
            return Ok(());
        }
        let narrow = sequences <= 65_535 && call.heads <= 65_535;
        ensure(narrow, || format!("{sequences} sequences in one attention"))?;
        let (rows, threads, shared, name) = match variant {
            AttentionVariant::Any => {
                let shared = 4 * (MAX_HEAD_WIDTH + 32) * size_of::<f32>();
                (4, 128, shared, format!("attention_any_{}", call.q.dtype.name()))
            }
            AttentionVariant::Wgmma => {
                let fits = self.kernels.arch().name() == "sm_90a" && call.fits_wgmma();
                ensure(fits, || format!("attention by wgmma of {call:?}"))?;
                let (qk, v) = (call.qk_dim, call.v_dim);
                // Queries, two stages of keys and of values, barriers, and room to align.
                let shared = (3 * qk + 2 * v) * 128 * 2 + 2048;
                let part = if call.k_shared.is_some() { "_shared" } else { "" };
                (128, 384, shared, format!("attention_wgmma_{qk}_{v}{part}"))
            }
            AttentionVariant::Mma => {
                let Some((qk, v)) = call.mma_tile() else {
                    return Err(CudaError::shape(format!("attention by mma of {call:?}")));
                };
                // Two tiles of 64 keys and values; queries go through the same memory first.
                let shared = 2 * (64 * qk + 64 * v).max(64 * qk) * 2;
                let exact = (qk, v) == (call.qk_dim, call.v_dim) && qk >= 64;
                let part = match call.k_shared {
                    Some(_) => "_shared",
                    None if exact => "",
                    None => "_padded",
                };
                (128, 256, shared, format!("attention_mma_{qk}_{v}{part}"))
            }
        };
        let tiles = u32::try_from(call.longest.div_ceil(rows)).unwrap_or(u32::MAX);
        let grid = (tiles, call.heads as u32, sequences as u32);
        let shape = Shape { grid, block: (threads, 1, 1), shared: shared as u32 };
        self.launch(&name, shape, &call.args())
    }
}
