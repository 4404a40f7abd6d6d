//! The training step against independent numbers, and against itself in other forms.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Tensor, TensorData};
use proptest::prelude::*;
use trainer::golden::GoldenCase;
use trainer::masks::MaskMode;
use trainer::ops::HandOver;
use trainer::ttt::{TttOutput, step_rows};
use trainer::{
    BatchTokens, DraftOps, Eagle3Draft, Param, TrainBatch, TttMetrics, TttOptions, ttt_step,
};

type B = Autodiff<Flex>;
type Gradients = Vec<(String, Vec<f32>)>;

const FILES: [&str; 5] =
    ["ttt_a_gqa_packed", "ttt_b_mla", "ttt_c_eagle31", "ttt_d_specforge", "ttt_e_edges"];

fn golden(name: &str) -> GoldenCase {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    GoldenCase::open(&root.join(format!("../tests/fixtures/{name}.safetensors"))).unwrap()
}

/// What a float32 step may differ by, from the rounding of an independent float32 run.
fn limit(name: &str) -> f64 {
    match name {
        "row_mask" | "step_rows" => 0.0,
        "rope.inv_freq" | "attention_scale" => 1e-15,
        "acc" | "full_acc" | "accept_len" => 1e-6,
        "loss" | "step_loss" | "alpha" => 1e-5,
        name if name.starts_with("grad.") => 1e-4,
        // Sums over rows, states and logits.
        _ => 5e-5,
    }
}

#[test]
fn goldens_hold_row_sparse_and_dense() {
    for name in FILES {
        for row_sparse in [true, false] {
            let list = golden(name).compare::<B>(row_sparse, &Default::default()).unwrap();
            assert!(list.iter().filter(|d| d.name.starts_with("grad.")).count() >= 13);
            for difference in list {
                assert!(
                    difference.value <= limit(&difference.name),
                    "{name}, row_sparse {row_sparse}: {difference:?}"
                );
            }
        }
    }
}

/// Gradients of a golden step by parameter: those left at the end of the backward pass, and
/// matrices that were handed over before, in that order, if asked for.
fn gradients_of(case: &GoldenCase, early: bool) -> [Gradients; 2] {
    let device = Default::default();
    let draft = Eagle3Draft::<B>::tracked(&case.draft(&device).unwrap());
    let matrices = draft.parameters().into_iter().filter_map(|(name, param)| match param {
        Param::Matrix(x) => Some((name, x)),
        Param::Vector(_) => None,
    });
    let (names, leaves): (Vec<String>, Vec<Tensor<B, 2>>) = matrices.unzip();
    let early_ones = Arc::new(Mutex::new(Vec::new()));
    let receiver = {
        let early_ones = early_ones.clone();
        move |number: usize, gradient: Tensor<Flex, 2>| {
            let values = Param::Matrix(gradient).to_vec();
            early_ones.lock().unwrap().push((names[number].clone(), values));
        }
    };
    let counting = early.then(|| B::hand_over(&leaves, Arc::new(receiver)));
    let (target, batch) = (case.target(&device).unwrap(), case.batch(&device).unwrap());
    let output = ttt_step(&draft, &target, &batch, &case.options).unwrap();
    let received = draft.received(&mut output.backward());
    drop(counting);
    let names = draft.parameters().into_iter().map(|(name, _)| name);
    let left = names.zip(received).filter_map(|(name, got)| Some((name, got?.to_vec())));
    let left = left.collect();
    let early_ones = std::mem::take(&mut *early_ones.lock().unwrap());
    [left, early_ones]
}

/// Each once, whole, and no longer in the result.
#[test]
fn matrices_are_handed_over_when_the_last_operation_has_added_to_them() {
    for name in FILES {
        let case = golden(name);
        let [all, none] = gradients_of(&case, false);
        let [left, early] = gradients_of(&case, true);
        assert!(none.is_empty() && !early.is_empty());
        let order: Vec<&str> = early.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(order[0], "lm_head.weight", "{name}: {order:?}");
        assert!(order[1..4].iter().all(|name| name.contains(".mlp.")), "{name}: {order:?}");
        let mut both: Gradients = left.into_iter().chain(early).collect();
        let place = |name: &str| all.iter().position(|(other, _)| other == name).unwrap();
        both.sort_by_key(|(name, _)| place(name));
        assert!(both == all, "{name}");
    }
}

/// An operation that nobody counts, because it is burn's own.
#[test]
fn what_is_added_to_a_gradient_later_is_left_in_the_result() {
    let device = Default::default();
    let leaf = |values: [f32; 4]| {
        Tensor::<B, 2>::from_data(TensorData::new(values.to_vec(), [2, 2]), &device).require_grad()
    };
    let (x, weight) = (leaf([1.0, 2.0, 3.0, 4.0]), leaf([5.0, 6.0, 7.0, 8.0]));
    let (sender, handed) = std::sync::mpsc::channel();
    let receiver = move |_: usize, gradient: Tensor<Flex, 2>| sender.send(gradient).unwrap();
    let counting = B::hand_over(std::slice::from_ref(&weight), Arc::new(receiver));
    // Deeper in the graph than what burn adds, which therefore comes last.
    let made = B::project(B::project(x.mul_scalar(1.0), weight.clone()), weight.clone());
    let loss = made.sum() + weight.clone().mul_scalar(3.0).sum();
    let mut result = loss.backward();
    drop(counting);
    let handed: Vec<_> = handed.try_iter().collect();
    assert_eq!(handed.len(), 1);
    let left = weight.grad_remove(&mut result).expect("3 for each entry");
    assert_eq!(Param::Matrix(left).to_vec(), [3.0; 4]);
}

fn rows_of(case: &GoldenCase, name: &str, rows: &[usize]) -> Tensor<B, 2> {
    let width = case.config.hidden_size;
    let values = case.values(name).unwrap();
    let picked = rows.iter().flat_map(|&row| &values[row * width..(row + 1) * width]);
    let picked: Vec<f32> = picked.map(|&x| x as f32).collect();
    Tensor::from_data(TensorData::new(picked, [rows.len(), width]), &Default::default())
}

/// The batch made of the given rows of the file's states.
fn batch_of(case: &GoldenCase, rows: &[usize], tokens: BatchTokens) -> TrainBatch<B> {
    let aux = (0..3).map(|at| rows_of(case, &format!("input.aux.{at}"), rows)).collect();
    let last_hidden = rows_of(case, "input.last_hidden", rows);
    TrainBatch::new(tokens, Tensor::cat(aux, 1), last_hidden).unwrap()
}

fn step(
    case: &GoldenCase,
    batch: &TrainBatch<B>,
    options: &TttOptions,
) -> (f32, TttMetrics, Gradients) {
    let draft = Eagle3Draft::<B>::tracked(&case.draft(&Default::default()).unwrap());
    let target = case.target(&Default::default()).unwrap();
    let TttOutput { loss, .. } = ttt_step(&draft, &target, batch, options).unwrap();
    let output = ttt_step(&draft, &target, batch, options).unwrap();
    let mut gradients = loss.backward();
    let gradients = draft.gradients(&mut gradients).into_iter();
    let gradients = gradients.map(|(name, gradient)| (name, gradient.to_vec())).collect();
    (loss.into_scalar(), output.metrics(), gradients)
}

fn whole(case: &GoldenCase, options: &TttOptions) -> (f32, TttMetrics, Gradients) {
    step(case, &case.batch(&Default::default()).unwrap(), options)
}

/// Twice how far gradients may be from those in f64, as both sides are rounded: the goldens see up
/// to 1.7e-5 of the largest entry.
const ROUNDING: f32 = 4e-5;

#[track_caller]
fn assert_near(got: &Gradients, want: &Gradients, relative: f32) {
    for ((name, got), (_, want)) in got.iter().zip(want) {
        let largest = want.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() <= relative * largest, "{name}: {got} is not {want}");
        }
    }
}

#[test]
fn nothing_trained_is_zero_and_finite() {
    for name in FILES {
        for row_sparse in [true, false] {
            let mut case = golden(name);
            let rows = case.tokens.rows();
            let (ids, offsets) = (case.tokens.input_ids(), case.tokens.doc_offsets());
            case.tokens = BatchTokens::new(ids.to_vec(), &vec![0; rows], offsets.to_vec()).unwrap();
            let options = TttOptions { row_sparse, ..case.options.clone() };
            let (loss, metrics, gradients) = whole(&case, &options);
            assert_eq!(loss, 0.0);
            assert_eq!(metrics.loss(options.step_decay), 0.0);
            assert_eq!(metrics.accept_len(), 0.0);
            assert!(gradients.iter().all(|(_, gradient)| gradient.iter().all(|&x| x == 0.0)));
        }
    }
}

#[test]
fn document_order_changes_only_rounding() {
    for name in ["ttt_a_gqa_packed", "ttt_b_mla", "ttt_e_edges"] {
        let case = golden(name);
        let (_, metrics, gradients) = whole(&case, &case.options);
        let spans: Vec<_> =
            case.tokens.doc_offsets().windows(2).map(|span| span[0]..span[1]).rev().collect();
        let rows: Vec<usize> = spans.iter().cloned().flatten().collect();
        let (reversed_loss, reversed, reversed_gradients) =
            step(&case, &batch_of(&case, &rows, picked_tokens(&case, &spans)), &case.options);
        assert_eq!(reversed.right, metrics.right);
        assert_eq!(reversed.all_right, metrics.all_right);
        let want = metrics.loss(case.options.step_decay);
        assert!((f64::from(reversed_loss) - want).abs() < 1e-5);
        assert_near(&reversed_gradients, &gradients, ROUNDING);
    }
}

fn picked_tokens(case: &GoldenCase, spans: &[std::ops::Range<usize>]) -> BatchTokens {
    let rows = spans.iter().cloned().flatten();
    let (ids, mask): (Vec<u32>, Vec<u8>) = rows
        .map(|row| (case.tokens.input_ids()[row], u8::from(case.tokens.loss_mask()[row])))
        .unzip();
    let mut offsets = vec![0];
    for span in spans {
        offsets.push(offsets[offsets.len() - 1] + span.len());
    }
    BatchTokens::new(ids, &mask, offsets).unwrap()
}

/// With divisors of the whole, losses and gradients of single documents add up to the packed ones.
#[test]
fn packed_is_the_sum_of_its_documents() {
    for name in ["ttt_a_gqa_packed", "ttt_b_mla", "ttt_c_eagle31", "ttt_e_edges"] {
        let case = golden(name);
        let (loss, metrics, gradients) = whole(&case, &case.options);
        let rows = step_rows(&case.tokens, case.options.steps);
        assert_eq!(rows, metrics.step_rows);
        let divisors = rows.iter().map(|&rows| rows.max(1) as f64).collect();
        let options = TttOptions { divisors: Some(divisors), ..case.options.clone() };
        let (mut sum, mut sums, mut added) = (0.0, TttMetrics::default(), None::<Gradients>);
        // Divided by their own rows, of which some documents have none at the later steps.
        let mut apart = TttMetrics::default();
        for span in case.tokens.doc_offsets().windows(2).map(|span| span[0]..span[1]) {
            let rows: Vec<usize> = span.clone().collect();
            let batch = batch_of(&case, &rows, picked_tokens(&case, &[span]));
            let (loss, metrics, gradients) = step(&case, &batch, &options);
            sum += loss;
            sums.add(&metrics);
            apart.add(&step(&case, &batch, &case.options).1);
            let added = added.get_or_insert_with(|| {
                gradients.iter().map(|(name, g)| (name.clone(), vec![0.0; g.len()])).collect()
            });
            for ((_, into), (_, gradient)) in added.iter_mut().zip(&gradients) {
                into.iter_mut().zip(gradient).for_each(|(into, x)| *into += x);
            }
        }
        assert!((sum - loss).abs() < 1e-5, "{name}: {sum} is not {loss}");
        for (apart, whole) in apart.step_loss().into_iter().zip(metrics.step_loss()) {
            assert!((apart - whole).abs() < 1e-5, "{name}: {apart} is not {whole}");
        }
        assert_eq!((sums.right, sums.all_right), (metrics.right, metrics.all_right));
        assert_near(&added.unwrap(), &gradients, ROUNDING);
    }
}

/// How many teacher states exist at a time is a matter of memory, not of the result.
#[test]
fn teacher_chunks_do_not_show() {
    let case = golden("ttt_a_gqa_packed");
    let (loss, metrics, gradients) = whole(&case, &case.options);
    for teacher_rows in [1, 7, 1000] {
        let options = TttOptions { teacher_rows, ..case.options.clone() };
        let (other_loss, other_metrics, other) = whole(&case, &options);
        assert!((loss - other_loss).abs() < 1e-5);
        assert_eq!(metrics.all_right, other_metrics.all_right);
        assert_near(&other, &gradients, 1e-5);
    }
}

/// The streaming rule of that trainer, whose value the golden file's description gives.
#[test]
fn specforge_without_clearing_the_last_row() {
    let case = golden("ttt_d_specforge");
    for row_sparse in [true, false] {
        let mask_mode = MaskMode::Specforge { zero_last_mask: false };
        let options = TttOptions { mask_mode, row_sparse, ..case.options.clone() };
        let (loss, ..) = whole(&case, &options);
        assert!((loss - 6.971382).abs() < 1e-5, "{loss}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn row_sparse_is_dense(
        mask in proptest::collection::vec(prop::bool::weighted(0.75), 61),
        mut cuts in proptest::collection::vec(0usize..=61, 0..4),
        steps in 1usize..6,
        rule in 0usize..3,
        mla in any::<bool>(),
    ) {
        let mut case = golden(if mla { "ttt_b_mla" } else { "ttt_c_eagle31" });
        cuts.extend([0, 61]);
        cuts.sort_unstable();
        let mask: Vec<u8> = mask.into_iter().map(u8::from).collect();
        let rows: Vec<usize> = (0..61).collect();
        let ids = case.tokens.input_ids()[..61].to_vec();
        case.tokens = BatchTokens::new(ids, &mask, cuts).unwrap();
        let batch = batch_of(&case, &rows, case.tokens.clone());
        let mask_mode = [
            MaskMode::Chain,
            MaskMode::Specforge { zero_last_mask: true },
            MaskMode::Specforge { zero_last_mask: false },
        ][rule];
        let sparse = TttOptions { steps, mask_mode, ..case.options.clone() };
        let dense = TttOptions { row_sparse: false, ..sparse.clone() };
        let (sparse_loss, sparse_metrics, sparse_gradients) = step(&case, &batch, &sparse);
        let (dense_loss, dense_metrics, dense_gradients) = step(&case, &batch, &dense);
        prop_assert!((sparse_loss - dense_loss).abs() <= 2e-6 * dense_loss.abs().max(1.0));
        prop_assert_eq!(sparse_metrics.right, dense_metrics.right);
        prop_assert_eq!(sparse_metrics.all_right, dense_metrics.all_right);
        assert_near(&sparse_gradients, &dense_gradients, 3e-5);
    }
}
