//! Choice of experts: scores, a bias that counts only for the choice, groups, top k.
//! Knows nothing of the experts themselves.

/// What becomes of an expert's logit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scoring {
    /// The sigmoid of each (DeepSeek-V3, Kimi).
    Sigmoid,
    /// The softmax over all (Qwen3-MoE).
    Softmax,
}

/// How a layer chooses its experts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RouterRule<'a> {
    /// Scores of the experts.
    pub scoring: Scoring,
    /// Experts chosen for a token.
    pub top_k: usize,
    /// Groups of neighbouring experts of equal size; 1 for none.
    pub groups: usize,
    /// Groups, those with the largest sum of their two best experts, that may be chosen from.
    pub kept_groups: usize,
    /// Added to the scores for the choice only: [experts].
    pub bias: &'a [f32],
    /// Whether the chosen weights are divided by their sum.
    pub normalise: bool,
    /// Factor on the weights.
    pub scale: f32,
}

/// The experts of every token, the best selection score first.
#[derive(Clone, PartialEq, Debug)]
pub struct Routing {
    /// Expert numbers, row-major [tokens, top_k].
    pub indices: Vec<u32>,
    /// Weights of the experts, row-major [tokens, top_k].
    pub weights: Vec<f32>,
    /// Selection score of the last expert chosen minus the best one not chosen of the groups
    /// kept: [tokens]; infinite where none is left. Small margins are where engines differ.
    pub margins: Vec<f32>,
}

/// Chooses the experts for every row of `logits` ([tokens, experts], experts = `bias.len()`).
/// Equal scores go to the lowest number.
pub fn route_top_k(logits: &[f32], rule: &RouterRule<'_>) -> Routing {
    let experts = rule.bias.len();
    assert_rule(rule, logits.len());
    let tokens = logits.len() / experts;
    let mut routing = Routing {
        indices: Vec::with_capacity(tokens * rule.top_k),
        weights: Vec::with_capacity(tokens * rule.top_k),
        margins: Vec::with_capacity(tokens),
    };
    let mut open = vec![true; experts];
    let mut selection = vec![0.0; experts];
    for logits in logits.chunks_exact(experts) {
        let scores = scores(logits, rule.scoring);
        for ((selection, score), bias) in selection.iter_mut().zip(&scores).zip(rule.bias) {
            *selection = score + bias;
        }
        open_groups(&mut open, &selection, rule);
        choose(&mut routing, &scores, &selection, (&mut open, rule));
    }
    routing
}

/// Weighs the experts given for every row of `logits`: `indices` is [tokens, top_k], all below
/// `bias.len()` and different within a row. A margin, of the worst given expert over the best other
/// one, is negative where [`route_top_k`] would have chosen otherwise.
pub fn weigh_given(logits: &[f32], indices: &[u32], rule: &RouterRule<'_>) -> Routing {
    let experts = rule.bias.len();
    assert_rule(rule, logits.len());
    assert_eq!(indices.len(), logits.len() / experts * rule.top_k, "router: experts for each row");
    let mut routing = Routing { indices: indices.to_vec(), weights: vec![], margins: vec![] };
    let mut open = vec![true; experts];
    for (logits, given) in logits.chunks_exact(experts).zip(indices.chunks_exact(rule.top_k)) {
        let scores = scores(logits, rule.scoring);
        let selection: Vec<f32> = scores.iter().zip(rule.bias).map(|(s, bias)| s + bias).collect();
        open_groups(&mut open, &selection, rule);
        given.iter().for_each(|&expert| open[expert as usize] = false);
        let chosen = given.iter().map(|&expert| selection[expert as usize]);
        let last = chosen.fold(f32::INFINITY, f32::min);
        routing.weights.extend(given.iter().map(|&expert| scores[expert as usize]));
        finish(&mut routing, last, (&selection, &open, rule));
    }
    routing
}

fn assert_rule(rule: &RouterRule<'_>, logits: usize) {
    let experts = rule.bias.len();
    let RouterRule { top_k, groups, kept_groups, .. } = *rule;
    assert!(experts > 0 && logits.is_multiple_of(experts), "router: logits are not whole rows");
    assert!(groups > 0 && experts.is_multiple_of(groups), "router: {experts} in {groups} groups");
    assert!((1..=groups).contains(&kept_groups), "router: {kept_groups} of {groups} groups kept");
    assert!(
        (1..=experts / groups * kept_groups).contains(&top_k),
        "router: {top_k} experts out of {kept_groups} groups of {}",
        experts / groups
    );
}

fn scores(logits: &[f32], scoring: Scoring) -> Vec<f32> {
    match scoring {
        Scoring::Sigmoid => logits.iter().map(|&x| 1.0 / (1.0 + (-x).exp())).collect(),
        Scoring::Softmax => {
            let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut scores: Vec<f32> = logits.iter().map(|&x| (x - most).exp()).collect();
            let sum: f32 = scores.iter().sum();
            scores.iter_mut().for_each(|score| *score /= sum);
            scores
        }
    }
}

/// Marks the experts of the groups that may be chosen from.
fn open_groups(open: &mut [bool], selection: &[f32], rule: &RouterRule<'_>) {
    let size = selection.len() / rule.groups;
    if rule.kept_groups == rule.groups {
        open.fill(true);
        return;
    }
    open.fill(false);
    let scores: Vec<f32> = selection.chunks_exact(size).map(sum_of_two_best).collect();
    let mut left = vec![true; rule.groups];
    for _ in 0..rule.kept_groups {
        if let Some(group) = best(&scores, &left) {
            left[group] = false;
            open[group * size..][..size].fill(true);
        }
    }
}

fn sum_of_two_best(group: &[f32]) -> f32 {
    let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &score in group {
        if score > first {
            (first, second) = (score, first);
        } else if score > second {
            second = score;
        }
    }
    if group.len() > 1 { first + second } else { first }
}

/// The lowest number among the largest of the scores that are still open.
fn best(scores: &[f32], open: &[bool]) -> Option<usize> {
    let mut best: Option<usize> = None;
    for (i, &score) in scores.iter().enumerate() {
        if open[i] && best.is_none_or(|best| score > scores[best]) {
            best = Some(i);
        }
    }
    best
}

fn choose(
    routing: &mut Routing,
    scores: &[f32],
    selection: &[f32],
    (open, rule): (&mut [bool], &RouterRule<'_>),
) {
    let mut last = f32::INFINITY;
    for _ in 0..rule.top_k {
        // The rule's check leaves enough experts open.
        let Some(expert) = best(selection, open) else { break };
        open[expert] = false;
        last = selection[expert];
        routing.indices.push(expert as u32);
        routing.weights.push(scores[expert]);
    }
    finish(routing, last, (selection, open, rule));
}

/// The margin of a row, and its weights from the scores of its experts, which are there.
fn finish(
    routing: &mut Routing,
    last: f32,
    (selection, open, rule): (&[f32], &[bool], &RouterRule<'_>),
) {
    let first = routing.weights.len() - rule.top_k;
    let rejected = best(selection, open).map_or(f32::NEG_INFINITY, |expert| selection[expert]);
    routing.margins.push(last - rejected);
    let weights = &mut routing.weights[first..];
    let sum = if rule.normalise { weights.iter().sum::<f32>() + 1e-20 } else { 1.0 };
    for weight in weights {
        *weight = *weight / sum * rule.scale;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Sorts everything with std: an independent statement of the same rule.
    fn route_slow(logits: &[f32], rule: &RouterRule<'_>) -> (Vec<u32>, Vec<f64>, f64) {
        let scores: Vec<f32> = logits.iter().map(|&x| 1.0 / (1.0 + (-x).exp())).collect();
        let selection: Vec<f32> = scores.iter().zip(rule.bias).map(|(s, b)| s + b).collect();
        let size = logits.len() / rule.groups;
        let mut groups: Vec<(f32, usize)> = (0..rule.groups)
            .map(|g| {
                let mut of_group = selection[g * size..][..size].to_vec();
                of_group.sort_by(|a, b| b.total_cmp(a));
                (of_group.iter().take(2).sum(), g)
            })
            .collect();
        groups.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let kept: Vec<usize> = groups.iter().take(rule.kept_groups).map(|g| g.1).collect();
        let mut order: Vec<usize> =
            (0..logits.len()).filter(|e| kept.contains(&(e / size))).collect();
        order.sort_by(|&a, &b| selection[b].total_cmp(&selection[a]).then(a.cmp(&b)));
        let chosen = &order[..rule.top_k];
        let sum: f64 = chosen.iter().map(|&e| f64::from(scores[e])).sum();
        let sum = if rule.normalise { sum } else { 1.0 };
        let margin = order.get(rule.top_k).map_or(f64::INFINITY, |&e| {
            f64::from(selection[chosen[rule.top_k - 1]] - selection[e])
        });
        (
            chosen.iter().map(|&e| e as u32).collect(),
            chosen.iter().map(|&e| f64::from(scores[e]) / sum * f64::from(rule.scale)).collect(),
            margin,
        )
    }

    proptest! {
        /// Logits on a coarse grid, so that ties are common.
        #[test]
        fn matches_a_full_sort(
            (groups, size) in (1usize..6, 2usize..9),
            (kept, top_k) in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
            grid in prop::collection::vec(-4i8..4, 3 * 5 * 8),
            biases in prop::collection::vec(-2i8..3, 5 * 8),
            normalise in any::<bool>(),
        ) {
            let experts = groups * size;
            let kept_groups = 1 + kept.index(groups);
            let top_k = 1 + top_k.index(kept_groups * size);
            let grid = &grid[..3 * experts];
            let logits: Vec<f32> = grid.iter().map(|&g| f32::from(g) / 2.0).collect();
            let bias: Vec<f32> = biases[..experts].iter().map(|&b| f32::from(b) / 16.0).collect();
            let (scoring, bias) = (Scoring::Sigmoid, &bias[..]);
            let rule =
                RouterRule { scoring, top_k, groups, kept_groups, bias, normalise, scale: 2.5 };
            let routing = route_top_k(&logits, &rule);
            for (t, logits) in logits.chunks(experts).enumerate() {
                let (indices, weights, margin) = route_slow(logits, &rule);
                prop_assert_eq!(&routing.indices[t * top_k..][..top_k], &indices[..]);
                for (got, want) in routing.weights[t * top_k..][..top_k].iter().zip(weights) {
                    prop_assert!((f64::from(*got) - want).abs() < 1e-6);
                }
                prop_assert!(f64::from(routing.margins[t]) == margin);
            }
            prop_assert_eq!(weigh_given(&logits, &routing.indices, &rule), routing);
        }
    }

    proptest! {
        #[test]
        fn softmax_chooses_by_logit_and_weighs_by_share(
            logits in prop::collection::vec(-30i8..30, 2..40),
            top_k in any::<prop::sample::Index>(),
            normalise in any::<bool>(),
        ) {
            let experts = logits.len();
            let (scoring, top_k) = (Scoring::Softmax, 1 + top_k.index(experts));
            let (groups, kept_groups, bias) = (1, 1, &vec![0.0; experts][..]);
            let rule =
                RouterRule { scoring, top_k, groups, kept_groups, bias, normalise, scale: 2.0 };
            let single: Vec<f32> = logits.iter().map(|&x| f32::from(x) / 4.0).collect();
            let routing = route_top_k(&single, &rule);
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by_key(|&expert| (-i32::from(logits[expert]), expert));
            order.truncate(top_k);
            let share = |expert: usize| (f64::from(logits[expert]) / 4.0).exp();
            let all: f64 = (0..experts).map(share).sum();
            let sum = if normalise { order.iter().map(|&e| share(e)).sum() } else { all };
            for (&expert, (index, weight)) in
                order.iter().zip(routing.indices.iter().zip(&routing.weights))
            {
                prop_assert_eq!(expert as u32, *index);
                prop_assert!((f64::from(*weight) - 2.0 * share(expert) / sum).abs() < 1e-6);
            }
            prop_assert_eq!(weigh_given(&single, &routing.indices, &rule), routing);
        }
    }

    #[test]
    fn the_bias_chooses_but_does_not_weigh() {
        let bias = [0.0, 0.0, 0.5, 0.0];
        let rule = RouterRule {
            scoring: Scoring::Sigmoid,
            top_k: 2,
            groups: 1,
            kept_groups: 1,
            bias: &bias,
            normalise: true,
            scale: 2.0,
        };
        let routing = route_top_k(&[0.0; 4], &rule);
        assert_eq!(routing.indices, [2, 0]);
        assert_eq!(routing.weights, [1.0, 1.0]);
        assert_eq!(routing.margins, [0.0]);
    }

    #[test]
    fn experts_that_are_given_are_weighed_and_their_margin_says_that_others_are_better() {
        let rule = RouterRule {
            scoring: Scoring::Sigmoid,
            top_k: 2,
            groups: 1,
            kept_groups: 1,
            bias: &[0.0, 0.25, 0.0],
            normalise: true,
            scale: 3.0,
        };
        let given = weigh_given(&[0.0, f32::NEG_INFINITY, 0.0], &[1, 2], &rule);
        assert_eq!(given.weights, [0.0, 3.0]);
        assert_eq!(given.margins, [0.25 - 0.5]);
    }

    /// A bad number must reach the finite check of the caller, not vanish here.
    #[test]
    fn a_token_of_nan_has_nan_weights() {
        let rule = RouterRule {
            scoring: Scoring::Sigmoid,
            top_k: 1,
            groups: 1,
            kept_groups: 1,
            bias: &[0.0; 3],
            normalise: true,
            scale: 1.0,
        };
        let routing = route_top_k(&[f32::NAN; 3], &rule);
        assert_eq!(routing.indices, [0]);
        assert!(routing.weights[0].is_nan());
    }
}
