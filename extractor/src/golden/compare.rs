//! Compares what a target computes with expected values, with the experts that it chooses or with
//! those given by the expected values. Knows no files.

use std::collections::BTreeSet;

use super::{Golden, GoldenError, GoldenPrompt, LOGIT_NEAR_TIE, ROUTER_NEAR_TIE};
use crate::batch::TokenBatch;
use crate::cosine::{Cosines, DOUBT};
use crate::target::{
    CacheId, ExtendRequest, GivenExperts, MoeSpec, Probe, RankGroup, RouterChoice, TargetModel,
    Wanted,
};

/// Largest difference of one tensor from its expected values.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Prompt and tensor.
    pub tensor: String,
    /// Values compared.
    pub count: usize,
    /// Largest absolute difference; infinite where values are missing or not finite.
    pub max_abs: f64,
    /// Root mean square of the expected values.
    pub rms: f64,
}

impl Difference {
    /// Compares values of the same layout.
    pub fn of(tensor: String, found: &[f32], expected: &[f32]) -> Self {
        let square: f64 = expected.iter().map(|&value| f64::from(value).powi(2)).sum();
        let rms = (square / expected.len().max(1) as f64).sqrt();
        let apart = |(&a, &b): (&f32, &f32)| match (f64::from(a) - f64::from(b)).abs() {
            apart if apart.is_nan() => f64::INFINITY,
            apart => apart,
        };
        let max_abs = match found.len() == expected.len() {
            true => found.iter().zip(expected).map(apart).fold(0.0, f64::max),
            false => f64::INFINITY,
        };
        Self { tensor, count: expected.len(), max_abs, rms }
    }

    /// Largest absolute difference in units of the expected values' rms.
    pub fn relative(&self) -> f64 {
        match self.max_abs / self.rms {
            _ if self.max_abs == 0.0 => 0.0,
            // NaN would pass every comparison.
            ratio if ratio.is_nan() => f64::INFINITY,
            ratio => ratio,
        }
    }
}

/// What a comparison found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GoldenReport {
    /// One entry a tensor.
    pub differences: Vec<Difference>,
    /// Cosines of the states, one entry a tensor.
    pub cosines: Vec<Cosines>,
    /// Router choices compared.
    pub routed: usize,
    /// Router choices left out because their margin is below [`ROUTER_NEAR_TIE`].
    pub routed_near_ties: usize,
    /// Prompt, layer and position of choices that differ.
    pub misrouted: Vec<String>,
    /// Continuation tokens that agree.
    pub greedy: usize,
    /// Prompt and step of continuations that differ beyond near ties.
    pub greedy_wrong: Vec<String>,
}

/// What a comparison with the expected values' experts found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GivenReport {
    /// Cosines of the states, one entry a tensor.
    pub cosines: Vec<Cosines>,
    /// Choices of routers.
    pub routed: usize,
    /// How many of them the routers would have made otherwise.
    pub otherwise: usize,
    /// Largest margin that the expected values have for one of these.
    pub largest_margin: f32,
}

impl GivenReport {
    /// Every row points where it should, and no router is in doubt beyond what bf16 rounds.
    pub fn agrees(&self) -> bool {
        Cosines::rows_agree(&self.cosines) && self.largest_margin <= DOUBT
    }
}

impl GoldenReport {
    /// Largest relative difference of all tensors.
    pub fn worst(&self) -> f64 {
        self.differences.iter().map(Difference::relative).fold(0.0, f64::max)
    }

    /// Every tensor is within `tolerance` of its rms, and every choice is the expected one.
    pub fn agrees(&self, tolerance: f64) -> bool {
        !self.differences.is_empty()
            && self.worst() < tolerance
            && self.misrouted.is_empty()
            && self.greedy_wrong.is_empty()
    }
}

impl Golden {
    /// Runs every prompt through `target`, each in a batch of its own or all `together` in one,
    /// and compares.
    pub fn compare(
        &self,
        target: &mut RankGroup,
        together: bool,
    ) -> Result<GoldenReport, GoldenError> {
        let mut report = GoldenReport::default();
        self.run(
            target,
            together,
            |_| GivenExperts::new(),
            |prompt, probe| {
                report.cosines.extend(prompt.cosines(probe));
                prompt.compare_states(probe, &mut report);
            },
        )?;
        for prompt in &self.prompts {
            prompt.compare_greedy(target, &mut report)?;
        }
        Ok(report)
    }

    /// The same with every token sent to the experts of the expected values. `None` where the file
    /// has no choices.
    pub fn compare_given(
        &self,
        target: &mut RankGroup,
        together: bool,
    ) -> Result<Option<GivenReport>, GoldenError> {
        let Some(moe) = target.spec().moe.clone() else { return Ok(None) };
        if self.prompts.iter().any(|prompt| prompt.routers.is_empty()) {
            return Ok(None);
        }
        self.prompts.iter().try_for_each(|prompt| prompt.check_routers(&moe))?;
        let mut report = GivenReport::default();
        self.run(target, together, given_experts, |prompt, probe| {
            report.cosines.extend(prompt.cosines(probe));
            prompt.compare_margins(probe, &mut report);
        })?;
        Ok(Some(report))
    }

    /// Runs every prompt, and hands on what was found for each.
    fn run(
        &self,
        target: &mut RankGroup,
        together: bool,
        experts: impl Fn(&[GoldenPrompt]) -> GivenExperts,
        mut found: impl FnMut(&GoldenPrompt, &Probe),
    ) -> Result<(), GoldenError> {
        let hidden_size = target.spec().hidden_size;
        self.prompts.iter().try_for_each(|prompt| prompt.check_width(hidden_size))?;
        let size = if together { self.prompts.len() } else { 1 };
        for prompts in self.prompts.chunks(size.max(1)) {
            let samples = prompts.iter().map(GoldenPrompt::sample).collect::<Result<_, _>>()?;
            let layers: BTreeSet<_> = prompts.iter().flat_map(GoldenPrompt::layers).collect();
            let wanted = Wanted {
                layers: layers.into_iter().collect(),
                embeddings: true,
                normed: true,
                logits: true,
                routers: true,
                experts: experts(prompts),
            };
            let probe = target.probe(&TokenBatch::new(samples), wanted)?;
            let mut start = 0;
            for prompt in prompts {
                let end = start + prompt.input_ids.len();
                found(prompt, &probe.part(start..end));
                start = end;
            }
        }
        Ok(())
    }
}

/// The choices of `prompts` end to end, of layers that all of them have.
fn given_experts(prompts: &[GoldenPrompt]) -> GivenExperts {
    let Some((first, others)) = prompts.split_first() else { return GivenExperts::new() };
    let mut given: GivenExperts = first
        .routers
        .iter()
        .filter(|(layer, _)| others.iter().all(|prompt| prompt.routers.contains_key(layer)))
        .map(|(&layer, choice)| (layer, choice.indices.clone()))
        .collect();
    for (layer, experts) in &mut given {
        let more = others.iter().filter_map(|prompt| prompt.routers.get(layer));
        more.for_each(|choice| experts.extend(&choice.indices));
    }
    given
}

impl GoldenPrompt {
    fn cosines(&self, probe: &Probe) -> Vec<Cosines> {
        let width = probe.capture.hidden_size;
        let margins = self.smallest_margins();
        let compare = |(&k, expected): (&usize, &Vec<f32>)| {
            let found = self.found(probe, k);
            Cosines::of(format!("{}.h_{k}", self.name), (&found, expected), width, &margins)
        };
        self.states.iter().map(compare).collect()
    }

    /// Rows of state `k` at the expected positions.
    fn found(&self, probe: &Probe, k: usize) -> Vec<f32> {
        let found = match k {
            0 => probe.embeddings.clone(),
            _ => layer_rows(probe, k - 1),
        };
        pick(&found, &self.rows, probe.capture.hidden_size)
    }

    fn compare_states(&self, probe: &Probe, report: &mut GoldenReport) {
        let width = probe.capture.hidden_size;
        let mut differences = Vec::new();
        let mut compare = |part: &str, found: &[f32], expected: &[f32]| {
            let tensor = format!("{}.{part}", self.name);
            differences.push(Difference::of(tensor, found, expected));
        };
        for (&k, expected) in &self.states {
            compare(&format!("h_{k}"), &self.found(probe, k), expected);
        }
        if !self.normed.is_empty() {
            compare("normed", &pick(&probe.normed, &self.rows, width), &self.normed);
        }
        if !self.logits.is_empty() {
            let start = probe.logits.len().saturating_sub(self.logits.len());
            compare("logits", &probe.logits[start..], &self.logits);
        }
        report.differences.append(&mut differences);
        self.compare_routers(probe, report);
    }

    /// The smallest margin that any router had for the row of each state.
    fn smallest_margins(&self) -> Vec<f32> {
        let margin = |&row: &usize| {
            let margins = self.routers.values().filter_map(|choice| choice.margins.get(row));
            margins.copied().fold(f32::INFINITY, f32::min)
        };
        self.rows.iter().map(margin).collect()
    }

    fn compare_routers(&self, probe: &Probe, report: &mut GoldenReport) {
        for (layer, expected) in &self.routers {
            let found = probe.routers.iter().find(|(index, _)| index == layer);
            let top_k = expected.indices.len() / expected.margins.len().max(1);
            for (row, &margin) in expected.margins.iter().enumerate() {
                if margin < ROUTER_NEAR_TIE {
                    report.routed_near_ties += 1;
                    continue;
                }
                report.routed += 1;
                let choices = row * top_k..(row + 1) * top_k;
                let found = found.and_then(|(_, choice)| sorted(choice, choices.clone()));
                if found.is_none() || found != sorted(expected, choices) {
                    report.misrouted.push(format!("{} layer {layer} row {row}", self.name));
                }
            }
            if let Some((_, choice)) = found {
                let tensor = format!("{}.router.{layer}.weights", self.name);
                // A near tie may exchange experts, and their weights with them.
                let is_clear = expected.margins.iter().all(|&margin| margin >= ROUTER_NEAR_TIE);
                if is_clear {
                    let found = Difference::of(tensor, &choice.weights, &expected.weights);
                    report.differences.push(found);
                }
            }
        }
    }

    /// Where the router, seeing the expected states but for rounding, would choose otherwise.
    fn compare_margins(&self, probe: &Probe, report: &mut GivenReport) {
        for (layer, expected) in &self.routers {
            let found = probe.routers.iter().find(|(index, _)| index == layer);
            for (row, &margin) in expected.margins.iter().enumerate() {
                report.routed += 1;
                let found = found.and_then(|(_, choice)| choice.margins.get(row));
                if found.is_none_or(|&found| found.is_nan() || found < 0.0) {
                    report.otherwise += 1;
                    report.largest_margin = report.largest_margin.max(margin);
                }
            }
        }
    }

    /// Refuses choices that the router cannot take.
    fn check_routers(&self, moe: &MoeSpec) -> Result<(), GoldenError> {
        let choices = self.input_ids.len() * moe.top_k;
        for (layer, choice) in &self.routers {
            let mut rows = choice.indices.chunks(moe.top_k.max(1));
            let is_taken = |row: &[u32]| {
                let mut seen = row.to_vec();
                seen.sort_unstable();
                seen.dedup();
                seen.len() == row.len() && seen.iter().all(|&e| (e as usize) < moe.num_experts)
            };
            if choice.indices.len() != choices || !rows.all(is_taken) {
                return Err(GoldenError::Tensor {
                    name: format!("{}.router.{layer}.indices", self.name),
                    expected: format!(
                        "[{}, {}] different experts below {}",
                        self.input_ids.len(),
                        moe.top_k,
                        moe.num_experts
                    ),
                    found: format!("{} values, not all of them such", choice.indices.len()),
                });
            }
        }
        Ok(())
    }

    fn compare_greedy(
        &self,
        target: &mut RankGroup,
        report: &mut GoldenReport,
    ) -> Result<(), GoldenError> {
        let cache = CacheId(u64::MAX);
        let mut tokens = self.input_ids.clone();
        let mut keep = 0;
        for (step, &expected) in self.greedy_ids.iter().enumerate() {
            let request = ExtendRequest { cache, keep, tokens: &tokens, layers: &[] };
            let logits = target.extend(&request)?.logits;
            let last = &logits[logits.len() - logits.len() / tokens.len()..];
            if argmax(last) != expected as usize {
                let margin = self.greedy_margins.get(step).copied().unwrap_or(f32::INFINITY);
                if margin >= LOGIT_NEAR_TIE {
                    report.greedy_wrong.push(format!("{} step {step}", self.name));
                }
                break;
            }
            report.greedy += 1;
            keep += tokens.len();
            tokens = vec![expected];
        }
        target.drop_cache(cache);
        Ok(())
    }
}

fn layer_rows(probe: &Probe, layer: usize) -> Vec<f32> {
    let found = probe.capture.layers.iter().find(|found| usize::from(found.layer.0) == layer);
    found.map_or(Vec::new(), |found| found.rows.to_f32())
}

fn pick(values: &[f32], rows: &[usize], width: usize) -> Vec<f32> {
    let row = |&row: &usize| values.get(row * width..(row + 1) * width).unwrap_or(&[]);
    rows.iter().flat_map(row).copied().collect()
}

fn sorted(choice: &RouterChoice, choices: std::ops::Range<usize>) -> Option<Vec<u32>> {
    let mut experts = choice.indices.get(choices)?.to_vec();
    experts.sort_unstable();
    Some(experts)
}

/// Position of the largest value, the first of equals.
fn argmax(values: &[f32]) -> usize {
    let mut best = 0;
    for (index, &value) in values.iter().enumerate() {
        if value > values[best] {
            best = index;
        }
    }
    best
}
