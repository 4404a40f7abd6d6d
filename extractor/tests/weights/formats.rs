//! Values read in every format, whole and in slices, under every prefix.

use extractor::target::weights::{Checkpoint, Slice, WeightFormat};
use proptest::prelude::*;
use safetensors::tensor::{Dtype, SafeTensors};

use super::*;

/// Name, shape, first and last four values, sum of magnitudes.
type Golden = (&'static str, [usize; 2], [f32; 4], [f32; 4], f64);

/// Computed by a separate script from
/// the bytes of the files. The parts of the first tensor lie in different files.
const INT4_GOLDEN: [Golden; 2] = [
    (
        "model.layers.4.mlp.experts.3.up_proj",
        [256, 128],
        [0.038_574_22, 0.025_634_766, 0.025_634_766, 0.012_817_383],
        [0.052_490_234, 0.026_245_117, 0.0, -0.078_613_28],
        1_277.426_208_496_093_8,
    ),
    (
        "model.layers.7.mlp.experts.6.down_proj",
        [128, 256],
        [0.054_687_5, -0.072_753_906, 0.0, 0.090_820_31],
        [0.0, 0.091_308_594, 0.013_061_523, -0.026_123_047],
        1_254.738_098_144_531_2,
    ),
];

#[test]
fn int4_of_the_bundled_model() {
    let checkpoint = Checkpoint::open(&repository("models/nano-kimi")).unwrap();
    assert_eq!(checkpoint.files().count(), 2);
    for (name, shape, first, last, magnitude) in INT4_GOLDEN {
        assert_eq!(checkpoint.format(name), Some(WeightFormat::Int4PackQuantized));
        let weight = checkpoint.linear(name, shape, &Slice::full(shape)).unwrap();
        assert_eq!(weight[..4], first);
        assert_eq!(weight[weight.len() - 4..], last);
        let sum: f64 = weight.iter().map(|&w| f64::from(w.abs())).sum();
        assert!((sum - magnitude).abs() < 1e-9, "{sum} is not {magnitude}");
    }
    let embedding = checkpoint.tensor("model.embed_tokens", &[4096, 128]).unwrap();
    let rows = checkpoint.rows("model.embed_tokens.weight", [4096, 128], 100..103).unwrap();
    assert_eq!(rows, embedding[100 * 128..103 * 128]);
    assert!(checkpoint.contains("lm_head"));
    assert!(checkpoint.contains("model.layers.1.mlp.gate.e_score_correction_bias"));
    assert!(checkpoint.contains("model.layers.4.mlp.experts.3.up_proj"));
    assert!(!checkpoint.contains("model.layers.9.mlp.experts.3.up_proj"));
    assert_eq!(checkpoint.format("model.layers.1.mlp.experts"), None);
}

/// Compared with the parser of the safetensors crate.
#[test]
fn plain_tensors_of_small_models() {
    for (model, format) in [("tiny-odd", WeightFormat::Bf16), ("stories260k", WeightFormat::F32)] {
        let dir = repository("tests/fixtures").join(model);
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let bytes = fs::read(dir.join("model.safetensors")).unwrap();
        let stored = SafeTensors::deserialize(&bytes).unwrap();
        for name in stored.names() {
            let tensor = stored.tensor(name).unwrap();
            let want: Vec<f32> = match tensor.dtype() {
                Dtype::BF16 => tensor
                    .data()
                    .chunks(2)
                    .map(|b| half::bf16::from_le_bytes(b.try_into().unwrap()).to_f32())
                    .collect(),
                _ => tensor
                    .data()
                    .chunks(4)
                    .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
                    .collect(),
            };
            assert_eq!(checkpoint.tensor(name, tensor.shape()).unwrap(), want, "{name}");
        }
        assert_eq!(checkpoint.format("model.embed_tokens"), Some(format));
    }
}

#[test]
fn prefixes_of_multimodal_checkpoints() {
    let values = f32_bytes(&[1.0, 2.0]);
    let stored = [
        "language_model.model.layers.0.a.weight",
        "language_model.layers.1.a.weight",
        "language_model.norm.weight",
        "language_model.lm_head.weight",
        "vision_tower.patch_embed.weight",
        "mm_projector.proj.0.weight",
    ];
    let tensors = stored.map(|name| (name, Dtype::F32, &[2usize][..], values.clone()));
    let (_dir, checkpoint) = one_file(&tensors);
    for name in ["model.layers.0.a", "model.layers.1.a", "model.norm", "lm_head"] {
        assert_eq!(checkpoint.tensor(name, &[2]).unwrap(), [1.0, 2.0], "{name}");
    }
    assert!(!checkpoint.contains("model.vision_tower.patch_embed"));
}

/// A slice is what the whole weight holds there, in every format.
#[test]
fn slices_are_cut_from_the_whole() {
    for (name, shape, _, _, _) in INT4_GOLDEN {
        let checkpoint = Checkpoint::open(&repository("models/nano-kimi")).unwrap();
        assert_slices(&checkpoint, name, shape);
    }
    let shape = [130, 160];
    for tensors in [plain(shape), fp8(shape).0, nvfp4(shape, false).0, nvfp4(shape, true).0] {
        let (_dir, checkpoint) = one_file(&tensors);
        assert_slices(&checkpoint, "a", shape);
    }
}

fn assert_slices(checkpoint: &Checkpoint, name: &str, [rows, cols]: [usize; 2]) {
    let whole = checkpoint.linear(name, [rows, cols], &Slice::full([rows, cols])).unwrap();
    for slice in [
        Slice { rows: 0..rows / 2, cols: 0..cols },
        Slice { rows: rows / 2..rows, cols: 0..cols },
        Slice { rows: 0..rows, cols: cols / 2..cols },
        Slice { rows: 3..4, cols: 17..35 },
        Slice { rows: 5..5, cols: 0..cols },
        Slice { rows: 0..rows, cols: 9..9 },
    ] {
        let want: Vec<f32> = slice
            .rows
            .clone()
            .flat_map(|row| whole[row * cols..][slice.cols.clone()].to_vec())
            .collect();
        let got = checkpoint.linear(name, [rows, cols], &slice).unwrap();
        assert_eq!(got, want, "{name} {slice:?}");
    }
}

fn plain(shape: [usize; 2]) -> Vec<Stored<'static>> {
    let shape: &'static [usize; 2] = Box::leak(Box::new(shape));
    let values = numbers(shape[0] * shape[1], 1);
    let half: Vec<u8> = values.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes()).collect();
    vec![("a.weight", Dtype::F16, shape, half)]
}

/// Value of an E4M3 code by the definition of the format.
fn e4m3(code: u8) -> f64 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let mantissa = f64::from(code & 7) / 8.0;
    match code >> 3 & 15 {
        0 => sign * mantissa * 2f64.powi(-6),
        exponent => sign * (1.0 + mantissa) * 2f64.powi(i32::from(exponent) - 7),
    }
}

/// The code whose value is nearest, found by trying all of them.
fn nearest(x: f64, codes: std::ops::Range<u8>, value: impl Fn(u8) -> f64) -> u8 {
    let distance = |code: &u8| (value(*code) - x).abs();
    codes
        .filter(|code| code & 0x7F != 0x7F)
        .min_by(|a, b| distance(a).total_cmp(&distance(b)))
        .unwrap()
}

/// A weight in FP8 blocks, and the values that it stands for.
pub(super) fn fp8([rows, cols]: [usize; 2]) -> (Vec<Stored<'static>>, Vec<f64>) {
    let values = numbers(rows * cols, 2);
    let blocks = [rows.div_ceil(128), cols.div_ceil(128)];
    let mut scales = vec![0.0f32; blocks[0] * blocks[1]];
    let block_of = |i: usize| (i / cols) / 128 * blocks[1] + (i % cols) / 128;
    for (i, v) in values.iter().enumerate() {
        scales[block_of(i)] = scales[block_of(i)].max(v.abs() / 448.0);
    }
    let (mut codes, mut want) = (Vec::new(), Vec::new());
    for (i, v) in values.iter().enumerate() {
        let scale = f64::from(scales[block_of(i)]);
        let code = nearest(f64::from(*v) / scale, 0..255, e4m3);
        codes.push(code);
        want.push(e4m3(code) * scale);
    }
    let leak = |shape: [usize; 2]| -> &'static [usize] { Box::leak(Box::new(shape)) };
    let tensors = vec![
        ("a.weight", Dtype::F8_E4M3, leak([rows, cols]), codes),
        ("a.weight_scale_inv", Dtype::F32, leak(blocks), f32_bytes(&scales)),
    ];
    (tensors, want)
}

fn e2m1(code: u8) -> f64 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// A weight in NVFP4, as modelopt (or compressed-tensors, `packed`) stores it, and its values.
pub(super) fn nvfp4([rows, cols]: [usize; 2], packed: bool) -> (Vec<Stored<'static>>, Vec<f64>) {
    let values = numbers(rows * cols, 3);
    let global = 2f32.powi(-11);
    let row_scales = cols.div_ceil(16);
    let (mut scales, mut want) = (Vec::new(), Vec::new());
    let mut bytes = vec![0u8; rows * cols.div_ceil(2)];
    for (row, values) in values.chunks(cols).enumerate() {
        for (block, values) in values.chunks(16).enumerate() {
            let largest = values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            let code = nearest(f64::from(largest / 6.0 / global), 0..127, e4m3);
            scales.push(code);
            let scale = e4m3(code) * f64::from(global);
            for (i, v) in values.iter().enumerate() {
                let col = block * 16 + i;
                let code = nearest(f64::from(*v) / scale, 0..16, e2m1);
                bytes[row * cols.div_ceil(2) + col / 2] |= code << (4 * (col % 2));
                want.push(e2m1(code) * scale);
            }
        }
    }
    let leak = |shape: [usize; 2]| -> &'static [usize] { Box::leak(Box::new(shape)) };
    let (weight, factor, number) = match packed {
        false => ("a.weight", "a.weight_scale_2", global),
        true => ("a.weight_packed", "a.weight_global_scale", 1.0 / global),
    };
    let tensors = vec![
        (weight, Dtype::U8, leak([rows, cols.div_ceil(2)]), bytes),
        ("a.weight_scale", Dtype::F8_E4M3, leak([rows, row_scales]), scales),
        (factor, Dtype::F32, if packed { &[1] } else { &[] }, f32_bytes(&[number])),
    ];
    (tensors, want)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn fp8_and_nvfp4_come_back(rows in 1usize..150, cols in 1usize..150) {
        for ((tensors, want), format) in [
            (fp8([rows, cols]), WeightFormat::Fp8Block),
            (nvfp4([rows, cols], false), WeightFormat::Nvfp4),
            (nvfp4([rows, cols], true), WeightFormat::Nvfp4PackQuantized),
        ] {
            let (_dir, checkpoint) = one_file(&tensors);
            prop_assert_eq!(checkpoint.format("a"), Some(format));
            let got = checkpoint.linear("a", [rows, cols], &Slice::full([rows, cols])).unwrap();
            for (got, want) in got.iter().zip(want) {
                prop_assert_eq!(*got, want as f32);
            }
        }
    }
}
