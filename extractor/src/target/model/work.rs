//! The buffers of a forward and how large each can become. Knows nothing of devices.

use crate::target::error::TargetError;
use crate::target::ops::{Precision, Room};
use crate::target::plan::RankPlan;
use crate::target::spec::{AttentionSpec, TargetSpec};

/// Buffers that live as long as the model, so that layers allocate nothing.
#[derive(Debug)]
pub(super) struct Work<B> {
    /// Residual stream, [rows, hidden].
    pub(super) x: B,
    /// This rank's part of a sum across ranks.
    pub(super) partial: B,
    /// Normed input of a block, [rows, hidden].
    pub(super) normed: B,
    pub(super) q: B,
    pub(super) q_latent: B,
    pub(super) latent: B,
    pub(super) kv: B,
    pub(super) k_pe: B,
    pub(super) k: B,
    pub(super) v: B,
    pub(super) spare: B,
    pub(super) attended: B,
    pub(super) gate: B,
    pub(super) up: B,
    pub(super) logits: B,
    /// Logits of the vocabulary, which no extraction needs.
    pub(super) head_logits: B,
    /// `x`, `partial` and `normed` of the other half of the batch.
    parked: [B; 3],
}

impl<B> Work<B> {
    /// Takes the buffers that [`rooms`] lists, from `buffer`.
    pub(super) fn new(
        rooms: &Rooms,
        mut buffer: impl FnMut(Room) -> Result<B, TargetError>,
    ) -> Result<Self, TargetError> {
        let mut take = |index: usize| buffer(rooms.0[index]);
        Ok(Self {
            x: take(0)?,
            partial: take(1)?,
            normed: take(2)?,
            q: take(3)?,
            q_latent: take(4)?,
            latent: take(5)?,
            kv: take(6)?,
            k_pe: take(7)?,
            k: take(8)?,
            v: take(9)?,
            spare: take(10)?,
            attended: take(11)?,
            gate: take(12)?,
            up: take(13)?,
            logits: take(14)?,
            head_logits: take(15)?,
            parked: [take(16)?, take(17)?, take(18)?],
        })
    }

    /// Takes up the other half of the batch.
    pub(super) fn switch(&mut self) {
        let [x, partial, normed] = &mut self.parked;
        std::mem::swap(&mut self.x, x);
        std::mem::swap(&mut self.partial, partial);
        std::mem::swap(&mut self.normed, normed);
    }
}

/// The largest size of every buffer, in the order of [`Work`]'s fields. One rank alone never
/// halves its batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::target) struct Rooms(pub(in crate::target) [Room; 19]);

/// What the buffers of one rank must hold a token of the batch.
pub(in crate::target) fn rooms(spec: &TargetSpec, plan: &RankPlan) -> Rooms {
    let hidden = spec.hidden_size;
    let (heads, kv_heads) = (plan.heads.len(), plan.kv_heads.len());
    let widths = match &spec.attention {
        AttentionSpec::Mla(mla) => {
            let (nope, rope) = (mla.qk_nope_head_dim, mla.qk_rope_head_dim);
            let (q_rank, kv_rank) = (mla.q_lora_rank.unwrap_or(0), mla.kv_lora_rank);
            Widths {
                q: heads * (nope + rope),
                q_latent: q_rank,
                latent: kv_rank + rope,
                kv: heads * (nope + mla.v_head_dim),
                k_pe: rope,
                k: heads * (nope + rope),
                v: heads * mla.v_head_dim,
                spare: q_rank.max(kv_rank),
                attended: heads * mla.v_head_dim,
            }
        }
        AttentionSpec::Gqa(gqa) => {
            let (q, k) = (heads * gqa.head_dim, kv_heads * gqa.head_dim);
            // Normed queries and keys change places with the spare buffer.
            let (swapped, spare) = if gqa.qk_norm { (q.max(k), q.max(k)) } else { (0, 0) };
            Widths {
                q: q.max(swapped),
                k: k.max(swapped),
                v: k,
                spare,
                attended: q,
                ..Widths::default()
            }
        }
    };
    let mlp = plan.dense.len().max(plan.shared.len());
    let partial = if plan.world_size > 1 { hidden } else { 0 };
    let experts = spec.moe.as_ref().map_or(0, |moe| moe.num_experts);
    let room = |name, width, precision| Room { name, width, precision };
    let compute = |name, width| room(name, width, Precision::Compute);
    Rooms([
        compute("residual stream", hidden),
        room("partial sum", partial, Precision::Single),
        compute("normed input", hidden),
        compute("queries", widths.q),
        compute("query latent", widths.q_latent),
        compute("key-value latent", widths.latent),
        compute("expanded latent", widths.kv),
        compute("rotated keys", widths.k_pe),
        compute("keys", widths.k),
        compute("values", widths.v),
        compute("spare", widths.spare),
        compute("attention output", widths.attended),
        compute("gate", mlp),
        compute("gate and up", 2 * mlp),
        room("router logits", experts, Precision::Single),
        room("logits", 0, Precision::Single),
        compute("residual stream, half", partial),
        room("partial sum, half", partial, Precision::Single),
        compute("normed input, half", partial),
    ])
}

#[derive(Default)]
struct Widths {
    q: usize,
    q_latent: usize,
    latent: usize,
    kv: usize,
    k_pe: usize,
    k: usize,
    v: usize,
    spare: usize,
    attended: usize,
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::target::collective::Solo;
    use crate::target::cpu::CpuOps;
    use crate::target::model::{ForwardRequest, Model, Parts, Wanted};
    use crate::target::options::EngineOptions;
    use crate::target::source::Source;
    use crate::target::weights::Checkpoint;

    impl<B> Work<B> {
        fn all(&self) -> [&B; 19] {
            let Self { x, partial, normed, q, q_latent, latent, kv, k_pe, k, v, .. } = self;
            let Self { spare, attended, gate, up, logits, head_logits, parked, .. } = self;
            let [a, b, c] = parked;
            [
                x,
                partial,
                normed,
                q,
                q_latent,
                latent,
                kv,
                k_pe,
                k,
                v,
                spare,
                attended,
                gate,
                up,
                logits,
                head_logits,
                a,
                b,
                c,
            ]
        }
    }

    /// What a forward really uses, on the CPU whose buffers grow as they must, is what the rooms
    /// allow; and no room is larger than needed.
    #[test]
    fn rooms_hold_what_a_forward_uses() {
        let models = ["models/nano-kimi", "tests/fixtures/tiny-odd", "tests/fixtures/stories260k"];
        for model in models {
            let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(model);
            let spec = TargetSpec::read(&dir).unwrap();
            for tp in [1, 2] {
                let options = EngineOptions { tp, ..EngineOptions::new(&dir) };
                let plan = options.plans(&spec).unwrap().remove(0);
                let rooms = rooms(&spec, &plan);
                let source = Source::Checkpoint(Checkpoint::open(&dir).unwrap());
                let mut model = Model::load(Parts {
                    ops: CpuOps::new(1),
                    collective: Box::new(Solo),
                    source: &source,
                    spec: &spec,
                    plan,
                    qa_norm_eps: options.qa_norm_eps,
                })
                .unwrap();
                let wanted = Wanted { normed: true, ..Wanted::default() };
                let request = ForwardRequest {
                    ids: vec![1; 11],
                    cu_seqlens: vec![0, 4, 11],
                    wanted,
                    ..ForwardRequest::default()
                };
                model.forward(&request).unwrap();
                let used = model.work.all().map(|buffer: &Vec<f32>| buffer.len());
                for (used, room) in used.into_iter().zip(rooms.0) {
                    // Buffers of one rank alone: no sums, no halves. Some serve twice.
                    let absent = room.name.starts_with("partial") || room.name.ends_with("half");
                    let serves_twice = ["spare", "gate", "gate and up"].contains(&room.name);
                    let needed = if absent { 0 } else { room.width * 11 };
                    assert!(used == needed || used < needed && serves_twice, "{room:?} {used}");
                }
            }
        }
    }
}
