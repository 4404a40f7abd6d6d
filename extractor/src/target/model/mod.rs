//! A decoder-only model over [`Ops`]: the order of its layers, once for every architecture and
//! device. Knows nothing of threads, files of the data set, or what its states are for.

mod gqa;
mod load;
mod mla;
mod mlp;
mod moe;
mod step;

use shared::{Digest, LayerIndex};

use self::gqa::Gqa;
use self::load::Loader;
use self::mla::Mla;
use self::mlp::Mlp;
use self::moe::Moe;
pub use self::step::{Stage, StageTimes};
use self::step::{StageClock, Step, Work};
use super::CacheId;
use super::collective::Collective;
use super::error::TargetError;
use super::kv::{KvCache, KvCaches, LayerCache};
use super::ops::{AttentionDims, Ops, RouterChoice, Write};
use super::plan::RankPlan;
use super::spec::{AttentionSpec, QaNormEps, TargetSpec};
use super::weights::Checkpoint;

/// One rank's share of a model.
pub(super) struct Model<O: Ops> {
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
    pub(super) checkpoint: &'a Checkpoint,
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
}

impl ForwardRequest {
    /// Digest of ids and sequence starts, by which ranks can tell that they run the same batch.
    pub(super) fn digest(&self) -> Digest {
        let ends = self.cu_seqlens.iter().flat_map(|end| (*end as u64).to_le_bytes());
        let ids = self.ids.iter().flat_map(|id| id.to_le_bytes());
        Digest::of(&ends.chain(ids).collect::<Vec<u8>>())
    }
}

/// What a forward returns.
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

/// The output of one layer on one rank.
#[derive(Clone, Debug)]
pub(super) struct CapturedLayer {
    pub(super) layer: LayerIndex,
    /// Shape the rank holds.
    pub(super) shape: [usize; 2],
    /// The values, on rank 0.
    pub(super) rows: Option<Vec<f32>>,
}

impl<O: Ops> Model<O> {
    /// Reads this rank's weights.
    pub(super) fn load(parts: Parts<'_, O>) -> Result<Self, TargetError> {
        let Parts { mut ops, collective, checkpoint, spec, plan, qa_norm_eps } = parts;
        let mut loader = Loader { ops: &mut ops, checkpoint, spec, plan: &plan, qa_norm_eps };
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
        let work = Work::new(|| ops.buffer());
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
        let positions = positions(&request.cu_seqlens, kept);
        let cached = request.cache.map(|_| [kept]);
        let ops = &mut self.ops;
        let mut cache = match request.cache {
            None => None,
            Some((id, keep)) => {
                let make = || (0..self.spec.num_layers).map(|_| empty_layer(ops)).collect();
                Some((id, self.caches.take(id, keep, make)?))
            }
        };
        let angles = self.ops.rope_angles(&self.spec.rope, &positions)?;
        let mut step = Step {
            ops: &mut self.ops,
            collective: &mut *self.collective,
            work: &mut self.work,
            clock: StageClock::start(),
            rows: request.ids.len(),
            hidden_size: self.spec.hidden_size,
            angles,
            cu_seqlens: &request.cu_seqlens,
            cached: cached.as_ref().map_or(&[], |cached| cached),
            has_partial: false,
        };
        let mut output = ForwardOutput::default();
        let reader = Reader { wanted: &request.wanted, reads: self.plan.rank == 0 };
        let first = self.plan.vocab.start;
        step.ops.embed(&mut step.work.x, &self.embed, &request.ids, first)?;
        if step.collective.world_size() > 1 {
            step.collective.all_reduce(&mut step.work.x)?;
        }
        if reader.wanted.embeddings && reader.reads {
            output.embeddings = download(step.ops, &step.work.x)?;
        }
        step.clock.lap(Stage::Rest);
        for (index, layer) in self.layers.iter().enumerate().take(self.spec.depth(reader.wanted)) {
            let kv = cache.as_mut().and_then(|(_, cache)| cache.layers.get_mut(index));
            layer.forward(&mut step, kv, self.spec.rms_norm_eps, |ops, routing| {
                reader.router(&mut output, ops, index, routing)
            })?;
            reader.layer(&mut output, &mut step, index)?;
        }
        if reader.wanted.normed || reader.wanted.logits {
            let head = self.head.as_ref().unwrap_or(&self.embed);
            step.norm(&self.final_norm, self.spec.rms_norm_eps)?;
            reader.head(&mut output, &mut step, head)?;
        }
        output.times = step.clock.times;
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

    fn forward(
        &self,
        step: &mut Step<'_, O>,
        cache: Option<&mut LayerCache<O::Buffer>>,
        eps: f32,
        report: impl FnOnce(&mut O, &O::Routing) -> Result<(), TargetError>,
    ) -> Result<(), TargetError> {
        step.norm(&self.input_norm, eps)?;
        match &self.attention {
            Attention::Mla(mla) => mla.forward(step, cache)?,
            Attention::Gqa(gqa) => gqa.forward(step, cache)?,
        }
        step.norm(&self.post_norm, eps)?;
        match &self.block {
            Block::Dense(mlp) => mlp.forward(step)?,
            Block::Moe(moe) => {
                let routing = moe.forward(step)?;
                report(step.ops, &routing)?;
            }
        }
        step.settle()
    }
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
    step.clock.lap(Stage::Attention);
    Ok(())
}

/// Copies what was asked for into the output.
struct Reader<'a> {
    wanted: &'a Wanted,
    /// This rank reads values that all ranks hold alike.
    reads: bool,
}

impl Reader<'_> {
    fn layer<O: Ops>(
        &self,
        output: &mut ForwardOutput,
        step: &mut Step<'_, O>,
        index: usize,
    ) -> Result<(), TargetError> {
        for &layer in self.wanted.layers.iter().filter(|layer| usize::from(layer.0) == index) {
            let len = step.ops.len(&step.work.x);
            let shape = [len / step.hidden_size, step.hidden_size];
            let rows = match self.reads {
                true => Some(download(step.ops, &step.work.x)?),
                false => None,
            };
            output.captured.push(CapturedLayer { layer, shape, rows });
        }
        step.clock.lap(Stage::Capture);
        Ok(())
    }

    fn router<O: Ops>(
        &self,
        output: &mut ForwardOutput,
        ops: &mut O,
        index: usize,
        routing: &O::Routing,
    ) -> Result<(), TargetError> {
        if self.wanted.routers && self.reads {
            output.routers.push((index, ops.routing_to_host(routing)?));
        }
        Ok(())
    }

    fn head<O: Ops>(
        &self,
        output: &mut ForwardOutput,
        step: &mut Step<'_, O>,
        head: &O::Linear,
    ) -> Result<(), TargetError> {
        let Work { normed, logits, .. } = &mut *step.work;
        if self.wanted.normed && self.reads {
            output.normed = download(step.ops, normed)?;
        }
        if self.wanted.logits {
            step.ops.matmul(logits, normed, head, Write::Set)?;
            output.logits = download(step.ops, logits)?;
        }
        step.clock.lap(Stage::Rest);
        Ok(())
    }
}

fn download<O: Ops>(ops: &mut O, buffer: &O::Buffer) -> Result<Vec<f32>, TargetError> {
    let len = ops.len(buffer);
    ops.download(buffer, 0..len)
}

fn empty_layer<O: Ops>(ops: &mut O) -> LayerCache<O::Buffer> {
    LayerCache { keys: ops.buffer(), values: ops.buffer(), kept: 0 }
}

/// Position of every row in its sequence; the first has `kept` tokens before it.
fn positions(cu_seqlens: &[usize], kept: usize) -> Vec<u32> {
    let lengths = cu_seqlens.windows(2).map(|ends| ends[1] - ends[0]);
    lengths.flat_map(|tokens| (kept..kept + tokens).map(|position| position as u32)).collect()
}
