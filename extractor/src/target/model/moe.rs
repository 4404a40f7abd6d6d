//! Mixture of experts: a router, routed and shared experts. Knows nothing of how a device groups
//! rows by expert.

use kernels::router::{Routing, Scoring, weigh_given};

use super::load::Loader;
use super::mlp::Mlp;
use super::step::{Stage, Step};
use super::work::Work;
use crate::target::error::TargetError;
use crate::target::ops::{ExpertShare, Ops, RouteRule, RouterChoice, Rows, Write};
use crate::target::spec::MoeSpec;

pub(super) struct Moe<O: Ops> {
    router: O::Linear,
    bias: O::Buffer,
    rule: RouteRule,
    held: O::Experts,
    shared: Option<Mlp<O>>,
}

impl<O: Ops> Moe<O> {
    pub(super) fn load(
        loader: &mut Loader<'_, O>,
        moe: &MoeSpec,
        prefix: &str,
    ) -> Result<Self, TargetError> {
        let dims = [moe.num_experts, loader.spec.hidden_size];
        let share = ExpertShare {
            experts: loader.plan.experts.clone(),
            columns: loader.plan.expert_columns.clone(),
            width: moe.intermediate_size,
            hidden: loader.spec.hidden_size,
        };
        let experts = format!("{prefix}.experts");
        let held = loader.ops.load_experts(loader.source, &experts, &share)?;
        let shared = match moe.num_shared_experts * moe.intermediate_size {
            0 => None,
            width => Some(Mlp::load_shared(loader, &format!("{prefix}.shared_experts"), width)?),
        };
        let gate = format!("{prefix}.gate");
        Ok(Self {
            bias: match moe.scoring {
                Scoring::Sigmoid => {
                    loader.vector(&format!("{gate}.e_score_correction_bias"), moe.num_experts)?
                }
                Scoring::Softmax => loader.ops.zero_vector(moe.num_experts)?,
            },
            router: loader.whole(&gate, dims)?,
            rule: RouteRule {
                num_experts: moe.num_experts,
                scoring: moe.scoring,
                top_k: moe.top_k,
                num_groups: moe.num_groups,
                topk_group: moe.topk_group,
                normalise: moe.norm_topk_prob,
                scale: moe.routed_scaling_factor,
            },
            held,
            shared,
        })
    }

    /// Adds routed and shared experts of `work.normed`, whole, to the residual stream's sum.
    /// Returns the choice of experts.
    pub(super) fn forward(
        &self,
        step: &mut Step<'_, O>,
        index: usize,
    ) -> Result<O::Routing, TargetError> {
        let halved = step.other.is_some();
        step.arrive(Stage::Collective)?;
        if halved {
            // While the rows of the second half arrive.
            self.add_shared(step)?;
            step.switch();
            step.arrive(Stage::Collective)?;
            step.switch();
        }
        let Work { normed, logits, .. } = &mut *step.work;
        step.ops.matmul(logits, Rows::all(normed), &self.router, Write::Set)?;
        let routing = match step.experts.get(&index) {
            None => step.ops.route(logits, &self.bias, &self.rule)?,
            Some(given) => self.weigh(step, given)?,
        };
        step.ops.lap(Stage::Experts)?;
        if !halved {
            self.add_shared(step)?;
        }
        step.ops.experts(&step.work.normed, &routing, &self.held)?;
        step.each_half(|step| {
            // While the rows of the first half cross the ranks.
            if step.turn == 1 {
                self.add_shared(step)?;
            }
            step.combine(&routing)?;
            step.ops.lap(Stage::Experts)?;
            step.send()
        })?;
        Ok(routing)
    }

    /// Takes the experts `given`. For checks only: weighed on the host, which waits for the device.
    fn weigh(&self, step: &mut Step<'_, O>, given: &[u32]) -> Result<O::Routing, TargetError> {
        let experts = self.rule.num_experts;
        let values = given.len() / self.rule.top_k * experts;
        let logits = step.ops.download(&step.work.logits, 0..values)?;
        let bias = step.ops.download(&self.bias, 0..experts)?;
        let Routing { indices, weights, margins } =
            weigh_given(&logits, given, &self.rule.with_bias(&bias));
        step.ops.routing_from_host(RouterChoice { indices, weights, margins })
    }

    fn add_shared(&self, step: &mut Step<'_, O>) -> Result<(), TargetError> {
        self.shared.as_ref().map_or(Ok(()), |shared| shared.forward(step))
    }
}
