//! Faults in hidden states that other tools wrote, named.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod support;

use half::bf16;
use safetensors::tensor::{Dtype, TensorView};
use shared::*;

struct Tensor(String, Dtype, Vec<usize>, Vec<u8>);

fn states(name: &str, shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    let values =
        (0..count).flat_map(|i| bf16::from_f32(((i * 7919) % 1013) as f32 - 300.0).to_le_bytes());
    Tensor(name.into(), Dtype::BF16, shape.into(), values.collect())
}

fn ids(tokens: usize) -> Tensor {
    let values = (0..tokens as i64).flat_map(i64::to_le_bytes).collect();
    Tensor("token_ids".into(), Dtype::I64, vec![tokens], values)
}

fn look(tensors: &[Tensor]) -> ForeignReport {
    let views = tensors.iter().map(|Tensor(name, dtype, shape, data)| {
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    let dir = support::tempdir();
    let path = dir.path().join("hs_0.safetensors");
    std::fs::write(&path, bytes).unwrap();
    // By way of a link, as in a model cache.
    let link = dir.path().join("link.safetensors");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    audit_foreign(&link).unwrap()
}

fn only_fault(tensors: &[Tensor], part: &str) {
    let report = look(tensors);
    assert_eq!(report.faults.len(), 1, "{:?}", report.faults);
    assert!(report.faults[0].contains(part), "{:?}\n  should say: {part}", report.faults);
}

#[test]
fn sound_files_are_clean() {
    for shape in [vec![12, 4, 64], vec![4, 12, 64]] {
        let report = look(&[states("hidden_states", &shape), ids(12)]);
        assert_eq!(report.faults, Vec::<String>::new());
        assert_eq!(report.tensors[0].slots.len(), 4);
        assert_eq!(report.tensors[0].slots[3].rows, 12);
    }
    let layers = (0..4).map(|i| {
        let Tensor(_, dtype, shape, mut data) = states("", &[12, 64]);
        data[2] = i;
        Tensor(format!("layer_{i}"), dtype, shape, data)
    });
    assert_eq!(look(&layers.chain([ids(12)]).collect::<Vec<_>>()).faults, Vec::<String>::new());
    let pair =
        [states("hidden_states", &[12, 64]), states("aux_hidden_states", &[12, 192]), ids(12)];
    assert_eq!(look(&pair).faults, Vec::<String>::new());
}

#[test]
fn the_founding_failure_is_named_in_either_form() {
    let rows: Vec<Tensor> = (0..771)
        .map(|i| {
            let Tensor(_, dtype, shape, mut data) = states("", &[512]);
            data[..2].copy_from_slice(&bf16::from_f32(i as f32 * 8.0 + 1.0).to_le_bytes());
            data[2..4].copy_from_slice(&bf16::from_f32((i % 8) as f32 + 1.0).to_le_bytes());
            Tensor(format!("hidden_states.{i}"), dtype, shape, data)
        })
        .chain([ids(512)])
        .collect();
    let report = look(&rows);
    assert!(
        report.faults[0].contains(
            "got 771 tensors [512]: 771 is no number of layers but of tokens in the batch \
             (512 + 259 of other samples), so one layer's rows were taken for layers"
        ),
        "{:?}",
        report.faults
    );
    only_fault(&[states("hidden_states", &[771, 512]), ids(512)], "one layer's rows");
}

#[test]
fn rows_that_are_not_the_samples_are_named() {
    only_fault(&[states("hidden_states", &[48, 4, 64]), ids(64)], "prefix cache");
    only_fault(&[states("hidden_states", &[13, 4, 64]), ids(12)], "generated token");
    only_fault(&[states("hidden_states", &[11, 4, 64]), ids(12)], "shifted by one");
    only_fault(&[states("hidden_states", &[64, 200, 4]), ids(64)], "axes are swapped");
    only_fault(&[states("hidden_states", &[12, 4, 64])], "no token ids");
    only_fault(&[ids(12)], "no hidden states");
    let mixed = [states("layer_1", &[12, 64]), states("layer_2", &[64, 12]), ids(12)];
    assert!(look(&mixed).faults[0].contains("expected 2 tensors"));
}

#[test]
fn values_are_looked_at() {
    let spoiled = |spoil: fn(&mut [[u8; 2]])| {
        let Tensor(name, dtype, shape, mut data) = states("hidden_states", &[12, 4, 64]);
        spoil(bytemuck::cast_slice_mut(&mut data));
        [Tensor(name, dtype, shape, data), ids(12)]
    };
    const NAN: [u8; 2] = 0x7fc0u16.to_le_bytes();
    // Row 5 of slot 2.
    only_fault(&spoiled(|v| v[(5 * 4 + 2) * 64 + 9] = NAN), "slot 2: 1 NaN and 0 infinite");
    only_fault(&spoiled(|v| v[(5 * 4 + 2) * 64 + 9] = NAN), "first in row 5");
    let zero_slot = |v: &mut [[u8; 2]]| {
        v.chunks_mut(64).skip(1).step_by(4).for_each(|row| row.fill([0, 0]));
    };
    only_fault(&spoiled(zero_slot), "slot 1: only zeros");
    only_fault(&spoiled(|v| v[11 * 256..11 * 256 + 64].fill([0, 0])), "1 of 12 rows are zero");
    let minus = |v: &mut [[u8; 2]]| v[11 * 256..11 * 256 + 64].fill([0, 0x80]);
    only_fault(&spoiled(minus), "1 of 12 rows are zero");
    // The first half of slot 3 is a row of its own each, the rest one token's.
    let repeated = |v: &mut [[u8; 2]]| {
        (6..12).for_each(|row| v.copy_within(5 * 256 + 192..6 * 256, row * 256 + 192));
    };
    only_fault(&spoiled(repeated), "slot 3: 6 of 12 rows equal the row before");
    let twin = |v: &mut [[u8; 2]]| v.chunks_mut(256).for_each(|t| t.copy_within(64..128, 192));
    only_fault(&spoiled(twin), "slot 3 equals hidden_states, slot 1");
}
