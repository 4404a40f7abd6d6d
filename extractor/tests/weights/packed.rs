//! Packed slices, decoded, are what decoding the slice gives.

use extractor::target::weights::{Checkpoint, PackedFormat, PackedWeight, Slice};
use kernels::dequant::{
    Fp8Block, GlobalScale, Int4PackQuantized, Nvfp4, Region, fp8_block, int4_pack_quantized, nvfp4,
};

use super::formats::{fp8, nvfp4 as stored_nvfp4};
use super::*;

fn decoded(weight: &PackedWeight<'_>, shape: [usize; 2]) -> Vec<f32> {
    let PackedWeight { codes, scales, .. } = weight;
    let mut out = vec![0.0; shape[0] * shape[1]];
    let region = Region::full(shape);
    match weight.format {
        PackedFormat::Bf16 => {
            let (values, _) = codes.as_chunks::<2>();
            return values.iter().map(|&v| half::bf16::from_le_bytes(v).to_f32()).collect();
        }
        PackedFormat::F32 => {
            let (values, _) = codes.as_chunks::<4>();
            return values.iter().map(|&v| f32::from_le_bytes(v)).collect();
        }
        PackedFormat::Int4 { group } => {
            let weight = Int4PackQuantized { packed: codes, scale: scales, shape, group };
            int4_pack_quantized(&mut out, &weight, &region);
        }
        PackedFormat::Fp8 => {
            let weight = Fp8Block { weight: codes, scale_inv: scales, shape, block: 128 };
            fp8_block(&mut out, &weight, &region);
        }
        PackedFormat::Nvfp4 => {
            let global = GlobalScale::Multiplier(weight.factor);
            let weight = Nvfp4 { packed: codes, scale: scales, global, shape };
            nvfp4(&mut out, &weight, &region);
        }
    }
    out
}

/// Returns the format that the slice comes in.
fn assert_packed(
    checkpoint: &Checkpoint,
    name: &str,
    shape: [usize; 2],
    slice: &Slice,
) -> Option<PackedFormat> {
    let format = checkpoint.packed_format(name, shape, slice);
    let want = checkpoint.linear(name, shape, slice).unwrap();
    let size = [slice.rows.len(), slice.cols.len()];
    for format in format.into_iter().chain([PackedFormat::F32]) {
        let packed = checkpoint.packed(name, shape, slice, format).unwrap();
        assert_eq!(packed.codes.len(), format.code_bytes(size), "{format:?}");
        assert_eq!(packed.scales.len(), format.scale_bytes(size), "{format:?}");
        assert_eq!(decoded(&packed, size), want, "{name} {slice:?} {format:?}");
    }
    let rounded = checkpoint.packed(name, shape, slice, PackedFormat::Bf16).unwrap();
    let want: Vec<f32> = want.iter().map(|&v| half::bf16::from_f32(v).to_f32()).collect();
    assert_eq!(decoded(&rounded, size), want, "{name} {slice:?}");
    format
}

#[test]
fn experts_of_the_bundled_model() {
    let checkpoint = Checkpoint::open(&repository("models/nano-kimi")).unwrap();
    let int4 = Some(PackedFormat::Int4 { group: 32 });
    let (up, down) =
        ("model.layers.4.mlp.experts.3.up_proj", "model.layers.7.mlp.experts.6.down_proj");
    let whole = |shape| Slice::full(shape);
    assert_eq!(assert_packed(&checkpoint, up, [256, 128], &whole([256, 128])), int4);
    let rows = Slice { rows: 64..128, cols: 0..128 };
    assert_eq!(assert_packed(&checkpoint, up, [256, 128], &rows), int4);
    let cols = |cols| Slice { rows: 0..128, cols };
    assert_eq!(assert_packed(&checkpoint, down, [128, 256], &cols(64..128)), int4);
    // A cut within a group of inputs that share a scale.
    assert_eq!(assert_packed(&checkpoint, down, [128, 256], &cols(16..48)), None);
    let attention = "model.layers.0.self_attn.o_proj";
    assert_eq!(checkpoint.packed_format(attention, [1, 1], &whole([1, 1])), None);
}

#[test]
fn fp8_and_nvfp4_slices() {
    let shape = [300, 320];
    let (_dir, checkpoint) = one_file(&fp8(shape).0);
    let fp8 = |rows, cols| assert_packed(&checkpoint, "a", shape, &Slice { rows, cols });
    assert_eq!(fp8(0..300, 0..320), Some(PackedFormat::Fp8));
    assert_eq!(fp8(128..300, 0..320), Some(PackedFormat::Fp8));
    assert_eq!(fp8(0..300, 128..256), Some(PackedFormat::Fp8));
    assert_eq!(fp8(64..128, 0..320), None);
    for packed in [false, true] {
        let (_dir, checkpoint) = one_file(&stored_nvfp4(shape, packed).0);
        let nvfp4 = |rows, cols| assert_packed(&checkpoint, "a", shape, &Slice { rows, cols });
        assert_eq!(nvfp4(0..300, 0..320), Some(PackedFormat::Nvfp4));
        assert_eq!(nvfp4(7..9, 160..320), Some(PackedFormat::Nvfp4));
        assert_eq!(nvfp4(0..300, 8..32), None);
    }
}
