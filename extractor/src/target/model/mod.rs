//! A decoder-only model over [`Ops`]: the order of its layers, once for every architecture and
//! device. Knows nothing of threads, files of the data set, or what its states are for.

mod gqa;
mod load;
mod mla;
mod mlp;
mod moe;
#[cfg(test)]
mod order;
mod reader;
mod step;
mod work;

use std::collections::BTreeMap;

use shared::{Digest, LayerIndex};

use self::gqa::Gqa;
use self::load::Loader;
use self::mla::Mla;
use self::mlp::Mlp;
use self::moe::Moe;
use self::reader::{Pending, Reader};
pub(super) use self::step::StageClock;
use self::step::{Half, Step};
pub use self::step::{Stage, StageTimes};
use self::work::Work;
pub(super) use self::work::rooms;
use super::CacheId;
use super::collective::Collective;
use super::error::TargetError;
use super::kv::{KvCache, KvCaches, LayerCache};
use super::ops::{AttentionDims, Ops, Precision, Room, RouterChoice};
use super::plan::RankPlan;
use super::source::Source;
use super::spec::{AttentionSpec, QaNormEps, TargetSpec};
use crate::capture::LayerRows;

/// One rank's share of a model.
pub(super) struct Model<O: Ops> {
    /// First, so that it is dropped first: products settle their streams then, and with them what
    /// other ranks still take of the buffers below.
    ops: O,
    collective: Box<dyn Collective<O::Buffer>>,
    spec: TargetSpec,
    plan: RankPlan,
    embed: O::Linear,
    layers: Vec<Layer<O>>,
    final_norm: O::Buffer,
    /// Absent where the embedding table is the head.
    head: Option<O::Linear>,
    work: Work<O::Buffer>,
    caches: KvCaches<O::Buffer>,
}

struct Layer<O: Ops> {
    input_norm: O::Buffer,
    attention: Attention<O>,
    post_norm: O::Buffer,
    block: Block<O>,
}

enum Attention<O: Ops> {
    Mla(Mla<O>),
    Gqa(Gqa<O>),
}

enum Block<O: Ops> {
    Dense(Mlp<O>),
    Moe(Moe<O>),
}

/// What a rank is built from.
pub(super) struct Parts<'a, O: Ops> {
    pub(super) ops: O,
    pub(super) collective: Box<dyn Collective<O::Buffer>>,
    pub(super) source: &'a Source,
    pub(super) spec: &'a TargetSpec,
    pub(super) plan: RankPlan,
    pub(super) qa_norm_eps: QaNormEps,
}

/// One forward. Ids, layers and lengths have been checked.
#[derive(Clone, Debug, Default)]
pub(super) struct ForwardRequest {
    /// Token ids of all sequences end to end.
    pub(super) ids: Vec<u32>,
    /// Start of each sequence in `ids`, and the total.
    pub(super) cu_seqlens: Vec<usize>,
    /// Cache that the only sequence continues, and how many of its tokens stay.
    pub(super) cache: Option<(CacheId, usize)>,
    /// What to return.
    pub(super) wanted: Wanted,
    /// On several ranks, one half of the batch is computed while sums of the other are taken.
    pub(super) overlap: bool,
}

impl ForwardRequest {
    /// Digest of ids and sequence starts, by which ranks can tell that they run the same batch.
    pub(super) fn digest(&self) -> Digest {
        let ends = self.cu_seqlens.iter().flat_map(|end| (*end as u64).to_le_bytes());
        let ids = self.ids.iter().flat_map(|id| id.to_le_bytes());
        Digest::of(&ends.chain(ids).collect::<Vec<u8>>())
    }
}

/// By layer, experts that its router has to take: [tokens, top_k] indices, different in a row.
pub type GivenExperts = BTreeMap<usize, Vec<u32>>;

/// What a forward returns, and what it is to do for that.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// Layers whose outputs to return.
    pub layers: Vec<LayerIndex>,
    /// The embeddings, which are no layer's output.
    pub embeddings: bool,
    /// The last layer's output after the final norm.
    pub normed: bool,
    /// Logits of every row.
    pub logits: bool,
    /// The choices of every router that ran.
    pub routers: bool,
    /// Layers named here do not choose experts of their own; for checks.
    pub experts: GivenExperts,
}

/// What one rank returns of a forward. Values that all ranks hold alike come from rank 0 only.
#[derive(Clone, Debug, Default)]
pub(super) struct ForwardOutput {
    /// One entry a requested layer, in the order of the request.
    pub(super) captured: Vec<CapturedLayer>,
    pub(super) embeddings: Vec<f32>,
    pub(super) normed: Vec<f32>,
    /// [rows, this rank's part of the vocabulary].
    pub(super) logits: Vec<f32>,
    /// Layer and choice.
    pub(super) routers: Vec<(usize, RouterChoice)>,
    pub(super) times: StageTimes,
}

impl ForwardOutput {
    /// Logs what this rank captured.
    pub(super) fn trace_shapes(&self, rank: usize, batch: u64) {
        for captured in &self.captured {
            tracing::debug!(
                target: "aerie::shapes",
                rank,
                batch,
                stage = "captured",
                layer = captured.layer.0,
                shape = ?captured.shape,
                dtype = captured.dtype,
            );
        }
    }
}

/// The output of one layer on one rank.
#[derive(Clone, Debug)]
pub(super) struct CapturedLayer {
    pub(super) layer: LayerIndex,
    /// Shape the rank holds.
    pub(super) shape: [usize; 2],
    /// Number format the rank holds.
    pub(super) dtype: &'static str,
    /// First row and values of the pieces that this rank copied to the host.
    pub(super) pieces: Vec<(usize, LayerRows)>,
}

impl<O: Ops> Model<O> {
    /// Reads this rank's weights.
    pub(super) fn load(parts: Parts<'_, O>) -> Result<Self, TargetError> {
        let Parts { mut ops, collective, source, spec, plan, qa_norm_eps } = parts;
        // Buffers first: where memory is short, that is known before hours of loading.
        let rooms = rooms(spec, &plan, collective.world_size());
        let work = Work::new(&rooms, |room| ops.buffer(room))?;
        let mut loader = Loader { ops: &mut ops, source, spec, plan: &plan, qa_norm_eps };
        let table = [spec.vocab_size, spec.hidden_size];
        let embed = loader.rows("model.embed_tokens", table, plan.vocab.clone())?;
        let layers = (0..spec.num_layers)
            .map(|index| Layer::load(&mut loader, index))
            .collect::<Result<_, _>>()?;
        let final_norm = loader.vector("model.norm.weight", spec.hidden_size)?;
        let head = match spec.tie_word_embeddings {
            true => None,
            false => Some(loader.rows("lm_head", table, plan.vocab.clone())?),
        };
        Ok(Self {
            ops,
            collective,
            spec: spec.clone(),
            plan,
            embed,
            layers,
            final_norm,
            head,
            work,
            caches: KvCaches::new(),
        })
    }

    /// The rank's end of the collective.
    pub(super) fn collective(&mut self) -> &mut dyn Collective<O::Buffer> {
        &mut *self.collective
    }

    /// The device functions.
    pub(super) fn ops(&mut self) -> &mut O {
        &mut self.ops
    }

    /// Forgets a cache.
    pub(super) fn drop_cache(&mut self, id: CacheId) {
        self.caches.drop_cache(id);
    }

    /// Runs the layers up to the last one that is wanted.
    pub(super) fn forward(
        &mut self,
        request: &ForwardRequest,
    ) -> Result<ForwardOutput, TargetError> {
        let kept = request.cache.map_or(0, |(_, keep)| keep);
        let cached = request.cache.map(|_| [kept]);
        let mut cache = match request.cache {
            None => None,
            Some((id, keep)) => {
                let (layers, ops) = (self.spec.num_layers, &mut self.ops);
                let make = || (0..layers).map(|_| empty_layer(ops)).collect();
                Some((id, self.caches.take(id, keep, make)?))
            }
        };
        self.ops.start_clock()?;
        let parts = parts(request, self.collective.world_size());
        let mut halves = Vec::with_capacity(parts.len());
        for (first, cu_seqlens) in &parts {
            let positions = positions(cu_seqlens, kept);
            let angles = self.ops.rope_angles(&self.spec.rope, &positions, *first)?;
            halves.push(Half::new(*first, cu_seqlens, angles));
        }
        let other = if halves.len() > 1 { halves.pop() } else { None };
        let Some(half) = halves.pop() else { return Err(TargetError::EmptyBatch) };
        let mut step = Step {
            ops: &mut self.ops,
            collective: &mut *self.collective,
            work: &mut self.work,
            hidden_size: self.spec.hidden_size,
            cached: cached.as_ref().map_or(&[], |cached| cached),
            experts: &request.wanted.experts,
            half,
            other,
            turn: 0,
        };
        let mut output = ForwardOutput::default();
        let reader = Reader::new(&request.wanted, &self.plan);
        let (first, table, eps) = (self.plan.vocab.start, &self.embed, self.spec.rms_norm_eps);
        step.each_half(|step| step.embed(table, &request.ids[step.half.range()], first))?;
        step.each_half(|step| {
            step.aside(|step| {
                step.settle(None)?;
                reader.embeddings(&mut output, step)
            })
        })?;
        step.each_half(|step| step.arrive(Stage::Rest))?;
        step.ops.lap(Stage::Rest)?;
        let depth = self.spec.depth(reader.wanted);
        let layers = &self.layers[..depth];
        let kv = cache.as_mut().map(|(_, cache)| cache);
        let mut pending = run_layers(layers, &mut step, (&reader, &mut output), kv, eps)?;
        let norm = (reader.wanted.normed || reader.wanted.logits).then_some(&self.final_norm);
        step.each_half(|step| {
            step.aside(|step| {
                step.settle(norm.map(|norm| (norm, eps)))?;
                reader.layer(&mut pending, step, depth)?;
                if norm.is_some() { step.gather_normed() } else { Ok(()) }
            })
        })?;
        let head = self.head.as_ref().unwrap_or(&self.embed);
        step.each_half(|step| {
            step.arrive(Stage::Rest)?;
            reader.head(&mut output, step, head)
        })?;
        output.times = step.ops.times()?;
        output.captured = reader.collect(pending, step.ops)?;
        if let Some((id, cache)) = cache {
            let KvCache { layers, .. } = cache;
            self.caches.put(id, KvCache { tokens: kept + request.ids.len(), layers });
        }
        Ok(output)
    }
}

impl TargetSpec {
    /// Layers that must run for what is wanted.
    fn depth(&self, wanted: &Wanted) -> usize {
        if wanted.normed || wanted.logits {
            self.num_layers
        } else {
            wanted.layers.iter().map(|layer| usize::from(layer.0) + 1).max().unwrap_or(0)
        }
    }
}

impl<O: Ops> Layer<O> {
    fn load(loader: &mut Loader<'_, O>, index: usize) -> Result<Self, TargetError> {
        let prefix = format!("model.layers.{index}");
        let hidden = loader.spec.hidden_size;
        let attention = format!("{prefix}.self_attn");
        let block = format!("{prefix}.mlp");
        let spec = loader.spec;
        Ok(Self {
            input_norm: loader.vector(&format!("{prefix}.input_layernorm.weight"), hidden)?,
            attention: match &spec.attention {
                AttentionSpec::Mla(mla) => Attention::Mla(Mla::load(loader, mla, &attention)?),
                AttentionSpec::Gqa(gqa) => Attention::Gqa(Gqa::load(loader, gqa, &attention)?),
            },
            post_norm: loader
                .vector(&format!("{prefix}.post_attention_layernorm.weight"), hidden)?,
            block: match &spec.moe {
                Some(moe) if spec.is_moe_layer(index) => {
                    Block::Moe(Moe::load(loader, moe, &block)?)
                }
                _ => Block::Dense(Mlp::load(loader, &block)?),
            },
        })
    }

    /// The layer, after its attention was prepared; its output is this rank's part of a sum when
    /// it returns. Returns the choice of experts.
    fn forward(
        &self,
        step: &mut Step<'_, O>,
        mut cache: Option<&mut LayerCache<O::Buffer>>,
        (index, eps): (usize, f32),
    ) -> Result<Option<O::Routing>, TargetError> {
        step.each_half(|step| {
            step.arrive(Stage::Collective)?;
            let cache = cache.as_deref_mut();
            match &self.attention {
                Attention::Mla(mla) => mla.forward(step, cache),
                Attention::Gqa(gqa) => gqa.forward(step, cache),
            }?;
            step.send()
        })?;
        step.each_half(|step| {
            step.aside(|step| {
                step.settle(Some((&self.post_norm, eps)))?;
                step.gather_normed()
            })
        })?;
        match &self.block {
            Block::Moe(moe) => Ok(Some(moe.forward(step, index)?)),
            Block::Dense(mlp) => {
                step.each_half(|step| {
                    step.arrive(Stage::Collective)?;
                    mlp.forward(step)?;
                    step.send()
                })?;
                Ok(None)
            }
        }
    }
}

impl<O: Ops> Attention<O> {
    /// What the owners of rows do for the others before attention.
    fn prepare(&self, step: &mut Step<'_, O>) -> Result<(), TargetError> {
        match self {
            Self::Mla(mla) => mla.prepare(step),
            Self::Gqa(_) => step.gather_normed(),
        }
    }
}

/// Runs `layers` one after the other. Returns the captured outputs of all but the last, which is
/// not settled yet.
fn run_layers<O: Ops>(
    layers: &[Layer<O>],
    step: &mut Step<'_, O>,
    (reader, output): (&Reader<'_>, &mut ForwardOutput),
    mut cache: Option<&mut KvCache<O::Buffer>>,
    eps: f32,
) -> Result<Vec<Pending<O::Captured>>, TargetError> {
    let mut pending = Vec::new();
    for (index, layer) in layers.iter().enumerate() {
        let kv = cache.as_mut().and_then(|cache| cache.layers.get_mut(index));
        step.each_half(|step| {
            step.aside(|step| {
                step.settle(Some((&layer.input_norm, eps)))?;
                reader.layer(&mut pending, step, index)?;
                layer.attention.prepare(step)
            })
        })?;
        let routing = layer.forward(step, kv, (index, eps))?;
        reader.router(output, step.ops, (index, routing.as_ref()))?;
    }
    Ok(pending)
}

/// Attention over this forward's keys and values, or over the cache with them appended.
fn attend<O: Ops>(
    step: &mut Step<'_, O>,
    cache: Option<&mut LayerCache<O::Buffer>>,
    dims: &AttentionDims<'_>,
) -> Result<(), TargetError> {
    let Work { q, k, v, attended, .. } = &mut *step.work;
    match cache {
        None => step.ops.attention(attended, [q, k, v], dims)?,
        Some(LayerCache { keys, values, kept }) => {
            step.ops.append(keys, *kept * dims.kv_heads * dims.qk_dim, k)?;
            step.ops.append(values, *kept * dims.kv_heads * dims.v_dim, v)?;
            step.ops.attention(attended, [q, keys, values], dims)?;
        }
    }
    step.ops.lap(Stage::Attention)
}

fn empty_layer<O: Ops>(ops: &mut O) -> Result<LayerCache<O::Buffer>, TargetError> {
    let room = |name| Room { name, width: 0, ranks: 1, precision: Precision::Compute };
    let (keys, values) = (ops.buffer(room("cached keys"))?, ops.buffer(room("cached values"))?);
    Ok(LayerCache { keys, values, kept: 0 })
}

/// First row and sequence starts of the halves that a batch goes in: two, cut between sequences
/// where that is nearest the middle, if the ranks are several and it is asked for.
fn parts(request: &ForwardRequest, world_size: usize) -> Vec<(usize, Vec<usize>)> {
    let ends = &request.cu_seqlens;
    let total = request.ids.len();
    let cut = (1..ends.len().saturating_sub(1)).min_by_key(|&at| (2 * ends[at]).abs_diff(total));
    match cut.filter(|_| world_size > 1 && request.overlap) {
        None => vec![(0, ends.clone())],
        Some(at) => {
            let second = ends[at..].iter().map(|end| end - ends[at]).collect();
            vec![(0, ends[..=at].to_vec()), (ends[at], second)]
        }
    }
}

/// Position of every row in its sequence; the first has `kept` tokens before it.
fn positions(cu_seqlens: &[usize], kept: usize) -> Vec<u32> {
    let lengths = cu_seqlens.windows(2).map(|ends| ends[1] - ends[0]);
    lengths.flat_map(|tokens| (kept..kept + tokens).map(|position| position as u32)).collect()
}
