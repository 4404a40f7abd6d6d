//! Attention kernels against the CPU's, for whole sequences, cached keys and shared key parts.

use kernels::Threads;
use kernels::attention::{AttentionShape, HeadShape, causal};
use kernels::cuda::{Attention, AttentionVariant, DeviceHeads, Dtype};

use super::{Gpu, Named, Outcome, within};

pub(crate) const CASES: &[Named] = &[
    ("attention_any", any),
    ("attention_mma_64_64", |gpu| tensor_cores(gpu, AttentionVariant::Mma, [64, 64, 0])),
    ("attention_mma_128_128", |gpu| tensor_cores(gpu, AttentionVariant::Mma, [128, 128, 0])),
    ("attention_mma_192_128", |gpu| tensor_cores(gpu, AttentionVariant::Mma, [192, 128, 0])),
    ("attention_mma_shared", |gpu| tensor_cores(gpu, AttentionVariant::Mma, [192, 128, 64])),
    ("attention_mma_padded", padded),
    ("attention_wgmma_128_128", |gpu| hopper(gpu, [128, 128, 0])),
    ("attention_wgmma_192_128", |gpu| hopper(gpu, [192, 128, 0])),
    ("attention_wgmma_shared", |gpu| hopper(gpu, [192, 128, 64])),
];

/// One problem: sequences as (cached keys, queries), and sizes of the heads.
struct Problem<'a> {
    sequences: &'a [(usize, usize)],
    heads: usize,
    kv_heads: usize,
    /// Width of a key, of a value, and of the shared part of a key.
    dims: [usize; 3],
    dtype: Dtype,
    pitch: usize,
    /// Factor on the queries: large ones make the softmax sharp.
    sharpness: f32,
}

fn any(gpu: &mut Gpu) -> Outcome {
    let sequences: [&[(usize, usize)]; 4] =
        [&[(0, 1)], &[(0, 5), (0, 33), (0, 0), (0, 2)], &[(7, 3), (0, 40), (100, 1)], &[(64, 65)]];
    for dims in [[24, 16, 8], [24, 12, 0], [8, 8, 0], [192, 128, 64], [64, 64, 0], [256, 256, 0]] {
        for sequences in sequences {
            for (dtype, heads, kv_heads) in
                [(Dtype::F32, 4, 2), (Dtype::Bf16, 3, 1), (Dtype::F32, 2, 2)]
            {
                let problem =
                    Problem { sequences, heads, kv_heads, dims, dtype, pitch: 3, sharpness: 1.0 };
                compare(gpu, AttentionVariant::Any, &problem)?;
            }
        }
    }
    Ok(())
}

pub(crate) fn tensor_cores(gpu: &mut Gpu, variant: AttentionVariant, dims: [usize; 3]) -> Outcome {
    let mut sequences: Vec<&[(usize, usize)]> = vec![
        &[(0, 1)],
        &[(0, 16)],
        &[(0, 64)],
        &[(0, 128)],
        &[(0, 129)],
        &[(0, 5), (0, 63), (0, 0), (0, 65), (0, 200)],
        &[(7, 3), (0, 140), (100, 1), (64, 64), (200, 130)],
    ];
    if !gpu.quick {
        sequences.extend([&[(0, 1000), (0, 777), (30, 513)][..], &[(0, 2048)]]);
    }
    for sequences in sequences {
        for (heads, kv_heads, pitch, sharpness) in
            [(2, 2, 0, 1.0), (6, 2, 64, 1.0), (1, 1, 8, 20.0)]
        {
            let dtype = Dtype::Bf16;
            let problem = Problem { sequences, heads, kv_heads, dims, dtype, pitch, sharpness };
            compare(gpu, variant, &problem)?;
        }
    }
    Ok(())
}

/// Heads of other widths than the tiles'.
fn padded(gpu: &mut Gpu) -> Outcome {
    let widths = [[24, 16], [8, 8], [32, 32], [32, 16], [16, 24], [40, 64], [80, 80], [136, 96]];
    widths.into_iter().try_for_each(|[qk, v]| tensor_cores(gpu, AttentionVariant::Mma, [qk, v, 0]))
}

/// Nothing to compare on other architectures.
fn hopper(gpu: &mut Gpu, dims: [usize; 3]) -> Outcome {
    if gpu.kernels.arch().name() != "sm_90a" {
        return Ok(());
    }
    tensor_cores(gpu, AttentionVariant::Wgmma, dims)
}

fn compare(gpu: &mut Gpu, variant: AttentionVariant, problem: &Problem<'_>) -> Outcome {
    let Problem { sequences, heads, kv_heads, dims: [qk, v_dim, shared], dtype, pitch, sharpness } =
        *problem;
    let what = format!(
        "{variant:?} {dtype:?} {sequences:?} heads {heads}/{kv_heads} {qk}/{v_dim} shared {shared} \
         pitch {pitch} sharpness {sharpness}"
    );
    let sums = |lengths: &dyn Fn(&(usize, usize)) -> usize| {
        let mut sums = vec![0usize];
        for sequence in sequences {
            sums.push(sums[sums.len() - 1] + lengths(sequence));
        }
        sums
    };
    let (cu_q, cu_k) = (sums(&|s| s.1), sums(&|s| s.0 + s.1));
    let (queries, keys) = (cu_q[sequences.len()], cu_k[sequences.len()]);
    let q_values: Vec<f32> = (gpu.rng.values(queries * heads * qk, dtype).into_iter())
        .map(|x| super::round(x * sharpness, dtype))
        .collect();
    // Keys [keys, kv_heads, own], values and a shared part: the latent layout, keys and values of
    // a head side by side.
    let own = qk - shared;
    let kv_values = gpu.rng.values(keys * kv_heads * (own + v_dim), dtype);
    let pe_values = gpu.rng.values(keys * shared, dtype);
    let q = gpu.matrix(&q_values, [queries, heads * qk], dtype, pitch)?;
    let kv = gpu.matrix(&kv_values, [keys, kv_heads * (own + v_dim)], dtype, pitch)?;
    let pe = gpu.matrix(&pe_values, [keys, shared], dtype, pitch)?;
    let out_width = heads * v_dim;
    let out = gpu.matrix(&vec![9.0; queries * out_width], [queries, out_width], dtype, pitch)?;
    let as_u32 = |sums: &[usize]| sums.iter().map(|&sum| sum as u32).collect::<Vec<_>>();
    let (device_cu_q, device_cu_k) = (gpu.vector(&as_u32(&cu_q))?, gpu.vector(&as_u32(&cu_k))?);
    let lse = gpu.vector(&vec![9f32; queries * heads])?;
    let scale = 1.0 / (qk as f32).sqrt();
    let call = Attention {
        out: DeviceHeads::of(out.view, v_dim, 0),
        q: DeviceHeads::of(q.view, qk, 0),
        k: DeviceHeads::of(kv.view, own + v_dim, 0),
        k_shared: (shared > 0).then_some(pe.view),
        v: DeviceHeads::of(kv.view, own + v_dim, own),
        lse: Some(lse.view),
        cu_q: device_cu_q.view,
        cu_k: device_cu_k.view,
        longest: sequences.iter().map(|s| s.1).max().unwrap_or(0),
        heads,
        kv_heads,
        qk_dim: qk,
        v_dim,
        scale,
    };
    gpu.kernels.on(&gpu.stream).attention_by(variant, &call)?;
    let (mut k_whole, mut v_whole) = (Vec::new(), Vec::new());
    for (r, row) in kv_values.chunks(kv_heads * (own + v_dim)).enumerate() {
        for head in row.chunks(own + v_dim) {
            k_whole.extend_from_slice(&head[..own]);
            k_whole.extend_from_slice(&pe_values[r * shared..][..shared]);
            v_whole.extend_from_slice(&head[own..]);
        }
    }
    let head_shape = HeadShape { q_heads: heads, kv_heads, qk_dim: qk, v_dim, scale };
    let cached: Vec<usize> = sequences.iter().map(|s| s.0).collect();
    let packed = AttentionShape::packed(&cu_q, head_shape, Threads(16));
    let mut want = vec![0.0; queries * out_width];
    let shape = AttentionShape { cached: &cached, ..packed };
    causal(&mut want, &q_values, &k_whole, &v_whole, shape);
    let tolerance = if dtype == Dtype::Bf16 { (0.01, 0.012) } else { (1e-4, 2e-5) };
    within(&what, &gpu.values(&out)?, &want, tolerance)?;
    let want_lse = denominators(&q_values, &k_whole, (&cu_q, &cu_k), head_shape);
    within(&format!("lse, {what}"), &gpu.vector_values(&lse)?, &want_lse, (1e-4, 2e-3))
}

/// Logarithms of the softmax denominators: [queries, heads].
fn denominators(
    q: &[f32],
    k: &[f32],
    (cu_q, cu_k): (&[usize], &[usize]),
    heads: HeadShape,
) -> Vec<f32> {
    let HeadShape { q_heads, kv_heads, qk_dim, scale, .. } = heads;
    let mut lse = vec![0.0; cu_q[cu_q.len() - 1] * q_heads];
    for sequence in 0..cu_q.len() - 1 {
        let queries = cu_q[sequence + 1] - cu_q[sequence];
        let ahead = cu_k[sequence + 1] - cu_k[sequence] - queries;
        for (i, head) in (0..queries).flat_map(|i| (0..q_heads).map(move |head| (i, head))) {
            let row = (cu_q[sequence] + i) * q_heads + head;
            let query = &q[row * qk_dim..][..qk_dim];
            let kv_head = head * kv_heads / q_heads;
            let score = |j: usize| {
                let key = &k[((cu_k[sequence] + j) * kv_heads + kv_head) * qk_dim..][..qk_dim];
                query.iter().zip(key).map(|(q, k)| q * k).sum::<f32>() * scale
            };
            let scores: Vec<f32> = (0..=i + ahead).map(score).collect();
            let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = scores.iter().map(|s| f64::from(s - most).exp()).sum();
            lse[row] = most + sum.ln() as f32;
        }
    }
    lse
}
