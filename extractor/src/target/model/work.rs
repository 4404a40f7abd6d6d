//! The buffers of a forward and how large each can become. Knows nothing of devices.

use crate::target::error::TargetError;
use crate::target::ops::{Precision, Room};
use crate::target::plan::RankPlan;
use crate::target::spec::{AttentionSpec, TargetSpec};

/// Buffers that live as long as the model, so that layers allocate nothing.
#[derive(Debug)]
pub(super) struct Work<B> {
    /// Those of the half of the batch whose turn it is.
    pub(super) half: HalfWork<B>,
    parked: HalfWork<B>,
    /// Other ranks' parts of a sum, for the rows of this rank.
    pub(super) received: B,
    /// Normed input of a block, [rows of the batch, hidden].
    pub(super) normed: B,
    pub(super) q: B,
    pub(super) q_latent: B,
    /// Key-value latent and unrotated key, side by side.
    pub(super) latent: B,
    pub(super) kv: B,
    pub(super) k: B,
    pub(super) v: B,
    pub(super) spare: B,
    pub(super) attended: B,
    pub(super) gate: B,
    pub(super) up: B,
    pub(super) logits: B,
    /// Logits of the vocabulary, which no extraction needs.
    pub(super) head_logits: B,
}

/// What each half of a batch has of its own.
#[derive(Debug)]
pub(super) struct HalfWork<B> {
    /// Residual stream, [this rank's rows, hidden].
    pub(super) x: B,
    /// This rank's part of a sum across ranks, [rows, hidden].
    pub(super) partial: B,
    pub(super) latents: Latents<B>,
}

/// What the queries, keys and values of multi-head latent attention are expanded from.
#[derive(Debug)]
pub(super) struct Latents<B> {
    /// Normed query latent.
    pub(super) q: B,
    /// Normed key-value latent.
    pub(super) kv: B,
    /// The part of a key that is rotated.
    pub(super) k_pe: B,
}

impl<B> Work<B> {
    /// Takes the buffers that [`rooms`] lists, in its order, from `buffer`.
    pub(super) fn new(
        rooms: &Rooms,
        mut buffer: impl FnMut(Room) -> Result<B, TargetError>,
    ) -> Result<Self, TargetError> {
        let mut rooms = rooms.0.iter();
        let none = Room { name: "none", width: 0, ranks: 1, precision: Precision::Compute };
        let mut take = || buffer(*rooms.next().unwrap_or(&none));
        Ok(Self {
            half: HalfWork::new(&mut take)?,
            parked: HalfWork::new(&mut take)?,
            received: take()?,
            normed: take()?,
            q: take()?,
            q_latent: take()?,
            latent: take()?,
            kv: take()?,
            k: take()?,
            v: take()?,
            spare: take()?,
            attended: take()?,
            gate: take()?,
            up: take()?,
            logits: take()?,
            head_logits: take()?,
        })
    }

    /// Takes up the other half of the batch.
    pub(super) fn switch(&mut self) {
        std::mem::swap(&mut self.half, &mut self.parked);
    }
}

impl<B> HalfWork<B> {
    fn new(take: &mut impl FnMut() -> Result<B, TargetError>) -> Result<Self, TargetError> {
        Ok(Self {
            x: take()?,
            partial: take()?,
            latents: Latents { q: take()?, kv: take()?, k_pe: take()? },
        })
    }
}

/// The largest size of every buffer, in the order of [`Work`]'s fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::target) struct Rooms(pub(in crate::target) Vec<Room>);

/// Which of the halves of a batch a list of rooms is for.
#[derive(Clone, Copy)]
struct HalfNames([&'static str; 5]);

const FIRST_HALF: HalfNames =
    HalfNames(["residual stream", "part of a sum", "query latent", "key latent", "rotated keys"]);

const SECOND_HALF: HalfNames = HalfNames([
    "residual stream, half",
    "part of a sum, half",
    "query latent, half",
    "key latent, half",
    "rotated keys, half",
]);

/// What the buffers of one of `ranks` ranks must hold a token of the batch. One rank alone never
/// halves its batch.
pub(in crate::target) fn rooms(spec: &TargetSpec, plan: &RankPlan, ranks: usize) -> Rooms {
    let hidden = spec.hidden_size;
    let widths = Widths::of(spec, plan);
    let mlp = plan.dense.len().max(plan.shared.len());
    let experts = spec.moe.as_ref().map_or(0, |moe| moe.num_experts);
    let room = |name, width, precision| Room { name, width, ranks: 1, precision };
    let compute = |name, width| room(name, width, Precision::Compute);
    let spread = |name, width| Room { ranks, ..compute(name, width) };
    // Latents are made from the rows of each rank where queries have one, else from all.
    let made = if widths.q_latent > 0 { ranks } else { 1 };
    // Keys are rounded once, after the rotation: it is what bf16 costs most accuracy.
    let precision = Precision::Single;
    let half = |HalfNames(names): HalfNames, present: usize, parts: usize| {
        [
            spread(names[0], present * hidden),
            compute(names[1], parts * hidden),
            compute(names[2], present * widths.q_latent),
            compute(names[3], present * widths.kv_latent),
            room(names[4], present * widths.k_pe, precision),
        ]
    };
    let several = usize::from(ranks > 1);
    let mut rooms = Vec::from(half(FIRST_HALF, 1, several));
    rooms.extend(half(SECOND_HALF, several, several));
    rooms.extend([
        spread("parts of other ranks", several * ranks * hidden),
        compute("normed input", hidden),
        compute("queries", widths.q),
        Room { ranks: made, ..compute("query latent, plain", widths.q_latent) },
        Room {
            ranks: made,
            ..room("key latent, plain", widths.kv_latent + widths.k_pe, precision)
        },
        compute("expanded latent", widths.kv),
        compute("keys", widths.k),
        compute("values", widths.v),
        compute("spare", widths.spare),
        compute("attention output", widths.attended),
        compute("gate", mlp),
        compute("gate and up", 2 * mlp),
        room("router logits", experts, Precision::Single),
        room("logits", 0, Precision::Single),
    ]);
    Rooms(rooms)
}

#[derive(Default)]
struct Widths {
    q: usize,
    q_latent: usize,
    kv_latent: usize,
    kv: usize,
    k_pe: usize,
    k: usize,
    v: usize,
    spare: usize,
    attended: usize,
}

impl Widths {
    fn of(spec: &TargetSpec, plan: &RankPlan) -> Self {
        let (heads, kv_heads) = (plan.heads.len(), plan.kv_heads.len());
        match &spec.attention {
            AttentionSpec::Mla(mla) => {
                let (nope, rope) = (mla.qk_nope_head_dim, mla.qk_rope_head_dim);
                Self {
                    q: heads * (nope + rope),
                    q_latent: mla.q_lora_rank.unwrap_or(0),
                    kv_latent: mla.kv_lora_rank,
                    kv: heads * (nope + mla.v_head_dim),
                    k_pe: rope,
                    k: heads * (nope + rope),
                    v: heads * mla.v_head_dim,
                    spare: 0,
                    attended: heads * mla.v_head_dim,
                }
            }
            AttentionSpec::Gqa(gqa) => {
                let (q, k) = (heads * gqa.head_dim, kv_heads * gqa.head_dim);
                // Normed queries and keys change places with the spare buffer.
                let (swapped, spare) = if gqa.qk_norm { (q.max(k), q.max(k)) } else { (0, 0) };
                Self {
                    q: q.max(swapped),
                    k: k.max(swapped),
                    v: k,
                    spare,
                    attended: q,
                    ..Self::default()
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::target::collective::{Collective, Solo, Threads};
    use crate::target::cpu::CpuOps;
    use crate::target::model::{ForwardRequest, Model, Parts, Wanted};
    use crate::target::options::EngineOptions;
    use crate::target::source::Source;
    use crate::target::weights::Checkpoint;

    impl<B> HalfWork<B> {
        fn all(&self) -> [&B; 5] {
            let Self { x, partial, latents: Latents { q, kv, k_pe } } = self;
            [x, partial, q, kv, k_pe]
        }
    }

    impl<B> Work<B> {
        fn all(&self) -> Vec<&B> {
            let Self { half, parked, received, normed, q, q_latent, latent, kv, k, v, .. } = self;
            let Self { spare, attended, gate, up, logits, head_logits, .. } = self;
            let shared = [
                received,
                normed,
                q,
                q_latent,
                latent,
                kv,
                k,
                v,
                spare,
                attended,
                gate,
                up,
                logits,
                head_logits,
            ];
            half.all().into_iter().chain(parked.all()).chain(shared).collect()
        }
    }

    const TOKENS: usize = 12;

    /// Values in use of every buffer after a forward of the first rank.
    fn used(dir: &Path, tp: usize) -> (Rooms, Vec<usize>) {
        let spec = TargetSpec::read(dir).unwrap();
        let options = EngineOptions { tp, ..EngineOptions::new(dir) };
        let plans = options.plans(&spec).unwrap();
        let source = Source::Checkpoint(Checkpoint::open(dir).unwrap());
        let run = |plan: &RankPlan, collective: Box<dyn Collective<Vec<f32>>>| {
            let parts = Parts {
                ops: CpuOps::new(1),
                collective,
                source: &source,
                spec: &spec,
                plan: plan.clone(),
                qa_norm_eps: options.qa_norm_eps,
            };
            let mut model = Model::load(parts).unwrap();
            let request = ForwardRequest {
                ids: vec![1; TOKENS],
                cu_seqlens: vec![0, 4, TOKENS],
                wanted: Wanted { normed: true, ..Wanted::default() },
                ..ForwardRequest::default()
            };
            model.forward(&request).unwrap();
            model.work.all().iter().map(|buffer| buffer.len()).collect()
        };
        let used: Vec<usize> = match tp {
            1 => run(&plans[0], Box::new(Solo)),
            _ => std::thread::scope(|scope| {
                let (ranks, _) = Threads::group(tp);
                let threads: Vec<_> = plans
                    .iter()
                    .zip(ranks)
                    .map(|(plan, rank)| scope.spawn(|| run(plan, Box::new(rank))))
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).next().unwrap()
            }),
        };
        (rooms(&spec, &plans[0], tp), used)
    }

    /// What a forward really uses, on the CPU whose buffers grow as they must, is what the rooms
    /// allow; and no room is larger than needed.
    #[test]
    fn rooms_hold_what_a_forward_uses() {
        let models = ["models/nano-kimi", "tests/fixtures/tiny-odd", "tests/fixtures/stories260k"];
        for model in models {
            let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(model);
            for tp in [1, 2] {
                let (rooms, used) = used(&dir, tp);
                assert_eq!(rooms.0.len(), used.len());
                for (used, room) in used.into_iter().zip(rooms.0) {
                    // The batch goes in one piece; some buffers serve twice.
                    let absent = room.name.ends_with("half");
                    let serves_twice = ["gate", "gate and up"].contains(&room.name);
                    let needed = if absent { 0 } else { room.width * TOKENS / room.ranks };
                    let fits = used == needed || used < needed && serves_twice;
                    assert!(fits, "{model} tp {tp} {room:?} {used}");
                }
            }
        }
    }
}
