//! What the constructor of a captured sample says to the mistakes people make.
#![allow(clippy::unwrap_used)]

use half::bf16;
use shared::*;

const HIDDEN: usize = 7168;

fn spec() -> CaptureSpec {
    let layers = [2, 30, 58, 60].map(LayerIndex).to_vec();
    CaptureSpec { layers, hidden_size: HIDDEN, dtype: StateDtype::Bf16 }
}

/// Offers `count` tensors of `shape` for a sample of `tokens` and returns the answer.
fn answer(tokens: usize, count: usize, shape: &[usize], batch: &[usize]) -> String {
    answer_mixed(tokens, &vec![shape.to_vec(); count], batch)
}

fn answer_mixed(tokens: usize, shapes: &[Vec<usize>], batch: &[usize]) -> String {
    let sample = TokenSample::new(vec![1; tokens], vec![1; tokens]).unwrap();
    let states = shapes
        .iter()
        .zip(0u16..)
        .map(|(shape, layer)| LayerState {
            layer: LayerIndex(layer),
            shape: shape.clone(),
            rows: StateRows::Bf16(Vec::new()),
        })
        .collect();
    CapturedSample::new(sample, &spec(), states, batch).unwrap_err().to_string()
}

#[test]
fn the_founding_failure_is_named() {
    assert_eq!(
        answer(512, 771, &[512], &[512, 259]),
        "expected 4 tensors [512, 7168]; got 771 tensors [512]: 771 is the number of tokens in \
         the batch (512 + 259), so one layer's rows were taken for layers"
    );
    // The same bug on the batch's other sample, on a batch of one, and with no batch known.
    assert!(answer(259, 771, &[259], &[512, 259]).ends_with("were taken for layers"));
    assert!(answer(512, 512, &[512], &[512]).contains("512 is the number of tokens, so one layer"));
    assert!(answer(512, 771, &[512], &[]).contains("probably one layer's rows"));
}

#[test]
fn wrong_counts_are_named() {
    let good = [512, HIDDEN];
    for (count, shape, batch, cause) in [
        (0, &good[..], &[512][..], "capture hooks never fired"),
        (3, &good, &[512], "1 of 4 layers were not captured"),
        (5, &good, &[512], "the embedding output was counted as a layer"),
        (62, &good, &[512], "61 layers and the embeddings"),
        (8, &good, &[512], "the replies of 2 ranks were joined"),
        (8, &[300, HIDDEN], &[512, 300], "8 is 4 layers x 2 samples"),
        (1, &[4, 512, HIDDEN], &[512], "stacked along the first axis"),
        (1, &[512, 4, HIDDEN], &[512], "stacked along the second axis"),
        (1, &[512, 4 * HIDDEN], &[512], "28672 = 4 x 7168: the layers are concatenated"),
        (1, &good, &[512], "the list of layers was indexed"),
    ] {
        let text = answer(512, count, shape, batch);
        assert!(text.contains(cause), "{text}\n  should say: {cause}");
    }
}

#[test]
fn wrong_shapes_are_named() {
    for (shape, batch, cause) in [
        (&[HIDDEN, 512][..], &[512][..], "axes are swapped"),
        (&[1, 512, HIDDEN], &[512], "leading batch dimension of 1"),
        (&[2, 600, HIDDEN], &[512, 600], "2 samples of the batch are padded to 600 rows"),
        (&[512, 3 * HIDDEN], &[512], "21504 = 3 x 7168: 3 layers are concatenated"),
        (&[771, HIDDEN], &[512, 259], "771 is the whole batch: it was not sliced"),
        (&[259, HIDDEN], &[512, 259], "those of sample 1 of the batch"),
        (&[448, HIDDEN], &[512], "64 rows are missing, a multiple of 64: the prefix cache"),
        (&[496, HIDDEN], &[512], "16 rows are missing, a multiple of 16: the prefix cache"),
        (&[505, HIDDEN], &[512], "7 rows are missing: a chunk of the prefill"),
        (&[511, HIDDEN], &[512], "shifted by one"),
        (&[513, HIDDEN], &[512], "the generated token was captured as well"),
        (&[1, HIDDEN], &[512], "only one token's state"),
        (&[600, HIDDEN], &[512, 600, 9], "sample 1"),
        (&[640, HIDDEN], &[512], "128 rows of padding"),
        (&[512, 163_840], &[512], "size of a vocabulary: these are logits"),
        (&[512, 151_936], &[512], "logits"),
        (&[512, HIDDEN / 8], &[512], "896 = 7168 / 8: one of 8 ranks' columns"),
        (&[512 * HIDDEN], &[512], "flattened"),
        (&[512], &[512], "one channel of every token"),
        (&[HIDDEN], &[512], "one token's state"),
    ] {
        let text = answer(512, 4, shape, batch);
        assert!(text.contains(cause), "{text}\n  should say: {cause}");
    }
}

#[test]
fn different_shapes_are_counted() {
    let mut shapes = vec![vec![5, HIDDEN]; 4];
    shapes[3] = vec![4, HIDDEN];
    let text = answer_mixed(5, &shapes, &[5]);
    assert!(
        text.contains("got 3 tensors [5, 7168] and 1 tensor [4, 7168]: one row too few"),
        "{text}"
    );
}

fn states(spec: &CaptureSpec, layers: &[u16], tokens: usize) -> Vec<LayerState> {
    let values = vec![1.0; tokens * spec.hidden_size];
    let rows = StateRows::from_f32(&values, spec.hidden_size, spec.dtype);
    let shape = vec![tokens, spec.hidden_size];
    layers
        .iter()
        .map(|&layer| LayerState {
            layer: LayerIndex(layer),
            shape: shape.clone(),
            rows: rows.clone(),
        })
        .collect()
}

fn small(dtype: StateDtype) -> CaptureSpec {
    CaptureSpec { hidden_size: 4, dtype, ..spec() }
}

fn offer(spec: &CaptureSpec, states: Vec<LayerState>) -> Result<CapturedSample, ContractError> {
    CapturedSample::new(TokenSample::new(vec![7; 3], vec![1; 3]).unwrap(), spec, states, &[3])
}

#[test]
fn wrong_layers_are_named() {
    let spec = small(StateDtype::Bf16);
    for (layers, cause) in [
        (&[3, 31, 59, 61], "every id is one too large"),
        (&[1, 29, 57, 59], "every id is one too small"),
        (&[30, 2, 58, 60], "in another order"),
        (&[2, 2, 58, 60], "occurs twice"),
    ] {
        let text = offer(&spec, states(&spec, layers, 3)).unwrap_err().to_string();
        assert!(text.contains(cause), "{text}");
    }
}

#[test]
fn non_finite_values_are_counted_per_layer_with_their_first_place() {
    let spec = small(StateDtype::Bf16);
    let mut states = states(&spec, &[2, 30, 58, 60], 3);
    let StateRows::Bf16(values) = &mut states[1].rows else { unreachable!() };
    values[6] = bf16::NAN;
    values[9] = bf16::NEG_INFINITY;
    let error = offer(&spec, states).unwrap_err();
    let ContractError::NonFinite { layers, .. } = &error else { unreachable!("{error}") };
    assert_eq!(layers.len(), 1);
    assert_eq!((layers[0].layer, layers[0].nan, layers[0].infinite), (LayerIndex(30), 1, 1));
    assert_eq!((layers[0].first_token, layers[0].first_channel), (1, 2));
    assert!(error.to_string().contains("layer 30: 1 NaN and 1 infinite"), "{error}");
}

#[test]
fn non_finite_fp8_codes_and_scales_are_seen() {
    let spec = small(StateDtype::Fp8);
    let good = states(&spec, &[2, 30, 58, 60], 3);
    offer(&spec, good.clone()).unwrap();
    for spoil in [
        (|codes, _| codes[5] = 0xff) as fn(&mut Vec<u8>, &mut Vec<f32>),
        |codes, _| codes[0] = 0x7f,
        |_, scales| scales[2] = f32::NAN,
        |_, scales| scales[0] = f32::INFINITY,
    ] {
        let mut states = good.clone();
        let StateRows::Fp8 { codes, scales } = &mut states[3].rows else { unreachable!() };
        spoil(codes, scales);
        assert!(matches!(offer(&spec, states), Err(ContractError::NonFinite { .. })));
    }
    let mut states = good;
    let StateRows::Fp8 { scales, .. } = &mut states[1].rows else { unreachable!() };
    scales[1] = -0.5;
    let text = offer(&spec, states).unwrap_err().to_string();
    assert!(text.contains("layer 30: the scale of token 1 is -0.5, 0 or more"), "{text}");
}

#[test]
fn claims_that_the_values_do_not_fill_are_refused() {
    let spec = small(StateDtype::Fp8);
    let mut short = states(&spec, &[2, 30, 58, 60], 3);
    let StateRows::Fp8 { codes, .. } = &mut short[0].rows else { unreachable!() };
    codes.pop();
    assert!(matches!(offer(&spec, short), Err(ContractError::Values { got: 11, .. })));
    let mut unscaled = states(&spec, &[2, 30, 58, 60], 3);
    let StateRows::Fp8 { scales, .. } = &mut unscaled[0].rows else { unreachable!() };
    scales.pop();
    assert!(matches!(offer(&spec, unscaled), Err(ContractError::Scales { got: 2, .. })));
    let other = states(&small(StateDtype::Bf16), &[2, 30, 58, 60], 3);
    assert!(matches!(offer(&spec, other), Err(ContractError::Dtype { .. })));
}

#[test]
fn stats_are_the_textbook_values() {
    let spec = small(StateDtype::Bf16);
    let mut states = states(&spec, &[2, 30, 58, 60], 3);
    let values: Vec<f32> = (0..12).map(|v| v as f32 - 6.0).collect();
    states[2].rows = StateRows::from_f32(&values, 4, StateDtype::Bf16);
    let stats = offer(&spec, states).unwrap().stats()[2];
    // 6^2 + ... + 1 + 0 + 1 + ... + 5^2 = 91 + 55 = 146
    assert_eq!((stats.rms, stats.absmax), ((146f64 / 12.0).sqrt(), 6.0));
}
