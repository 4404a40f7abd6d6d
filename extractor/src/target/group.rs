//! [`RankGroup`]: a model spread over ranks, as the target that the pipeline sees. Checks requests
//! before the ranks see them and replies before anybody else does.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rayon::{ThreadPool, ThreadPoolBuilder};
use shared::LayerIndex;

use super::collective::{Collective, Solo, Threads};
use super::cpu::CpuOps;
use super::cuda;
use super::error::TargetError;
use super::model::{ForwardOutput, ForwardRequest, Model, Parts, StageTimes, Wanted};
use super::ops::RouterChoice;
use super::options::{Device, EngineOptions};
use super::plan::RankPlan;
use super::ranks::{EndGroup, RankWorker, Ranks};
use super::source::Source;
use super::spec::TargetSpec;
use super::unread;
use super::weights::Checkpoint;
use super::{CacheId, ExtendRequest, Extension, TargetModel};
use crate::batch::TokenBatch;
use crate::capture::{Capture, LayerCapture, LayerRows};

/// A target model on one or more ranks.
pub struct RankGroup {
    spec: TargetSpec,
    plans: Vec<RankPlan>,
    ranks: Ranks,
    /// Tokens in every cache.
    caches: HashMap<CacheId, usize>,
    /// Bytes of device memory that each rank is planned to take; none on the CPU.
    planned: Vec<u64>,
    /// All ranks of the group are here.
    whole: bool,
    /// Batches go in two halves where the ranks are several.
    overlaps: bool,
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

impl Probe {
    /// What concerns `tokens` of the batch, as if they had been alone in it.
    pub fn part(&self, tokens: Range<usize>) -> Self {
        let all = self.capture.tokens.max(1);
        let of = |values: &[f32]| {
            let width = values.len() / all;
            values[tokens.start * width..tokens.end * width].to_vec()
        };
        let layers = self.capture.layers.iter().map(|LayerCapture { layer, rows }| LayerCapture {
            layer: *layer,
            rows: LayerRows::F32(of(&rows.to_f32())),
        });
        let choice = |choice: &RouterChoice| {
            let top_k = choice.indices.len() / all;
            let indices = choice.indices[tokens.start * top_k..tokens.end * top_k].to_vec();
            RouterChoice { indices, weights: of(&choice.weights), margins: of(&choice.margins) }
        };
        let hidden_size = self.capture.hidden_size;
        Self {
            capture: Capture { tokens: tokens.len(), hidden_size, layers: layers.collect() },
            embeddings: of(&self.embeddings),
            normed: of(&self.normed),
            logits: of(&self.logits),
            routers: self.routers.iter().map(|(layer, all)| (*layer, choice(all))).collect(),
            times: self.times,
        }
    }
}

impl RankGroup {
    /// Reads the model and starts its ranks. See [`super::open`].
    pub fn open(options: &EngineOptions) -> Result<Self, TargetError> {
        options.check()?;
        let spec = TargetSpec::read(&options.dir)?;
        let plans = options.plans(&spec)?;
        let checkpoint = Checkpoint::open(&options.dir)?;
        unread::refuse(&checkpoint, &spec)?;
        let source = Source::Checkpoint(checkpoint);
        let overlaps = options.device == Device::Cuda;
        let (ranks, planned) = match options.device {
            Device::Cpu => (start_cpu(options, &spec, &plans, source)?, Vec::new()),
            Device::Cuda => cuda::start(options, &spec, &plans, source)?,
        };
        Ok(Self { spec, plans, ranks, caches: HashMap::new(), planned, whole: true, overlaps })
    }

    /// Starts `gpus` ranks on GPUs with random weights in the dimensions of `spec`, for benches.
    /// They hold the shares of the ranks from `first` on of a group of `options.tp`; sums go across
    /// those that there are, and a capture has their part of the rows.
    pub fn open_shape(
        options: &EngineOptions,
        spec: TargetSpec,
        [first, gpus]: [usize; 2],
    ) -> Result<Self, TargetError> {
        options.check()?;
        let mut plans = options.plans(&spec)?;
        let end = first.checked_add(gpus).filter(|&end| first < end && end <= plans.len());
        let Some(end) = end else {
            return Err(TargetError::Option {
                option: "--as-rank and --gpus",
                value: format!("{first} and {gpus}"),
                expected: "ranks of the group that --of names",
            });
        };
        let plans = plans.drain(first..end).collect::<Vec<_>>();
        let (ranks, planned) = cuda::start_shape(options, &spec, &plans)?;
        let (whole, overlaps) = (false, true);
        Ok(Self { spec, plans, ranks, caches: HashMap::new(), planned, whole, overlaps })
    }

    /// Bytes of device memory that each rank is planned to take; none on the CPU.
    pub fn planned_bytes(&self) -> &[u64] {
        &self.planned
    }

    /// Shares of the ranks.
    pub fn plans(&self) -> &[RankPlan] {
        &self.plans
    }

    /// Runs a batch and returns whatever is wanted, for checks and benches.
    pub fn probe(&mut self, batch: &TokenBatch, wanted: Wanted) -> Result<Probe, TargetError> {
        self.run(ForwardRequest {
            ids: batch.input_ids(),
            cu_seqlens: batch.cu_seqlens().to_vec(),
            cache: None,
            wanted,
            overlap: self.overlaps,
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
        let capture = self.gather(&mut outputs, &wanted.layers, shape)?;
        let output = outputs.swap_remove(0);
        Ok(Probe {
            capture,
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

    /// The residual stream is the same on all ranks, and each has copied some rows of it: puts
    /// them one after the other.
    fn gather(
        &self,
        outputs: &mut [ForwardOutput],
        layers: &[LayerIndex],
        [tokens, hidden_size]: [usize; 2],
    ) -> Result<Capture, TargetError> {
        let mut gathered = Vec::with_capacity(layers.len());
        for (index, &layer) in layers.iter().enumerate() {
            let held = |(rank, output): (usize, &mut ForwardOutput)| {
                let captured = output.captured.get_mut(index);
                let pieces = captured.map(|layer| std::mem::take(&mut layer.pieces));
                pieces.into_iter().flatten().map(move |(first, rows)| (first, rank, rows))
            };
            let mut pieces: Vec<_> = outputs.iter_mut().enumerate().flat_map(held).collect();
            pieces.sort_by_key(|(first, ..)| *first);
            let (mut found, mut values) = (Vec::new(), 0);
            for (first, rank, piece) in pieces {
                let next = values / hidden_size;
                if self.whole && first != next {
                    return Err(TargetError::Reply {
                        rank,
                        found: format!("rows from {first}"),
                        expected: format!("rows of layer {layer} from {next}"),
                    });
                }
                values += piece.len();
                match piece {
                    LayerRows::Pieces(pieces) => found.extend(pieces),
                    piece => found.push(piece),
                }
            }
            let dtype = found.first().map_or("f32", LayerRows::dtype);
            if let Some(other) = found.iter().find(|piece| piece.dtype() != dtype) {
                let found = format!("{} values", other.dtype());
                return Err(TargetError::Reply { rank: 0, found, expected: dtype.into() });
            }
            let rows = match found.len() {
                1 => found.remove(0),
                _ => LayerRows::Pieces(found),
            };
            if self.whole && rows.len() != tokens * hidden_size {
                return Err(TargetError::Reply {
                    rank: 0,
                    found: format!("{} values of layer {layer}", rows.len()),
                    expected: format!("[{tokens}, {hidden_size}]"),
                });
            }
            tracing::debug!(
                target: "aerie::shapes",
                batch = self.ranks.batch(),
                stage = "gathered",
                layer = layer.0,
                shape = ?[tokens, hidden_size],
                dtype = rows.dtype(),
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
            overlap: false,
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
        output.trace_shapes(self.rank, batch);
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
    source: Source,
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
            source: &source,
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use shared::TokenSample;

    use super::*;

    /// Said before a GPU is looked for.
    #[test]
    fn a_bench_of_ranks_that_the_group_has_not_is_refused() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/nano-kimi");
        let spec = TargetSpec::read(&dir).unwrap();
        let options = EngineOptions { device: Device::Cuda, tp: 4, ..EngineOptions::new(dir) };
        for ranks in [[0, 0], [0, 5], [4, 1], [usize::MAX, 1]] {
            let opened = RankGroup::open_shape(&options, spec.clone(), ranks).map(drop);
            assert!(matches!(opened, Err(TargetError::Option { .. })), "{ranks:?}: {opened:?}");
        }
    }

    /// The two halves of a batch give what the whole gives: states, choices and logits in the
    /// order of the tokens. On the CPU, where nothing overlaps.
    #[test]
    fn halves_are_the_whole() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/nano-kimi");
        let mut group =
            RankGroup::open(&EngineOptions { tp: 2, ..EngineOptions::new(dir) }).unwrap();
        let sample = |tokens: u32| {
            let ids: Vec<u32> = (0..tokens).map(|id| 7 * id % 300).collect();
            TokenSample::new(ids, vec![1; tokens as usize]).unwrap()
        };
        let wanted = Wanted {
            layers: vec![LayerIndex(5), LayerIndex(0), LayerIndex(7)],
            embeddings: true,
            normed: true,
            logits: true,
            routers: true,
            ..Wanted::default()
        };
        for lengths in [vec![9], vec![3, 4], vec![5, 30, 2, 11]] {
            let batch = TokenBatch::new(lengths.into_iter().map(sample).collect());
            group.overlaps = false;
            let whole = group.probe(&batch, wanted.clone()).unwrap();
            group.overlaps = true;
            let halves = group.probe(&batch, wanted.clone()).unwrap();
            let near = |a: &[f32], b: &[f32]| {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-4)
            };
            for (a, b) in whole.capture.layers.iter().zip(&halves.capture.layers) {
                assert_eq!(a.layer, b.layer);
                assert!(near(&a.rows.to_f32(), &b.rows.to_f32()), "layer {}", a.layer);
            }
            assert!(near(&whole.embeddings, &halves.embeddings));
            assert!(near(&whole.normed, &halves.normed));
            assert!(near(&whole.logits, &halves.logits));
            assert_eq!(whole.routers.len(), halves.routers.len());
            for ((layer, a), (other, b)) in whole.routers.iter().zip(&halves.routers) {
                assert_eq!((layer, &a.indices), (other, &b.indices));
                assert!(near(&a.weights, &b.weights));
            }
        }
    }
}
