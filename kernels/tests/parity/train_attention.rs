//! Attention of the training-time test against a plain version: forward with own keys and `lse`,
//! gradients of queries, keys, values and own keys, added to what is there.

use kernels::cuda::{
    AttentionVariant, DeviceHeads, Dtype, OwnGradient, OwnStep, TrainOperands, TrainPlan,
};
use rayon::prelude::*;

use super::{Gpu, Held, Named, Outcome, round, same, within};

pub(crate) const CASES: &[Named] = &[
    ("train_attention_any", any),
    ("train_attention_mma_64_64", |gpu| tensor_cores(gpu, AttentionVariant::Mma, [64, 64])),
    ("train_attention_mma_128_128", |gpu| tensor_cores(gpu, AttentionVariant::Mma, [128, 128])),
    ("train_attention_mma_192_128", |gpu| tensor_cores(gpu, AttentionVariant::Mma, [192, 128])),
    ("train_attention_wgmma_64_64", |gpu| hopper(gpu, [64, 64])),
    ("train_attention_wgmma_128_128", |gpu| hopper(gpu, [128, 128])),
    ("train_attention_wgmma_192_128", |gpu| hopper(gpu, [192, 128])),
];

/// One problem: documents as (queries, keys), own steps, and sizes of the heads.
#[derive(Clone, Debug)]
struct Problem {
    documents: Vec<(usize, usize)>,
    steps: usize,
    heads: usize,
    kv_heads: usize,
    qk: usize,
    v: usize,
    dtype: Dtype,
    /// Rows start at multiples of this many values.
    align: usize,
    /// Factor on the queries: large ones make the softmax sharp.
    sharpness: f32,
}

/// Values of all operands, without gaps.
struct Values {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    d_out: Vec<f32>,
    own_k: Vec<Vec<f32>>,
    own_v: Vec<Vec<f32>>,
    /// First query, end of queries, first key, end of keys of each document.
    segments: Vec<[usize; 4]>,
    visible: Vec<u32>,
    own_rows: Vec<Vec<u32>>,
}

/// What the plain version finds.
#[derive(Default)]
struct Found {
    out: Vec<f32>,
    lse: Vec<f32>,
    delta: Vec<f32>,
    d_q: Vec<f32>,
    d_k: Vec<f32>,
    d_v: Vec<f32>,
    d_own_k: Vec<Vec<f32>>,
    d_own_v: Vec<Vec<f32>>,
}

fn any(gpu: &mut Gpu) -> Outcome {
    for (qk, v) in [(24, 16), (7, 9), (64, 64), (192, 128)] {
        for (dtype, heads, kv_heads) in [(Dtype::F32, 4, 2), (Dtype::Bf16, 3, 3)] {
            let documents = vec![(5, 9), (33, 33), (1, 70)];
            let (steps, align, sharpness) = (2, 11, 1.0);
            let problem =
                Problem { documents, steps, heads, kv_heads, qk, v, dtype, align, sharpness };
            compare(gpu, AttentionVariant::Any, &problem)?;
        }
    }
    Ok(())
}

/// Nothing to compare on other architectures.
fn hopper(gpu: &mut Gpu, widths: [usize; 2]) -> Outcome {
    match gpu.kernels.arch().name() {
        "sm_90a" => tensor_cores(gpu, AttentionVariant::Wgmma, widths),
        _ => Ok(()),
    }
}

fn tensor_cores(gpu: &mut Gpu, variant: AttentionVariant, [qk, v]: [usize; 2]) -> Outcome {
    let mut documents = vec![
        vec![(1, 1)],
        vec![(64, 64)],
        vec![(128, 128)],
        vec![(129, 129)],
        vec![(3, 200), (77, 77), (1, 1), (150, 301)],
    ];
    if !gpu.quick {
        documents.extend([vec![(700, 700)], vec![(301, 900), (513, 513)]]);
    }
    let mut problems = Vec::new();
    for documents in documents {
        for (heads, kv_heads, steps, align, sharpness) in
            [(2, 2, 0, 8, 1.0), (6, 2, 2, 256, 1.0), (1, 1, 3, 8, 20.0)]
        {
            let (documents, dtype) = (documents.clone(), Dtype::Bf16);
            problems.push(Problem {
                documents,
                steps,
                heads,
                kv_heads,
                qk,
                v,
                dtype,
                align,
                sharpness,
            });
        }
    }
    problems.iter().try_for_each(|problem| compare(gpu, variant, problem))
}

fn values(gpu: &mut Gpu, p: &Problem) -> Values {
    let (mut segments, mut visible, mut end) = (Vec::new(), Vec::new(), [0, 0]);
    for &(queries, keys) in &p.documents {
        segments.push([end[0], end[0] + queries, end[1], end[1] + keys]);
        // Some of the positions, in order.
        let mut positions: Vec<usize> = (0..keys).collect();
        while positions.len() > queries {
            positions.remove(gpu.rng.below(positions.len()));
        }
        visible.extend(positions.iter().map(|at| (end[1] + at + 1) as u32));
        end = [end[0] + queries, end[1] + keys];
    }
    let [queries, keys] = end;
    let own = queries + 3;
    let mut random = |len: usize, factor: f32| -> Vec<f32> {
        let values = gpu.rng.values(len, p.dtype);
        values.into_iter().map(|x| round(x * factor, p.dtype)).collect()
    };
    Values {
        q: random(queries * p.heads * p.qk, p.sharpness),
        k: random(keys * p.kv_heads * p.qk, 1.0),
        v: random(keys * p.kv_heads * p.v, 1.0),
        d_out: random(queries * p.heads * p.v, 1.0),
        own_k: (0..p.steps).map(|_| random(own * p.kv_heads * p.qk, 1.0)).collect(),
        own_v: (0..p.steps).map(|_| random(own * p.kv_heads * p.v, 1.0)).collect(),
        segments,
        visible,
        own_rows: (0..p.steps as u32).map(|s| (0..queries as u32).map(|r| r + s).collect()).collect(),
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut [f32], x: &[f32], factor: f32) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += x * factor);
}

/// Values of one row and head.
fn part(x: &[f32], row: usize, [heads, head, width]: [usize; 3]) -> &[f32] {
    &x[(row * heads + head) * width..][..width]
}

fn part_mut(x: &mut [f32], row: usize, [heads, head, width]: [usize; 3]) -> &mut [f32] {
    &mut x[(row * heads + head) * width..][..width]
}

/// Everything that one key head makes; the rest is zero.
fn of_head(p: &Problem, x: &Values, kv_head: usize) -> Found {
    let scale = 1.0 / (p.qk as f32).sqrt();
    let zeros = |of: &[Vec<f32>]| of.iter().map(|x| vec![0.0; x.len()]).collect::<Vec<_>>();
    let mut found = Found {
        out: vec![0.0; x.d_out.len()],
        lse: vec![0.0; x.visible.len() * p.heads],
        delta: vec![0.0; x.visible.len() * p.heads],
        d_q: vec![0.0; x.q.len()],
        d_k: vec![0.0; x.k.len()],
        d_v: vec![0.0; x.v.len()],
        d_own_k: zeros(&x.own_k),
        d_own_v: zeros(&x.own_v),
    };
    let (keys, vals) = ([p.kv_heads, kv_head, p.qk], [p.kv_heads, kv_head, p.v]);
    let group = p.heads / p.kv_heads;
    for &[first, end, start, _] in &x.segments {
        for (row, head) in (first..end).flat_map(|row| {
            (kv_head * group..(kv_head + 1) * group).map(move |head| (row, head))
        }) {
            let (query, mixed) = ([p.heads, head, p.qk], [p.heads, head, p.v]);
            let (q, d_out) = (part(&x.q, row, query), part(&x.d_out, row, mixed));
            // Step-0 keys, then own ones.
            let seen = start..x.visible[row] as usize;
            let own = |s: usize| x.own_rows[s][row] as usize;
            let mut all: Vec<(&[f32], &[f32])> =
                seen.clone().map(|at| (part(&x.k, at, keys), part(&x.v, at, vals))).collect();
            all.extend((0..p.steps).map(|s| {
                (part(&x.own_k[s], own(s), keys), part(&x.own_v[s], own(s), vals))
            }));
            let scores: Vec<f32> = all.iter().map(|(k, _)| scale * dot(q, k)).collect();
            let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = scores.iter().map(|s| f64::from(s - most).exp()).sum();
            let lse = most + sum.ln() as f32;
            found.lse[row * p.heads + head] = lse;
            let weights: Vec<f32> = scores.iter().map(|s| (s - lse).exp()).collect();
            let out = part_mut(&mut found.out, row, mixed);
            all.iter().zip(&weights).for_each(|((_, v), w)| add(out, v, *w));
            let delta = dot(out, d_out);
            found.delta[row * p.heads + head] = delta;
            for (at, ((k, v), weight)) in all.iter().zip(&weights).enumerate() {
                let pull = weight * (dot(d_out, v) - delta) * scale;
                add(part_mut(&mut found.d_q, row, query), k, pull);
                let (d_k, d_v, place) = match at.checked_sub(seen.len()) {
                    None => (&mut found.d_k, &mut found.d_v, seen.start + at),
                    Some(s) => (&mut found.d_own_k[s], &mut found.d_own_v[s], own(s)),
                };
                add(part_mut(d_k, place, keys), q, pull);
                add(part_mut(d_v, place, vals), d_out, *weight);
            }
        }
    }
    found
}

fn plain(p: &Problem, x: &Values) -> Found {
    let sum = |to: &mut Vec<f32>, x: &[f32]| match to.is_empty() {
        true => to.extend_from_slice(x),
        false => add(to, x, 1.0),
    };
    let mut all = Found::default();
    let heads: Vec<Found> =
        (0..p.kv_heads).into_par_iter().map(|kv_head| of_head(p, x, kv_head)).collect();
    all.d_own_k.resize(p.steps, Vec::new());
    all.d_own_v.resize(p.steps, Vec::new());
    for found in &heads {
        sum(&mut all.out, &found.out);
        sum(&mut all.lse, &found.lse);
        sum(&mut all.delta, &found.delta);
        sum(&mut all.d_q, &found.d_q);
        sum(&mut all.d_k, &found.d_k);
        sum(&mut all.d_v, &found.d_v);
        for s in 0..p.steps {
            sum(&mut all.d_own_k[s], &found.d_own_k[s]);
            sum(&mut all.d_own_v[s], &found.d_own_v[s]);
        }
    }
    all
}

/// A tensor [rows, heads, width] on the device, rows as the problem aligns them.
fn held(gpu: &Gpu, p: &Problem, x: &[f32], cols: usize) -> Outcome<Held> {
    let pitch = cols.next_multiple_of(p.align) - cols;
    gpu.matrix(x, [x.len() / cols, cols], p.dtype, pitch)
}

/// Collects what is wrong, so that one wrong kernel does not hide another.
struct Verdict<'a> {
    what: &'a str,
    wrong: Vec<String>,
    dtype: Dtype,
}

impl Verdict<'_> {
    /// Allowed differences grow with the tensor's root mean square.
    fn near(&mut self, name: &str, got: Outcome<Vec<f32>>, want: &[f32]) {
        let square = want.iter().map(|x| x * x).sum::<f32>() / want.len().max(1) as f32;
        let rms = square.sqrt();
        let allowed = match self.dtype {
            Dtype::Bf16 => (0.015, 0.02 * rms + 1e-3),
            Dtype::F32 => (1e-4, 1e-5 * rms + 2e-5),
        };
        let outcome = got.and_then(|got| within(name, &got, want, allowed));
        if let Err(error) = outcome {
            self.wrong.push(format!("{error} (rms {rms})"));
        }
    }

    fn outcome(self) -> Outcome {
        if self.wrong.is_empty() {
            return Ok(());
        }
        Err(format!("{}: {}", self.what, self.wrong.join("; ")).into())
    }
}

fn compare(gpu: &mut Gpu, variant: AttentionVariant, p: &Problem) -> Outcome {
    let x = values(gpu, p);
    let want = plain(p, &x);
    let what = format!("{variant:?} {p:?}");
    let mut verdict = Verdict { what: &what, wrong: Vec::new(), dtype: p.dtype };
    let (q_cols, out_cols) = (p.heads * p.qk, p.heads * p.v);
    let (k_cols, v_cols) = (p.kv_heads * p.qk, p.kv_heads * p.v);
    let (q, k) = (held(gpu, p, &x.q, q_cols)?, held(gpu, p, &x.k, k_cols)?);
    let v = held(gpu, p, &x.v, v_cols)?;
    let out = held(gpu, p, &vec![9.0; x.d_out.len()], out_cols)?;
    let lse = gpu.vector(&vec![9f32; want.lse.len()])?;
    let visible = gpu.vector(&x.visible)?;
    let segments: Vec<u32> = x.segments.iter().flatten().map(|&at| at as u32).collect();
    let segments = gpu.vector(&segments)?;
    let longest = |size: fn(&(usize, usize)) -> usize| p.documents.iter().map(size).max();
    let plan = TrainPlan {
        heads: p.heads,
        kv_heads: p.kv_heads,
        qk_dim: p.qk,
        v_dim: p.v,
        scale: 1.0 / (p.qk as f32).sqrt(),
        visible: visible.view,
        segments: segments.view,
        longest: [longest(|d| d.0).unwrap_or(0), longest(|d| d.1).unwrap_or(0)],
        variant: Some(variant),
    };
    let heads = |held: &Held, width| DeviceHeads::of(held.view, width, 0);
    let views = TrainOperands {
        q: heads(&q, p.qk),
        k: heads(&k, p.qk),
        v: heads(&v, p.v),
        out: heads(&out, p.v),
        lse: lse.view,
    };
    let (mut tensors, mut own) = (Vec::new(), Vec::new());
    for s in 0..p.steps {
        let rows = gpu.vector(&x.own_rows[s])?;
        let (keys, vals) = (held(gpu, p, &x.own_k[s], k_cols)?, held(gpu, p, &x.own_v[s], v_cols)?);
        let ones = |of: &[f32]| vec![1.0; of.len()];
        let d_keys = held(gpu, p, &ones(&x.own_k[s]), k_cols)?;
        let d_vals = held(gpu, p, &ones(&x.own_v[s]), v_cols)?;
        own.push(OwnStep {
            keys: heads(&keys, p.qk),
            values: heads(&vals, p.v),
            rows: rows.view,
            gradients: None,
        });
        tensors.push((rows, keys, vals, d_keys, d_vals));
    }
    let on = gpu.kernels.on(&gpu.stream);
    on.train_attention(&plan, &views)?;
    on.merge_own(&plan, &views, &own)?;
    verdict.near("out", gpu.values(&out), &want.out);
    let got = gpu.vector_values(&lse)?;
    let near = within("lse", &got, &want.lse, (1e-4, 2e-3));
    verdict.wrong.extend(near.err().map(|error| error.to_string()));

    // The backward passes start from the plain version's output.
    let rounded: Vec<f32> = want.out.iter().map(|&x| round(x, p.dtype)).collect();
    let (out, lse) = (held(gpu, p, &rounded, out_cols)?, gpu.vector(&want.lse)?);
    let views = TrainOperands { out: heads(&out, p.v), lse: lse.view, ..views };
    let d_out = held(gpu, p, &x.d_out, out_cols)?;
    let d_q = held(gpu, p, &vec![9.0; x.q.len()], q_cols)?;
    let delta = gpu.vector(&vec![9f32; want.lse.len()])?;
    for (step, tensors) in own.iter_mut().zip(&tensors) {
        step.gradients = Some([heads(&tensors.3, p.qk), heads(&tensors.4, p.v)]);
    }
    let gradient =
        OwnGradient { d_out: heads(&d_out, p.v), d_q: heads(&d_q, p.qk), delta: delta.view };
    on.own_gradient(&plan, &views, &own, &gradient)?;
    let upstream = TrainOperands { out: gradient.d_out, ..views };
    on.train_attention_queries(&plan, &upstream, delta.view, gradient.d_q)?;
    verdict.near("delta", gpu.vector_values(&delta), &want.delta);
    verdict.near("d_q", gpu.values(&d_q), &want.d_q);
    let more = |x: &[f32]| x.iter().map(|x| x + 1.0).collect::<Vec<_>>();
    for (s, tensors) in tensors.iter().enumerate() {
        verdict.near("d_own_k", gpu.values(&tensors.3), &more(&want.d_own_k[s]));
        verdict.near("d_own_v", gpu.values(&tensors.4), &more(&want.d_own_v[s]));
    }
    // Twice: the same bits each time.
    let mut earlier: Option<[Vec<f32>; 2]> = None;
    for _ in 0..2 {
        let d_k = held(gpu, p, &vec![1.0; x.k.len()], k_cols)?;
        let d_v = held(gpu, p, &vec![1.0; x.v.len()], v_cols)?;
        let written = [heads(&d_k, p.qk), heads(&d_v, p.v)];
        on.train_attention_keys(&plan, &upstream, delta.view, written)?;
        let got = [gpu.values(&d_k)?, gpu.values(&d_v)?];
        if let Some([d_k, d_v]) = &earlier {
            same("second d_k", &got[0], d_k)?;
            same("second d_v", &got[1], d_v)?;
        } else {
            verdict.near("d_k", Ok(got[0].clone()), &more(&want.d_k));
            verdict.near("d_v", Ok(got[1].clone()), &more(&want.d_v));
        }
        earlier = Some(got);
    }
    verdict.outcome()
}
