//! Times of the kernels at one rank's share of Kimi-K2.5, beside what the device's copies and
//! products reach in the same run.

use std::error::Error;

use kernels::cuda::cudarc::driver::sys::CUevent_flags;
use kernels::cuda::{
    Attention, AttentionVariant, DeviceBuffer, DeviceHeads, DeviceMatrix, DevicePanels, Dtype,
    EXPERT_ALIGN, ExpertWeights, Fp8BlockWeight, Int4Weight, LatentHeads, Launcher, Nvfp4Weight,
    Permutation, Product, RopeView, RouteRule, RoutingViews, StateStats, copy_on_device,
};

use kernels::router::Scoring;

use crate::parity::{Gpu, Outcome};

/// Tokens of a batch.
const TOKENS: usize = 32_768;
const HIDDEN: usize = 7168;
/// Experts of one rank, and of the model.
const HELD: usize = 48;
const EXPERTS: usize = 384;
const TOP_K: usize = 8;

/// What a time is compared with.
pub(crate) enum Work {
    /// Bytes read and written.
    Bytes(usize),
    /// Floating point operations.
    Flops(f64),
}

pub(crate) struct Bench<'a> {
    pub(crate) gpu: &'a mut Gpu,
    only: &'a str,
    /// Bytes a second of a copy on the device.
    copy: f64,
    /// Operations a second of a large product.
    product: f64,
}

/// Measures everything whose name contains `only`.
pub(crate) fn run(gpu: &mut Gpu, only: &str) -> Result<(), Box<dyn Error>> {
    let mut bench = Bench { gpu, only, copy: 0.0, product: 0.0 };
    bench.ceilings()?;
    bench.rows()?;
    bench.experts()?;
    bench.weights()?;
    bench.states()?;
    bench.attention()?;
    bench.train_attention()?;
    bench.train_loss()?;
    bench.expert_products()?;
    bench.products()
}

impl Bench<'_> {
    /// Seconds of one of several calls after a first one that is not counted.
    fn time(&mut self, mut call: impl FnMut(&mut Gpu) -> Outcome) -> Outcome<f64> {
        call(self.gpu)?;
        let context = self.gpu.kernels.context().clone();
        let event = || context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let mut best = f64::INFINITY;
        for calls in [3, 10, 10] {
            let (start, end) = (event()?, event()?);
            start.record(&self.gpu.stream)?;
            for _ in 0..calls {
                call(self.gpu)?;
            }
            end.record(&self.gpu.stream)?;
            end.synchronize()?;
            best = best.min(f64::from(start.elapsed_ms(&end)?) * 1e-3 / f64::from(calls));
        }
        Ok(best)
    }

    fn measure(
        &mut self,
        name: &str,
        work: &Work,
        call: impl FnMut(&mut Gpu) -> Outcome,
    ) -> Outcome<f64> {
        if !name.contains(self.only) {
            return Ok(0.0);
        }
        crate::watchdog::step(name);
        let seconds = self.time(call)?;
        let (rate, unit, limit, of) = match *work {
            Work::Bytes(bytes) => (bytes as f64 / seconds * 1e-9, "GB/s", self.copy, "copy"),
            Work::Flops(flops) => (flops / seconds * 1e-12, "TFLOP/s", self.product, "product"),
        };
        let share = if limit > 0.0 { rate / limit * 100.0 } else { 100.0 };
        println!(
            "time {name:44} {:9.1} us {rate:8.1} {unit:7} {share:5.1} % of {of}",
            seconds * 1e6
        );
        Ok(rate)
    }

    /// Launches of kernels, timed.
    pub(crate) fn launches(
        &mut self,
        name: &str,
        work: &Work,
        call: impl Fn(Launcher<'_>) -> Result<(), kernels::cuda::CudaError>,
    ) -> Outcome {
        self.measure(name, work, |gpu| Ok(call(gpu.kernels.on(&gpu.stream))?))?;
        Ok(())
    }

    /// Memory full of random numbers of a type.
    pub(crate) fn filled(&mut self, values: usize, dtype: Dtype) -> Outcome<DeviceBuffer> {
        let bytes = values * dtype.size();
        let buffer = DeviceBuffer::new(self.gpu.kernels.context(), bytes)?;
        let block = self.gpu.rng.values(values.min(1 << 20), dtype);
        let block = self.gpu.matrix(&block, [1, block.len()], dtype, 0)?;
        let step = block.view.cols * dtype.size();
        for at in (0..bytes).step_by(step.max(1)) {
            let part = step.min(bytes - at);
            let target = buffer.address() + at as u64;
            copy_on_device(&self.gpu.stream, target, block.view.address, part)?;
        }
        self.gpu.stream.synchronize()?;
        Ok(buffer)
    }

    pub(crate) fn matrix(
        &mut self,
        shape: [usize; 2],
        dtype: Dtype,
    ) -> Outcome<(DeviceBuffer, DeviceMatrix)> {
        let buffer = self.filled(shape[0] * shape[1], dtype)?;
        let view = buffer.matrix(shape, dtype);
        Ok((buffer, view))
    }

    fn ceilings(&mut self) -> Outcome {
        let only = std::mem::take(&mut self.only);
        let bytes = 1 << 30;
        let (from, to) =
            (self.filled(bytes / 2, Dtype::Bf16)?, self.filled(bytes / 2, Dtype::Bf16)?);
        self.copy = self.measure("ceiling: copy of 1 GiB", &Work::Bytes(2 * bytes), |gpu| {
            Ok(copy_on_device(&gpu.stream, to.address(), from.address(), bytes)?)
        })?;
        let side = 8192;
        let (_a, a) = self.matrix([side, side], Dtype::Bf16)?;
        let (_b, b) = self.matrix([side, side], Dtype::Bf16)?;
        let (_c, c) = self.matrix([side, side], Dtype::Bf16)?;
        let work = Work::Flops(2.0 * (side as f64).powi(3));
        self.product = self.measure("ceiling: product 8192^3 bf16", &work, |gpu| {
            Ok(gpu.blas.matmul(&c, &a, &b, Product::LINEAR)?)
        })?;
        self.only = only;
        Ok(())
    }

    fn rows(&mut self) -> Outcome {
        let t = TOKENS;
        let (_x, x) = self.matrix([t, HIDDEN], Dtype::F32)?;
        let (_y, y) = self.matrix([t, HIDDEN], Dtype::Bf16)?;
        let (_z, z) = self.matrix([t, HIDDEN], Dtype::Bf16)?;
        let weight = self.filled(HIDDEN, Dtype::F32)?;
        let w = weight.vector(HIDDEN);
        let size = t * HIDDEN;
        self.launches("rms_norm f32 -> bf16 [32k, 7168]", &Work::Bytes(size * 6), |on| {
            on.rms_norm(&y, &x, w, 1e-5)
        })?;
        self.launches("rms_norm bf16 [32k, 7168]", &Work::Bytes(size * 4), |on| {
            on.rms_norm(&y, &z, w, 1e-5)
        })?;
        self.launches("add_rms_norm f32 + bf16 -> bf16", &Work::Bytes(size * 12), |on| {
            on.add_rms_norm(&y, (&x, &z), w, 1e-5)
        })?;
        self.launches("add_rms_norm bf16", &Work::Bytes(size * 8), |on| {
            on.add_rms_norm(&y, (&z, &z), w, 1e-5)
        })?;
        self.launches("copy f32 -> bf16", &Work::Bytes(size * 6), |on| on.copy(&y, &x))?;
        self.launches("add bf16 to f32", &Work::Bytes(size * 10), |on| on.add(&x, &y))?;
        let (_gate, gate_up) = self.matrix([t, 4096], Dtype::Bf16)?;
        let (_act, act) = self.matrix([t, 2048], Dtype::Bf16)?;
        let (gate, up) = (gate_up.columns(0..2048), gate_up.columns(2048..4096));
        self.launches("silu_mul bf16 [32k, 2 x 2048]", &Work::Bytes(t * 2048 * 6), |on| {
            on.silu_mul(&act, &gate, &up)
        })?;
        let ids = vec![0; t].into_iter().map(|_: i32| self.gpu.rng.below(20_480) as u32);
        let ids = ids.collect::<Vec<_>>();
        let ids = self.gpu.vector(&ids)?;
        let (_table, table) = self.matrix([20_480, HIDDEN], Dtype::Bf16)?;
        self.launches("embed bf16 -> f32", &Work::Bytes(size * 6), |on| {
            on.embed(&x, &table, ids.view, 0)
        })?;
        self.heads()
    }

    fn heads(&mut self) -> Outcome {
        let t = TOKENS;
        let (_q, q) = self.matrix([t, 8 * 192], Dtype::Bf16)?;
        let angles = self.filled(t * 32, Dtype::F32)?;
        let view = RopeView {
            cos: angles.vector(t * 32),
            sin: angles.vector(t * 32),
            pairs: 32,
            heads: 8,
            interleaved: true,
        };
        let rotated = DeviceHeads::of(q, 192, 128);
        self.launches("rope 8 heads of 64", &Work::Bytes(t * 8 * 64 * 4 + t * 256), |on| {
            on.rope(&rotated, &view)
        })?;
        let (_kv, kv) = self.matrix([t, 8 * 256], Dtype::Bf16)?;
        let (_pe, pe) = self.matrix([t, 64], Dtype::Bf16)?;
        let (_k, k) = self.matrix([t, 8 * 192], Dtype::Bf16)?;
        let (_v, v) = self.matrix([t, 8 * 128], Dtype::Bf16)?;
        let dims = LatentHeads { heads: 8, nope: 128, rope: 64, v: 128 };
        let bytes = Work::Bytes(t * 2 * (8 * 256 + 64 + 8 * 320));
        self.launches("expand_latent 8 heads", &bytes, |on| {
            on.expand_latent((&k, &v), &kv, &pe, &dims)
        })
    }

    fn experts(&mut self) -> Outcome {
        let (t, choices) = (TOKENS, TOKENS * TOP_K);
        let (_logits, logits) = self.matrix([t, EXPERTS], Dtype::F32)?;
        let bias = self.filled(EXPERTS, Dtype::F32)?;
        let indices = self.gpu.vector(&vec![0u32; choices])?;
        let weights = self.gpu.vector(&vec![0f32; choices])?;
        let margins = self.gpu.vector(&vec![0f32; t])?;
        let rule = RouteRule {
            scoring: Scoring::Sigmoid,
            top_k: TOP_K,
            groups: 1,
            kept_groups: 1,
            normalise: true,
            scale: 2.827,
        };
        let out =
            RoutingViews { indices: indices.view, weights: weights.view, margins: margins.view };
        let bias = bias.vector(EXPERTS);
        self.launches("route top 8 of 384", &Work::Bytes(t * EXPERTS * 4), |on| {
            on.route(&logits, bias, &rule, &out)
        })?;
        // Even loads: one choice in eight falls on this rank.
        let even: Vec<u32> = (0..choices).map(|_| self.gpu.rng.below(EXPERTS) as u32).collect();
        let even = self.gpu.vector(&even)?;
        let vector = |len| self.gpu.vector(&vec![0u32; len]);
        let counts = vector(HELD)?;
        let offsets = vector(HELD + 1)?;
        let (sources, places) = (vector(choices)?, vector(choices)?);
        let scratch = vector(Permutation::scratch_len(choices, HELD))?;
        let permutation = Permutation {
            align: 1,
            first: 96,
            counts: counts.view,
            offsets: offsets.view,
            sources: sources.view,
            places: places.view,
            scratch: scratch.view,
        };
        self.launches("permute 256k choices, 48 of 384", &Work::Bytes(choices * 12), |on| {
            on.permute(even.view, TOP_K, &permutation)
        })?;
        let on = self.gpu.kernels.on(&self.gpu.stream);
        on.permute(even.view, TOP_K, &permutation)?;
        let total = self.gpu.vector_values(&offsets)?[HELD] as usize;
        let (_x, x) = self.matrix([t, HIDDEN], Dtype::Bf16)?;
        let (_g, grouped) = self.matrix([total, HIDDEN], Dtype::Bf16)?;
        let (_o, out) = self.matrix([t, HIDDEN], Dtype::F32)?;
        let rows = sources.view.range(0..total);
        let bytes = Work::Bytes(total * HIDDEN * 4);
        self.launches("gather_rows bf16", &bytes, |on| on.gather_rows(&grouped, &x, rows))?;
        let bytes = Work::Bytes(total * HIDDEN * 2 + t * HIDDEN * 8);
        self.launches("combine bf16 -> f32", &bytes, |on| {
            on.combine(&out, &grouped, places.view, weights.view)
        })
    }

    fn weights(&mut self) -> Outcome {
        let [rows, cols] = [4096, HIDDEN];
        // Several weights in turn, so that none is still in the second-level cache.
        let turns = 8;
        let (_out, out) = self.matrix([turns * rows, cols], Dtype::Bf16)?;
        let all = rows * turns;
        let packed = self.filled(all * cols / 4, Dtype::Bf16)?;
        let scale = self.filled(all * cols / 32, Dtype::Bf16)?;
        let int4 = Int4Weight {
            packed: packed.vector(all * cols / 8),
            scale: scale.vector(all * cols / 32),
            group: 32,
        };
        let bytes = all * cols * 2;
        let name = "dequant_int4 8 x [4096, 7168]";
        let work = Work::Bytes(bytes + all * cols / 2 + all * cols / 16);
        self.launches(name, &work, |on| on.dequant_int4(&out, &int4))?;
        let codes = self.filled(all * cols / 2, Dtype::Bf16)?;
        let factors = self.filled(all / 128 * cols / 128, Dtype::F32)?;
        let fp8 = Fp8BlockWeight {
            weight: codes.vector(all * cols),
            scale_inv: factors.vector(all / 128 * cols / 128),
            block: 128,
        };
        let work = Work::Bytes(bytes + all * cols);
        self.launches("dequant_fp8_block", &work, |on| on.dequant_fp8_block(&out, &fp8))?;
        let fp4 = Nvfp4Weight {
            packed: codes.vector(all * cols / 2),
            scale: packed.vector(all * cols / 16),
            global: 0.5,
        };
        let work = Work::Bytes(bytes + all * cols / 2 + all * cols / 16);
        self.launches("dequant_nvfp4", &work, |on| on.dequant_nvfp4(&out, &fp4))
    }

    fn states(&mut self) -> Outcome {
        let t = TOKENS;
        let (_x, x) = self.matrix([t, HIDDEN], Dtype::F32)?;
        let context = self.gpu.kernels.context().clone();
        let stats = DeviceBuffer::new(&context, t * size_of::<StateStats>())?;
        let segments = DeviceBuffer::new(&context, 16 * size_of::<StateStats>())?;
        let bounds: Vec<u32> = (0..=16).map(|s| s * t as u32 / 16).collect();
        let bounds = self.gpu.vector(&bounds)?;
        self.launches("row_stats + segment_stats f32", &Work::Bytes(t * HIDDEN * 4), |on| {
            on.row_stats(&x, stats.vector(t))?;
            on.segment_stats(segments.vector(16), stats.vector(t), bounds.view)
        })?;
        let codes = DeviceBuffer::new(&context, t * HIDDEN)?;
        let scales = DeviceBuffer::new(&context, t * 4)?;
        let errors = DeviceBuffer::new(&context, t * 8)?;
        self.launches("quantise_fp8_rows f32", &Work::Bytes(t * HIDDEN * 5), |on| {
            let codes = (codes.vector(t * HIDDEN), HIDDEN);
            on.quantise_fp8_rows(codes, scales.vector(t), errors.vector(t), &x)
        })
    }

    fn attention(&mut self) -> Outcome {
        for (heads, kv_heads, [qk, v, shared], length) in [
            (8, 8, [192, 128, 64], 2048),
            (8, 8, [192, 128, 0], 2048),
            (8, 8, [192, 128, 64], 512),
            (8, 8, [192, 128, 64], 8192),
            (32, 8, [128, 128, 0], 2048),
            (9, 3, [64, 64, 0], 2048),
        ] {
            self.attention_at([heads, kv_heads], [qk, v, shared], length)?;
        }
        Ok(())
    }

    fn attention_at(
        &mut self,
        [heads, kv_heads]: [usize; 2],
        [qk, v, shared]: [usize; 3],
        length: usize,
    ) -> Outcome {
        let (t, own) = (TOKENS, qk - shared);
        let (_q, q) = self.matrix([t, heads * qk], Dtype::Bf16)?;
        let (_kv, kv) = self.matrix([t, kv_heads * (own + v)], Dtype::Bf16)?;
        let (_pe, pe) = self.matrix([t, shared.max(8)], Dtype::Bf16)?;
        let (_out, out) = self.matrix([t, heads * v], Dtype::Bf16)?;
        let starts: Vec<u32> = (0..=t / length).map(|s| (s * length) as u32).collect();
        let starts = self.gpu.vector(&starts)?;
        let call = Attention {
            out: DeviceHeads::of(out, v, 0),
            q: DeviceHeads::of(q, qk, 0),
            k: DeviceHeads::of(kv, own + v, 0),
            k_shared: (shared > 0).then_some(pe),
            v: DeviceHeads::of(kv, own + v, own),
            lse: None,
            cu_q: starts.view,
            cu_k: starts.view,
            longest: length,
            heads,
            kv_heads,
            qk_dim: qk,
            v_dim: v,
            scale: 1.0 / (qk as f32).sqrt(),
        };
        let pairs = t as f64 * length as f64 / 2.0;
        let work = Work::Flops(2.0 * heads as f64 * (qk + v) as f64 * pairs);
        for variant in [AttentionVariant::Mma, AttentionVariant::Wgmma] {
            let hopper = self.gpu.kernels.arch().name() == "sm_90a" && v == 128;
            if variant == AttentionVariant::Wgmma && !hopper {
                continue;
            }
            let name =
                format!("attention {variant:?} {heads}/{kv_heads} {qk}/{v}+{shared} x {length}");
            self.launches(&name, &work, |on| on.attention_by(variant, &call))?;
        }
        Ok(())
    }

    /// All experts of one rank at once, INT4 decoded in the products.
    fn expert_products(&mut self) -> Outcome {
        if !self.gpu.kernels.on(&self.gpu.stream).has_expert_products() {
            return Ok(());
        }
        for tokens in [TOKENS, 2 * TOKENS] {
            let mut counts = [0usize; HELD];
            for _ in 0..tokens * TOP_K {
                if let Some(count) = counts.get_mut(self.gpu.rng.below(EXPERTS)) {
                    *count += 1;
                }
            }
            let mut offsets = vec![0u32];
            for count in counts {
                let start = offsets.last().copied().unwrap_or(0);
                offsets.push(start + count.next_multiple_of(EXPERT_ALIGN) as u32);
            }
            let rows = offsets.last().copied().unwrap_or(0) as usize;
            let offsets = self.gpu.vector(&offsets)?;
            let real = counts.iter().sum::<usize>() as f64;
            for ([out, input], gate_up) in [([4096, HIDDEN], true), ([HIDDEN, 2048], false)] {
                let codes = self.filled(HELD * out * input / 4, Dtype::Bf16)?;
                let scales = self.filled(HELD * out * input / 32, Dtype::Bf16)?;
                let weights = ExpertWeights {
                    codes: codes.vector(HELD * out * input / 8),
                    scales: scales.vector(HELD * out * input / 32),
                    experts: HELD,
                    out,
                    input,
                };
                let x = self.filled(rows * input, Dtype::Bf16)?;
                let x = DevicePanels { address: x.address(), rows, cols: input };
                let (_to, to) = self.matrix([rows, out], Dtype::Bf16)?;
                let panels = DevicePanels { address: to.address, rows, cols: out / 2 };
                let work = Work::Flops(2.0 * real * (out * input) as f64);
                let name = format!("experts {tokens} x {out} x {input}, int4");
                self.launches(&name, &work, |on| match gate_up {
                    true => on.experts_gate_up(&panels, &x, (&weights, offsets.view)),
                    false => on.experts_down(&to, &x, (&weights, offsets.view)),
                })?;
            }
        }
        Ok(())
    }

    fn products(&mut self) -> Outcome {
        // Rows, outputs, inputs: projections of one rank, then one expert.
        for [m, n, k] in [
            [TOKENS, 2112, HIDDEN],
            [TOKENS, 1536, 1536],
            [TOKENS, 2048, 512],
            [TOKENS, HIDDEN, 1024],
            [682, 4096, HIDDEN],
            [682, HIDDEN, 2048],
            [1365, 4096, HIDDEN],
            [1365, HIDDEN, 2048],
        ] {
            let (_a, a) = self.matrix([m, k], Dtype::Bf16)?;
            let (_b, b) = self.matrix([n, k], Dtype::Bf16)?;
            let (_c, c) = self.matrix([m, n], Dtype::Bf16)?;
            let work = Work::Flops(2.0 * m as f64 * n as f64 * k as f64);
            self.measure(&format!("product {m} x {n} x {k}"), &work, |gpu| {
                Ok(gpu.blas.matmul(&c, &a, &b, Product::LINEAR)?)
            })?;
        }
        Ok(())
    }
}
