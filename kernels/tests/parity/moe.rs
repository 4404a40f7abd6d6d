//! Kernels of the mixture of experts against their twins.

use kernels::cuda::{Dtype, Permutation, RouteRule, RoutingViews};
use kernels::reference;
use kernels::router::{RouterRule, Scoring, route_top_k};

use super::{Gpu, Named, Outcome, near, round, same, type_pairs, within};

pub(crate) const CASES: &[Named] =
    &[("route", route), ("permute", permute), ("gather_rows", gather_rows), ("combine", combine)];

fn route(gpu: &mut Gpu) -> Outcome {
    // Rows, experts, chosen, groups, groups kept, whether logits lie on a coarse grid of ties.
    let mut shapes = vec![
        (1, 1, 1, 1, 1, false),
        (7, 16, 4, 1, 1, true),
        (33, 16, 3, 4, 2, true),
        (129, 384, 8, 1, 1, false),
        (64, 128, 8, 1, 1, false),
        (50, 256, 8, 8, 4, false),
        (50, 256, 8, 8, 4, true),
        (5, 40, 40, 1, 1, true),
    ];
    if !gpu.quick {
        shapes.push((20_000, 384, 8, 1, 1, false));
    }
    for &shape in &shapes {
        route_shape(gpu, Scoring::Sigmoid, shape)?;
    }
    // No model has groups with a softmax, whose last bits decide between groups of equal sums.
    for &shape in shapes.iter().filter(|shape| shape.3 == 1) {
        route_shape(gpu, Scoring::Softmax, shape)?;
    }
    nan_rows(gpu)
}

fn route_shape(
    gpu: &mut Gpu,
    scoring: Scoring,
    (rows, experts, top_k, groups, kept_groups, ties): (usize, usize, usize, usize, usize, bool),
) -> Outcome {
    let mut logits = gpu.rng.values(rows * experts, Dtype::F32);
    let mut bias = gpu.rng.values(experts, Dtype::F32);
    if ties {
        logits.iter_mut().for_each(|x| *x = x.round());
        bias.iter_mut().for_each(|x| *x = x.round() / 16.0);
    } else {
        bias.iter_mut().for_each(|x| *x *= 0.05);
    }
    let x = gpu.matrix(&logits, [rows, experts], Dtype::F32, 3)?;
    let device_bias = gpu.vector(&bias)?;
    let indices = gpu.vector(&vec![7u32; rows * top_k])?;
    let weights = gpu.vector(&vec![7f32; rows * top_k])?;
    let margins = gpu.vector(&vec![7f32; rows])?;
    let rule = RouteRule { scoring, top_k, groups, kept_groups, normalise: true, scale: 2.5 };
    let views =
        RoutingViews { indices: indices.view, weights: weights.view, margins: margins.view };
    gpu.kernels.on(&gpu.stream).route(&x.view, device_bias.view, &rule, &views)?;
    let twin = RouterRule {
        scoring,
        top_k,
        groups,
        kept_groups,
        bias: &bias,
        normalise: true,
        scale: 2.5,
    };
    let want = route_top_k(&logits, &twin);
    let what = format!("{rows} rows, {rule:?} of {experts}, ties {ties}");
    let got = gpu.vector_values(&indices)?;
    let (got_weights, got_margins) = (gpu.vector_values(&weights)?, gpu.vector_values(&margins)?);
    within(&format!("margins, {what}"), &got_margins, &want.margins, (1e-5, 1e-6))?;
    // A score of the device may differ in the last bit, which decides between scores that near.
    // Equal logits give equal scores on both sides, so exact ties must agree.
    for row in 0..rows {
        let range = row * top_k..(row + 1) * top_k;
        let mut chosen = [got[range.clone()].to_vec(), want.indices[range.clone()].to_vec()];
        if chosen[0] == chosen[1] {
            let (got, want) = (&got_weights[range.clone()], &want.weights[range]);
            within(&format!("weights of row {row}, {what}"), got, want, (1e-5, 1e-7))?;
            continue;
        }
        let near_tie = want.margins[row].abs() < 1e-6;
        chosen.iter_mut().for_each(|set| set.sort_unstable());
        if ties || (chosen[0] != chosen[1] && !near_tie) {
            same(&format!("experts of row {row}, {what}"), &chosen[0], &chosen[1])?;
            return Err(format!("order of experts of row {row}, {what}").into());
        }
    }
    Ok(())
}

/// A row of NaN must have NaN weights and experts that exist.
fn nan_rows(gpu: &mut Gpu) -> Outcome {
    let x = gpu.matrix(&[f32::NAN; 12], [1, 12], Dtype::F32, 0)?;
    let bias = gpu.vector(&[0f32; 12])?;
    let indices = gpu.vector(&[7u32; 3])?;
    let (weights, margins) = (gpu.vector(&[7f32; 3])?, gpu.vector(&[7f32])?);
    let scoring = Scoring::Sigmoid;
    let rule =
        RouteRule { scoring, top_k: 3, groups: 3, kept_groups: 2, normalise: true, scale: 1.0 };
    let views =
        RoutingViews { indices: indices.view, weights: weights.view, margins: margins.view };
    gpu.kernels.on(&gpu.stream).route(&x.view, bias.view, &rule, &views)?;
    let indices = gpu.vector_values(&indices)?;
    let weights = gpu.vector_values(&weights)?;
    if indices.iter().any(|&i| i >= 12) || weights.iter().any(|w| !w.is_nan()) {
        return Err(format!("a row of NaN: experts {indices:?}, weights {weights:?}").into());
    }
    Ok(())
}

/// Device vectors that one grouping fills.
struct Places {
    counts: super::HeldVector<u32>,
    offsets: super::HeldVector<u32>,
    sources: super::HeldVector<u32>,
    places: super::HeldVector<u32>,
    scratch: super::HeldVector<u32>,
}

impl Places {
    fn new(gpu: &Gpu, choices: usize, held: usize, align: usize) -> Outcome<Self> {
        let scratch = Permutation::scratch_len(choices, held);
        Ok(Self {
            counts: gpu.vector(&vec![9u32; held])?,
            offsets: gpu.vector(&vec![9u32; held + 1])?,
            sources: gpu.vector(&vec![9u32; choices + held * (align - 1)])?,
            places: gpu.vector(&vec![9u32; choices])?,
            scratch: gpu.vector(&vec![9u32; scratch])?,
        })
    }

    fn permutation(&self, first: usize, align: usize) -> Permutation {
        Permutation {
            first,
            align,
            counts: self.counts.view,
            offsets: self.offsets.view,
            sources: self.sources.view,
            places: self.places.view,
            scratch: self.scratch.view,
        }
    }
}

fn permute(gpu: &mut Gpu) -> Outcome {
    // Rows, choices a row, experts, first held, held.
    let mut shapes = vec![
        (1, 1, 1, 0, 1),
        (5, 2, 16, 0, 16),
        (64, 8, 16, 4, 8),
        (700, 8, 384, 48, 48),
        (300, 8, 384, 0, 384),
        (100, 4, 16, 12, 4),
        (40, 4, 16, 0, 1024),
    ];
    if !gpu.quick {
        shapes.extend([(33_000, 8, 384, 96, 48), (20_000, 8, 384, 0, 384)]);
    }
    for (rows, top_k, experts, first, held) in shapes {
        // Skewed, so that some experts have nothing and some much.
        let indices: Vec<u32> = (0..rows * top_k)
            .map(|_| gpu.rng.below(1 + gpu.rng.0 as usize % experts) as u32)
            .collect();
        let device_indices = gpu.vector(&indices)?;
        let align = [1, 32][rows % 2];
        let places = Places::new(gpu, rows * top_k, held, align)?;
        let permutation = places.permutation(first, align);
        gpu.kernels.on(&gpu.stream).permute(device_indices.view, top_k, &permutation)?;
        let want = reference::group_by_expert(&indices, top_k, (first as u32, held), align as u32);
        let what = format!("{rows} x {top_k} of {experts}, held {first} + {held}");
        same(&format!("counts, {what}"), &gpu.vector_values(&places.counts)?, &want.counts)?;
        same(&format!("offsets, {what}"), &gpu.vector_values(&places.offsets)?, &want.offsets)?;
        same(&format!("places, {what}"), &gpu.vector_values(&places.places)?, &want.places)?;
        let sources = gpu.vector_values(&places.sources)?;
        let taken = |sources: &[u32]| -> Vec<u32> {
            let held = want.places.iter().filter(|&&place| place != u32::MAX);
            held.map(|&place| sources[place as usize]).collect()
        };
        same(&format!("sources, {what}"), &taken(&sources), &taken(&want.sources))?;
    }
    Ok(())
}

fn gather_rows(gpu: &mut Gpu) -> Outcome {
    for ([rows, cols], pitch) in gpu.shapes() {
        for (from, to) in type_pairs() {
            let values = gpu.rng.values(rows * cols, from);
            let taken = 2 * rows + 1;
            let sources: Vec<u32> = (0..taken).map(|_| gpu.rng.below(rows) as u32).collect();
            let x = gpu.matrix(&values, [rows, cols], from, pitch)?;
            let out = gpu.matrix(&vec![9.0; taken * cols], [taken, cols], to, 8)?;
            let device_sources = gpu.vector(&sources)?;
            let on = gpu.kernels.on(&gpu.stream);
            on.gather_rows(&out.view, &x.view, device_sources.view)?;
            let want: Vec<f32> = (sources.iter())
                .flat_map(|&row| &values[row as usize * cols..][..cols])
                .map(|&x| round(x, to))
                .collect();
            same(&format!("{from:?} {to:?} [{rows}, {cols}]"), &gpu.values(&out)?, &want)?;
        }
    }
    Ok(())
}

fn combine(gpu: &mut Gpu) -> Outcome {
    for ([rows, cols], pitch) in gpu.shapes() {
        for (from, to) in type_pairs() {
            let top_k = 1 + gpu.rng.below(8);
            let grouped = rows + 3;
            let x_values = gpu.rng.values(grouped * cols, from);
            let mut want = gpu.rng.values(rows * cols, to);
            let places: Vec<u32> = (0..rows * top_k)
                .map(|_| gpu.rng.below(grouped * 3 / 2) as u32)
                .map(|place| if place as usize >= grouped { u32::MAX } else { place })
                .collect();
            let weights = gpu.rng.values(rows * top_k, Dtype::F32);
            let x = gpu.matrix(&x_values, [grouped, cols], from, pitch)?;
            let out = gpu.matrix(&want, [rows, cols], to, 8)?;
            let (device_places, device_weights) = (gpu.vector(&places)?, gpu.vector(&weights)?);
            let on = gpu.kernels.on(&gpu.stream);
            on.combine(&out.view, &x.view, device_places.view, device_weights.view)?;
            reference::combine(&mut want, &x_values, &places, &weights, cols);
            near(&format!("{from:?} {to:?} [{rows}, {cols}]"), &gpu.values(&out)?, &want, to)?;
        }
    }
    Ok(())
}
