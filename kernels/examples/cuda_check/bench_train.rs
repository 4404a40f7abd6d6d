//! Times of attention and loss of training at the sizes of a Kimi-K2.5 draft, part by part.

use kernels::cuda::{
    AttentionVariant, Comparison, DeviceBuffer, DeviceHeads, Dtype, OwnGradient, OwnStep, RowLoss,
    RunningSoftmax, TeacherViews, TrainOperands, TrainPlan,
};

use crate::bench::{Bench, Work};
use crate::parity::Outcome;

/// Own steps of the last of seven steps.
const STEPS: usize = 6;

/// Query rows, keys of a document, documents, and sizes of the heads.
#[derive(Clone, Copy)]
struct Sizes {
    rows: usize,
    keys: usize,
    documents: usize,
    heads: [usize; 2],
    widths: [usize; 2],
}

impl Sizes {
    fn name(&self, part: &str) -> String {
        let Self { rows, keys, documents, heads: [heads, kv_heads], widths: [qk, v] } = self;
        format!("train {part} {heads}/{kv_heads} {qk}/{v} {rows} of {keys} x {documents}")
    }
}

impl Bench<'_> {
    /// The parts of the attention of one step.
    pub(crate) fn train_attention(&mut self) -> Outcome {
        let kimi =
            Sizes { rows: 4096, keys: 4096, documents: 1, heads: [64, 64], widths: [128, 128] };
        self.train_attention_at(&kimi)?;
        self.train_attention_at(&Sizes { rows: 2048, ..kimi })?;
        self.train_attention_at(&Sizes { rows: 2048, keys: 2048, ..kimi })?;
        self.train_attention_at(&Sizes { heads: [64, 8], ..kimi })?;
        self.train_attention_at(&Sizes { widths: [192, 128], ..kimi })?;
        let small = Sizes { heads: [9, 3], widths: [64, 64], documents: 8, ..kimi };
        self.train_attention_at(&small)
    }

    fn held_heads(
        &mut self,
        [rows, heads, width]: [usize; 3],
    ) -> Outcome<(DeviceBuffer, DeviceHeads)> {
        let (buffer, view) = self.matrix([rows, heads * width], Dtype::Bf16)?;
        Ok((buffer, DeviceHeads::of(view, width, 0)))
    }

    fn train_attention_at(&mut self, sizes: &Sizes) -> Outcome {
        let Sizes { rows, keys, documents, heads: [heads, kv_heads], widths: [qk, v] } = *sizes;
        let (queries, all_keys) = (rows * documents, keys * documents);
        let (_q, q) = self.held_heads([queries, heads, qk])?;
        let (_d_q, d_q) = self.held_heads([queries, heads, qk])?;
        let (_out, out) = self.held_heads([queries, heads, v])?;
        let (_d_out, d_out) = self.held_heads([queries, heads, v])?;
        let (_k, k) = self.held_heads([all_keys, kv_heads, qk])?;
        let (_v, value) = self.held_heads([all_keys, kv_heads, v])?;
        let (_d_k, d_k) = self.held_heads([all_keys, kv_heads, qk])?;
        let (_d_v, d_v) = self.held_heads([all_keys, kv_heads, v])?;
        // Answers are the end of each document.
        let end = |row: usize| (row / rows * keys + keys - rows + row % rows + 1) as u32;
        let visible = self.gpu.vector(&(0..queries).map(end).collect::<Vec<_>>())?;
        let bounds: Vec<u32> = (0..documents)
            .flat_map(|d| [d * rows, (d + 1) * rows, d * keys, (d + 1) * keys].map(|at| at as u32))
            .collect();
        let segments = self.gpu.vector(&bounds)?;
        let lse = self.gpu.vector(&vec![8f32; queries * heads])?;
        let delta = self.gpu.vector(&vec![0f32; queries * heads])?;
        let plan = TrainPlan {
            heads,
            kv_heads,
            qk_dim: qk,
            v_dim: v,
            scale: 1.0 / (qk as f32).sqrt(),
            visible: visible.view,
            segments: segments.view,
            longest: [rows, keys],
            variant: None,
        };
        let views = TrainOperands { q, k, v: value, out, lse: lse.view };
        let gradient = OwnGradient { d_out, d_q, delta: delta.view };
        self.step_zero(sizes, &plan, &views, (&gradient, [d_k, d_v]))?;
        self.own_keys(sizes, &plan, &views, &gradient)
    }

    /// Against the step-0 keys.
    fn step_zero(
        &mut self,
        sizes: &Sizes,
        plan: &TrainPlan,
        views: &TrainOperands,
        (gradient, of_keys): (&OwnGradient, [DeviceHeads; 2]),
    ) -> Outcome {
        let Sizes { rows, keys, documents, heads: [heads, _], widths: [qk, v] } = *sizes;
        let pairs = (rows * documents * heads) as f64 * (keys as f64 - rows as f64 / 2.0);
        let products = |of: usize| Work::Flops(2.0 * pairs * of as f64);
        let upstream = TrainOperands { out: gradient.d_out, ..*views };
        for variant in [AttentionVariant::Mma, AttentionVariant::Wgmma] {
            if variant == AttentionVariant::Wgmma && self.gpu.kernels.arch().name() != "sm_90a" {
                continue;
            }
            let plan = TrainPlan { variant: Some(variant), ..*plan };
            let named = |part: &str| sizes.name(&format!("{part} {variant:?}"));
            self.launches(&named("forward"), &products(qk + v), |on| {
                on.train_attention(&plan, views)
            })?;
            self.launches(&named("keys"), &products(2 * (qk + v)), |on| {
                on.train_attention_keys(&plan, &upstream, gradient.delta, of_keys)
            })?;
            self.launches(&named("queries"), &products(2 * qk + v), |on| {
                on.train_attention_queries(&plan, &upstream, gradient.delta, (gradient.d_q, true))
            })?;
        }
        Ok(())
    }

    /// Keys that rows made themselves, as at the last step.
    fn own_keys(
        &mut self,
        sizes: &Sizes,
        plan: &TrainPlan,
        views: &TrainOperands,
        gradient: &OwnGradient,
    ) -> Outcome {
        let Sizes { rows, documents, heads: [heads, kv_heads], widths: [qk, v], .. } = *sizes;
        let queries = rows * documents;
        let places = self.gpu.vector(&(0..queries as u32).collect::<Vec<_>>())?;
        let (mut held, mut own) = (Vec::new(), Vec::new());
        for _ in 0..STEPS {
            let mut tensor = |width: usize| -> Outcome<DeviceHeads> {
                let (buffer, view) = self.held_heads([queries, kv_heads, width])?;
                held.push(buffer);
                Ok(view)
            };
            let (keys, values) = (tensor(qk)?, tensor(v)?);
            let gradients = Some([tensor(qk)?, tensor(v)?]);
            own.push(OwnStep { keys, values, rows: places.view, gradients });
        }
        let row = 2 * queries * heads;
        let own_row = 2 * queries * kv_heads * (qk + v);
        let bytes = Work::Bytes(row * (qk + 2 * v) + STEPS * own_row);
        let forward = own.iter().map(|step| OwnStep { gradients: None, ..*step });
        let forward: Vec<_> = forward.collect();
        self.launches(&sizes.name("merge_own"), &bytes, |on| on.merge_own(plan, views, &forward))?;
        let bytes = Work::Bytes(row * 2 * (qk + v) + 3 * STEPS * own_row);
        self.launches(&sizes.name("own_gradient"), &bytes, |on| {
            on.own_gradient(plan, views, &own, gradient)
        })?;
        let bytes = Work::Bytes(row * 2 * v);
        self.launches(&sizes.name("delta"), &bytes, |on| {
            on.own_gradient(plan, views, &[], gradient)
        })
    }

    /// The softmaxes of teacher and draft: blocks as the trainer makes them.
    pub(crate) fn train_loss(&mut self) -> Outcome {
        let (states, block, rows, draft) = (4096, 8192, 2048, 32_000);
        let (_logits, logits) = self.matrix([states, block], Dtype::F32)?;
        let numbers = self.filled(2 * states, Dtype::F32)?;
        let top = self.gpu.vector(&vec![0u32; states])?;
        let running = RunningSoftmax {
            most: numbers.vector(states),
            total: numbers.vector(states),
            top: top.view,
        };
        let work = Work::Bytes(states * block * 4);
        self.launches("train scan [4096, 8192]", &work, |on| {
            on.scan_vocabulary(&logits, 0, &running)
        })?;
        let (_teacher, teacher) = self.matrix([states, draft], Dtype::F32)?;
        let (_draft, draft_logits) = self.matrix([rows, draft], Dtype::F32)?;
        let (_gradient, gradient) = self.matrix([rows, draft], Dtype::Bf16)?;
        let (_outcomes, outcomes) = self.matrix([rows, 3], Dtype::F32)?;
        let lse = self.gpu.vector(&vec![11f32; states])?;
        let work = Work::Bytes(states * draft * 4);
        self.launches("train log_sum [4096, 32000]", &work, |on| on.log_sum(lse.view, &teacher))?;
        let ids = self.gpu.vector(&(0..draft as u32).collect::<Vec<_>>())?;
        let places = self.gpu.vector(&(0..rows as u32).collect::<Vec<_>>())?;
        let weights = self.gpu.vector(&vec![1f32; rows])?;
        let views = TeacherViews {
            logits: teacher,
            draft_lse: lse.view,
            running,
            first_state: 0,
            ids: ids.view,
        };
        let call = Comparison {
            logits: draft_logits,
            gradient: Some(gradient),
            outcomes,
            states: places.view,
            weights: weights.view,
            loss: RowLoss::Cross,
        };
        let work = Work::Bytes(rows * draft * 10);
        self.launches("train compare [2048, 32000]", &work, |on| on.compare(&call, &views))
    }
}
