//! Attention of the training-time test against a plain version: forward with own keys and `lse`,
//! gradients of queries, keys, values and own keys, added to what is there.

use kernels::cuda::{
    AttentionVariant, DeviceHeads, Dtype, OwnGradient, OwnStep, TrainOperands, TrainPlan,
};
use rayon::prelude::*;

use super::{Gpu, Held, HeldVector, Named, Outcome, round, same, within};

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
        own_rows: (0..p.steps as u32)
            .map(|s| (0..queries as u32).map(|r| r + s).collect())
            .collect(),
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
        for (row, head) in (first..end)
            .flat_map(|row| (kv_head * group..(kv_head + 1) * group).map(move |head| (row, head)))
        {
            let (query, mixed) = ([p.heads, head, p.qk], [p.heads, head, p.v]);
            let (q, d_out) = (part(&x.q, row, query), part(&x.d_out, row, mixed));
            // Step-0 keys, then own ones.
            let seen = start..x.visible[row] as usize;
            let own = |s: usize| x.own_rows[s][row] as usize;
            let mut all: Vec<(&[f32], &[f32])> =
                seen.clone().map(|at| (part(&x.k, at, keys), part(&x.v, at, vals))).collect();
            all.extend(
                (0..p.steps)
                    .map(|s| (part(&x.own_k[s], own(s), keys), part(&x.own_v[s], own(s), vals))),
            );
            let scores: Vec<f32> = all.iter().map(|(k, _)| scale * dot(q, k)).collect();
            let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = scores.iter().map(|s| f64::from(s - most).exp()).sum();
            let lse = most + sum.ln() as f32;
            found.lse[row * p.heads + head] = lse;
            let weights: Vec<f32> = scores.iter().map(|s| (s - lse).exp()).collect();
            let out = part_mut(&mut found.out, row, mixed);
            all.iter().zip(&weights).for_each(|((_, v), w)| add(out, v, *w));
            // Kernels take it from the output as it is kept.
            let kept: Vec<f32> = out.iter().map(|&x| round(x, p.dtype)).collect();
            let delta = dot(&kept, d_out);
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

/// Where gradients start that are added to.
const EARLIER: f32 = 0.25;

/// One problem on the device.
struct Device<'a> {
    problem: &'a Problem,
    x: &'a Values,
    q: Held,
    k: Held,
    v: Held,
    visible: HeldVector<u32>,
    segments: HeldVector<u32>,
    own: Vec<Own>,
}

/// What rows made at one step, and the gradients of keys and values.
struct Own {
    rows: HeldVector<u32>,
    keys: Held,
    values: Held,
    d_keys: Held,
    d_values: Held,
}

/// A tensor [rows, heads, width] on the device, rows as the problem aligns them.
fn held(gpu: &Gpu, p: &Problem, x: &[f32], cols: usize) -> Outcome<Held> {
    let pitch = cols.next_multiple_of(p.align) - cols;
    gpu.matrix(x, [x.len() / cols, cols], p.dtype, pitch)
}

fn heads(held: &Held, width: usize) -> DeviceHeads {
    DeviceHeads::of(held.view, width, 0)
}

impl<'a> Device<'a> {
    fn new(gpu: &Gpu, p: &'a Problem, x: &'a Values) -> Outcome<Self> {
        let (k_cols, v_cols) = (p.kv_heads * p.qk, p.kv_heads * p.v);
        let own = |s: usize| -> Outcome<Own> {
            let earlier = |of: &[f32]| vec![EARLIER; of.len()];
            Ok(Own {
                rows: gpu.vector(&x.own_rows[s])?,
                keys: held(gpu, p, &x.own_k[s], k_cols)?,
                values: held(gpu, p, &x.own_v[s], v_cols)?,
                d_keys: held(gpu, p, &earlier(&x.own_k[s]), k_cols)?,
                d_values: held(gpu, p, &earlier(&x.own_v[s]), v_cols)?,
            })
        };
        let segments: Vec<u32> = x.segments.iter().flatten().map(|&at| at as u32).collect();
        Ok(Self {
            problem: p,
            x,
            q: held(gpu, p, &x.q, p.heads * p.qk)?,
            k: held(gpu, p, &x.k, k_cols)?,
            v: held(gpu, p, &x.v, v_cols)?,
            visible: gpu.vector(&x.visible)?,
            segments: gpu.vector(&segments)?,
            own: (0..p.steps).map(own).collect::<Outcome<_>>()?,
        })
    }

    fn plan(&self, variant: AttentionVariant) -> TrainPlan {
        let p = self.problem;
        let longest = |size: fn(&(usize, usize)) -> usize| p.documents.iter().map(size).max();
        TrainPlan {
            heads: p.heads,
            kv_heads: p.kv_heads,
            qk_dim: p.qk,
            v_dim: p.v,
            scale: 1.0 / (p.qk as f32).sqrt(),
            visible: self.visible.view,
            segments: self.segments.view,
            longest: [longest(|d| d.0).unwrap_or(0), longest(|d| d.1).unwrap_or(0)],
            variant: Some(variant),
        }
    }

    fn operands(&self, out: &Held, lse: &HeldVector<f32>) -> TrainOperands {
        let p = self.problem;
        TrainOperands {
            q: heads(&self.q, p.qk),
            k: heads(&self.k, p.qk),
            v: heads(&self.v, p.v),
            out: heads(out, p.v),
            lse: lse.view,
        }
    }

    fn own_steps(&self, backward: bool) -> Vec<OwnStep> {
        let [qk, v] = [self.problem.qk, self.problem.v];
        let step = |own: &Own| OwnStep {
            keys: heads(&own.keys, qk),
            values: heads(&own.values, v),
            rows: own.rows.view,
            gradients: backward.then(|| [heads(&own.d_keys, qk), heads(&own.d_values, v)]),
        };
        self.own.iter().map(step).collect()
    }

    fn forward(&self, gpu: &Gpu, variant: AttentionVariant, verdict: &mut Verdict<'_>) -> Outcome {
        let (p, want) = (self.problem, verdict.want);
        let out = held(gpu, p, &vec![9.0; self.x.d_out.len()], p.heads * p.v)?;
        let lse = gpu.vector(&vec![9f32; want.lse.len()])?;
        let (plan, views) = (self.plan(variant), self.operands(&out, &lse));
        let on = gpu.kernels.on(&gpu.stream);
        on.train_attention(&plan, &views)?;
        on.merge_own(&plan, &views, &self.own_steps(false))?;
        verdict.near("out", &gpu.values(&out)?, (&want.out, p.v), 0.0);
        let near = within("lse", &gpu.vector_values(&lse)?, &want.lse, (1e-4, 2e-3));
        verdict.wrong.extend(near.err().map(|error| error.to_string()));
        Ok(())
    }

    /// Starts from the plain version's output.
    fn backward(&self, gpu: &Gpu, variant: AttentionVariant, verdict: &mut Verdict<'_>) -> Outcome {
        let (p, x, want) = (self.problem, self.x, verdict.want);
        let rounded: Vec<f32> = want.out.iter().map(|&x| round(x, p.dtype)).collect();
        let out = held(gpu, p, &rounded, p.heads * p.v)?;
        let d_out = held(gpu, p, &x.d_out, p.heads * p.v)?;
        let d_q = held(gpu, p, &vec![9.0; x.q.len()], p.heads * p.qk)?;
        let (lse, delta) = (gpu.vector(&want.lse)?, gpu.vector(&vec![9f32; want.lse.len()])?);
        let (plan, views) = (self.plan(variant), self.operands(&out, &lse));
        let gradient =
            OwnGradient { d_out: heads(&d_out, p.v), d_q: heads(&d_q, p.qk), delta: delta.view };
        let on = gpu.kernels.on(&gpu.stream);
        on.own_gradient(&plan, &views, &self.own_steps(true), &gradient)?;
        let upstream = TrainOperands { out: gradient.d_out, ..views };
        on.train_attention_queries(&plan, &upstream, delta.view, (gradient.d_q, p.steps > 0))?;
        verdict.near("delta", &gpu.vector_values(&delta)?, (&want.delta, want.delta.len()), 0.0);
        verdict.near("d_q", &gpu.values(&d_q)?, (&want.d_q, p.qk), 0.0);
        for (s, own) in self.own.iter().enumerate() {
            verdict.near("d_own_k", &gpu.values(&own.d_keys)?, (&want.d_own_k[s], p.qk), EARLIER);
            verdict.near("d_own_v", &gpu.values(&own.d_values)?, (&want.d_own_v[s], p.v), EARLIER);
        }
        // Twice: the same bits each time.
        let mut results = Vec::new();
        for _ in 0..2 {
            let d_k = held(gpu, p, &vec![EARLIER; x.k.len()], p.kv_heads * p.qk)?;
            let d_v = held(gpu, p, &vec![EARLIER; x.v.len()], p.kv_heads * p.v)?;
            let written = [heads(&d_k, p.qk), heads(&d_v, p.v)];
            on.train_attention_keys(&plan, &upstream, delta.view, written)?;
            results.push([gpu.values(&d_k)?, gpu.values(&d_v)?]);
        }
        verdict.near("d_k", &results[0][0], (&want.d_k, p.qk), EARLIER);
        verdict.near("d_v", &results[0][1], (&want.d_v, p.v), EARLIER);
        same("d_k and d_v, twice", &results[1].concat(), &results[0].concat())
    }
}

/// Collects what is wrong, so that one wrong kernel does not hide another.
struct Verdict<'a> {
    want: &'a Found,
    dtype: Dtype,
    wrong: Vec<String>,
}

impl Verdict<'_> {
    /// Allowed differences grow with the root mean squares of row and tensor: rounded weights add
    /// up along a row. `earlier` is in `got` alone.
    fn near(&mut self, name: &str, got: &[f32], (want, width): (&[f32], usize), earlier: f32) {
        let rms = |x: &[f32]| (x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32).sqrt();
        let (of_row, of_all, least, relative) = match self.dtype {
            Dtype::Bf16 => (0.02, 0.01, 1e-3, 0.015),
            Dtype::F32 => (1e-5, 1e-5, 2e-5, 1e-4),
        };
        let base = of_all * rms(want) + least;
        let rows = got.chunks(width).zip(want.chunks(width)).enumerate();
        let wrong: Vec<String> = rows
            .filter_map(|(row, (got, want))| {
                let allowed = (relative, of_row * rms(want) + base);
                let want: Vec<f32> = want.iter().map(|x| x + earlier).collect();
                within(&format!("{name}, row of a head {row}"), got, &want, allowed).err()
            })
            .map(|error| error.to_string())
            .collect();
        if let Some(first) = wrong.first() {
            self.wrong.push(format!("{} rows wrong, {first} (rms {})", wrong.len(), rms(want)));
        }
    }
}

fn compare(gpu: &mut Gpu, variant: AttentionVariant, problem: &Problem) -> Outcome {
    let x = values(gpu, problem);
    let want = plain(problem, &x);
    let device = Device::new(gpu, problem, &x)?;
    let mut verdict = Verdict { want: &want, dtype: problem.dtype, wrong: Vec::new() };
    device.forward(gpu, variant, &mut verdict)?;
    device.backward(gpu, variant, &mut verdict)?;
    if verdict.wrong.is_empty() {
        return Ok(());
    }
    Err(format!("{variant:?} {problem:?}: {}", verdict.wrong.join("; ")).into())
}
