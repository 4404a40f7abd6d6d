//! [`RankGroup`]: a model spread over ranks, as the target that the pipeline sees. Checks requests
//! before the ranks see them and replies before anybody else does.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rayon::{ThreadPool, ThreadPoolBuilder};
use shared::LayerIndex;

use super::collective::{Collective, Solo, Threads};
use super::cpu::CpuOps;
use super::error::TargetError;
use super::model::{
    CapturedLayer, ForwardOutput, ForwardRequest, Model, Parts, StageTimes, Wanted,
};
use super::ops::RouterChoice;
use super::options::{Device, EngineOptions};
use super::plan::RankPlan;
use super::ranks::{EndGroup, RankWorker, Ranks};
use super::spec::TargetSpec;
use super::weights::Checkpoint;
use super::{CacheId, ExtendRequest, Extension, TargetModel};
use crate::batch::TokenBatch;
use crate::capture::{Capture, LayerCapture};

/// A target model on one or more ranks.
pub struct RankGroup {
    spec: TargetSpec,
    plans: Vec<RankPlan>,
    ranks: Ranks,
    /// Tokens in every cache.
    caches: HashMap<CacheId, usize>,
}

/// Everything that a forward can return; what was not wanted is empty.
#[derive(Clone, Debug, PartialEq)]
pub struct Probe {
    /// Outputs of the wanted layers.
    pub capture: Capture,
    /// [tokens, hidden] embeddings.
    pub embeddings: Vec<f32>,
    /// [tokens, hidden] last layer's output after the final norm.
    pub normed: Vec<f32>,
    /// [tokens, vocab] logits.
    pub logits: Vec<f32>,
    /// Layer and choice of every router that ran.
    pub routers: Vec<(usize, RouterChoice)>,
    /// Time per stage on rank 0.
    pub times: StageTimes,
}

impl RankGroup {
    /// Reads the model and starts its ranks. See [`super::open`].
    pub fn open(options: &EngineOptions) -> Result<Self, TargetError> {
        if options.device == Device::Cuda {
            let reason = "this build runs targets on the CPU only; use --device cpu".to_owned();
            return Err(TargetError::Device { device: "cuda", reason });
        }
        let spec = TargetSpec::read(&options.dir)?;
        let plans = options.plans(&spec)?;
        let checkpoint = Checkpoint::open(&options.dir)?;
        let ranks = start_cpu(options, &spec, &plans, checkpoint)?;
        Ok(Self { spec, plans, ranks, caches: HashMap::new() })
    }

    /// Runs a batch and returns whatever is wanted, for checks and benches.
    pub fn probe(&mut self, batch: &TokenBatch, wanted: Wanted) -> Result<Probe, TargetError> {
        self.run(ForwardRequest {
            ids: batch.input_ids(),
            cu_seqlens: batch.cu_seqlens().to_vec(),
            cache: None,
            wanted,
        })
    }

    fn run(&mut self, request: ForwardRequest) -> Result<Probe, TargetError> {
        self.check(&request)?;
        let (tokens, wanted) = (request.ids.len(), request.wanted.clone());
        let mut outputs = self.ranks.forward(request)?;
        let logits = self.gather_logits(&outputs, if wanted.logits { tokens } else { 0 })?;
        let shape = [tokens, self.spec.hidden_size];
        for (rank, output) in outputs.iter().enumerate() {
            check_shapes(rank, output, &wanted.layers, shape)?;
        }
        let output = outputs.swap_remove(0);
        Ok(Probe {
            capture: self.gather(output.captured, &wanted.layers, shape)?,
            embeddings: output.embeddings,
            normed: output.normed,
            logits,
            routers: output.routers,
            times: output.times,
        })
    }

    fn check(&self, request: &ForwardRequest) -> Result<(), TargetError> {
        let TargetSpec { vocab_size, num_layers, max_position_embeddings: limit, .. } = self.spec;
        if request.ids.is_empty() {
            return Err(TargetError::EmptyBatch);
        }
        let is_unknown = |id: &u32| *id as usize >= vocab_size;
        if let Some(position) = request.ids.iter().position(is_unknown) {
            return Err(TargetError::TokenId { position, id: request.ids[position], vocab_size });
        }
        let kept = request.cache.map_or(0, |(_, keep)| keep);
        for ends in request.cu_seqlens.windows(2) {
            let tokens = ends[1] - ends[0] + kept;
            if tokens > limit {
                return Err(TargetError::TooLong { tokens, limit });
            }
        }
        let mut seen = HashSet::new();
        for &layer in &request.wanted.layers {
            if usize::from(layer.0) >= num_layers {
                return Err(TargetError::Layer { layer, last: num_layers - 1 });
            }
            if !seen.insert(layer) {
                return Err(TargetError::Option {
                    option: "layers",
                    value: format!("{layer} twice"),
                    expected: "every layer can be captured once",
                });
            }
        }
        Ok(())
    }

    /// The residual stream is the same on all ranks; rank 0's is taken.
    fn gather(
        &self,
        captured: Vec<CapturedLayer>,
        layers: &[LayerIndex],
        [tokens, hidden_size]: [usize; 2],
    ) -> Result<Capture, TargetError> {
        let mut found: HashMap<LayerIndex, Vec<f32>> = captured
            .into_iter()
            .filter_map(|captured| captured.rows.map(|rows| (captured.layer, rows)))
            .collect();
        let mut gathered = Vec::with_capacity(layers.len());
        for &layer in layers {
            let rows = found.remove(&layer).filter(|rows| rows.len() == tokens * hidden_size);
            let rows = rows.ok_or_else(|| TargetError::Reply {
                rank: 0,
                found: format!("no rows of layer {layer}"),
                expected: format!("[{tokens}, {hidden_size}]"),
            })?;
            tracing::debug!(
                target: "aerie::shapes",
                batch = self.ranks.batch(),
                stage = "gathered",
                layer = layer.0,
                shape = ?[tokens, hidden_size],
                dtype = "f32",
            );
            gathered.push(LayerCapture { layer, rows });
        }
        Ok(Capture { tokens, hidden_size, layers: gathered })
    }

    /// Puts the ranks' parts of the vocabulary side by side.
    fn gather_logits(
        &self,
        outputs: &[ForwardOutput],
        tokens: usize,
    ) -> Result<Vec<f32>, TargetError> {
        let vocab_size = self.spec.vocab_size;
        let mut logits = vec![0.0; tokens * vocab_size];
        for (plan, output) in self.plans.iter().zip(outputs) {
            let width = plan.vocab.len();
            if output.logits.len() != tokens * width {
                return Err(TargetError::Reply {
                    rank: plan.rank,
                    found: format!("{} logits", output.logits.len()),
                    expected: format!("[{tokens}, {width}]"),
                });
            }
            let rows = logits.chunks_exact_mut(vocab_size);
            for (row, part) in rows.zip(output.logits.chunks_exact(width)) {
                row[plan.vocab.clone()].copy_from_slice(part);
            }
        }
        Ok(logits)
    }
}

/// Every rank must have seen every wanted layer in the wanted shape: a rank that cut its rows
/// differently has computed something else.
fn check_shapes(
    rank: usize,
    output: &ForwardOutput,
    layers: &[LayerIndex],
    shape: [usize; 2],
) -> Result<(), TargetError> {
    for &layer in layers {
        let found = output.captured.iter().find(|captured| captured.layer == layer);
        let found = found.map(|captured| captured.shape);
        if found != Some(shape) {
            return Err(TargetError::Reply {
                rank,
                found: format!("{found:?} for layer {layer}"),
                expected: format!("{shape:?}"),
            });
        }
    }
    Ok(())
}

impl TargetModel for RankGroup {
    fn spec(&self) -> &TargetSpec {
        &self.spec
    }

    fn prefill(
        &mut self,
        batch: &TokenBatch,
        layers: &[LayerIndex],
    ) -> Result<Capture, TargetError> {
        let wanted = Wanted { layers: layers.to_vec(), ..Wanted::default() };
        Ok(self.probe(batch, wanted)?.capture)
    }

    fn extend(&mut self, request: &ExtendRequest<'_>) -> Result<Extension, TargetError> {
        let ExtendRequest { cache, keep, tokens, layers } = *request;
        let held = self.caches.get(&cache).copied().unwrap_or(0);
        if keep > held {
            return Err(TargetError::Cache { cache: cache.0, held, keep });
        }
        let wanted = Wanted { layers: layers.to_vec(), logits: true, ..Wanted::default() };
        let probe = self.run(ForwardRequest {
            ids: tokens.to_vec(),
            cu_seqlens: vec![0, tokens.len()],
            cache: Some((cache, keep)),
            wanted,
        })?;
        self.caches.insert(cache, keep + tokens.len());
        Ok(Extension { capture: probe.capture, logits: probe.logits })
    }

    fn drop_cache(&mut self, cache: CacheId) {
        if self.caches.remove(&cache).is_some() {
            self.ranks.drop_cache(cache);
        }
    }
}

/// One rank on the CPU.
struct CpuRank {
    model: Model<CpuOps>,
    rank: usize,
    /// Absent where the rank computes on its own thread alone.
    pool: Option<ThreadPool>,
}

impl RankWorker for CpuRank {
    fn forward(
        &mut self,
        request: &ForwardRequest,
        batch: u64,
        deadline: Instant,
    ) -> Result<ForwardOutput, TargetError> {
        let Self { model, pool, .. } = self;
        model.collective().set_deadline(deadline);
        let output = match pool {
            Some(pool) => pool.install(|| model.forward(request)),
            None => model.forward(request),
        }?;
        for captured in &output.captured {
            tracing::debug!(
                target: "aerie::shapes",
                rank = self.rank,
                batch,
                stage = "captured",
                layer = captured.layer.0,
                shape = ?captured.shape,
                dtype = "f32",
            );
        }
        Ok(output)
    }

    fn drop_cache(&mut self, id: CacheId) {
        self.model.drop_cache(id);
    }
}

type CpuCollective = Box<dyn Collective<Vec<f32>>>;

fn start_cpu(
    options: &EngineOptions,
    spec: &TargetSpec,
    plans: &[RankPlan],
    checkpoint: Checkpoint,
) -> Result<Ranks, TargetError> {
    let world_size = plans.len();
    let (collectives, end): (Vec<CpuCollective>, EndGroup) = if world_size == 1 {
        (vec![Box::new(Solo)], Arc::new(|_| {}))
    } else {
        let (collectives, ender) = Threads::group(world_size);
        let boxed = collectives.into_iter().map(|rank| Box::new(rank) as CpuCollective);
        (boxed.collect(), Arc::new(move |reason| ender.end(reason)))
    };
    // Each rank takes its own end when it starts.
    let collectives: Mutex<Vec<_>> = Mutex::new(collectives.into_iter().map(Some).collect());
    let threads = options.threads_per_rank();
    let (spec, plans, qa_norm_eps) = (spec.clone(), plans.to_vec(), options.qa_norm_eps);
    #[cfg(test)]
    let faults = options.faults.clone();
    Ranks::start(world_size, options.deadline, end, move |rank| {
        let mut ends = collectives.lock().unwrap_or_else(PoisonError::into_inner);
        let collective = ends.get_mut(rank).and_then(Option::take);
        drop(ends);
        let collective = collective.ok_or(TargetError::GroupEnded)?;
        let parts = Parts {
            ops: CpuOps::new(threads),
            collective,
            checkpoint: &checkpoint,
            spec: &spec,
            plan: plans[rank].clone(),
            qa_norm_eps,
        };
        let worker = CpuRank { model: Model::load(parts)?, rank, pool: pool(threads)? };
        #[cfg(test)]
        let worker = super::fault::Faulty { worker, rank, faults: faults.clone() };
        Ok(worker)
    })
}

fn pool(threads: usize) -> Result<Option<ThreadPool>, TargetError> {
    if threads <= 1 {
        return Ok(None);
    }
    let pool = ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|error| TargetError::Device {
        device: "cpu",
        reason: format!("{threads} threads cannot be started: {error}"),
    })?;
    Ok(Some(pool))
}
