//! Checkpoints that are incomplete, inconsistent or hostile: each gets its own error.

use std::io::Write;

use proptest::prelude::*;

use extractor::target::weights::{
    Checkpoint, MAX_HEADER_BYTES, MAX_TENSORS, PackedFormat, Slice, WeightsError,
};
use safetensors::tensor::Dtype;

use super::*;

fn one_norm(name: &str) -> Vec<Stored<'_>> {
    vec![(name, Dtype::F32, &[2], f32_bytes(&[1.0, 2.0]))]
}

fn int4_parts() -> Vec<Stored<'static>> {
    vec![
        ("a.weight_packed", Dtype::I32, &[2, 4], i32_bytes(&[0; 8])),
        ("a.weight_scale", Dtype::BF16, &[2, 1], bf16_bytes(&[1.0, 2.0])),
        ("a.weight_shape", Dtype::I32, &[2], i32_bytes(&[2, 32])),
    ]
}

fn linear(checkpoint: &Checkpoint, shape: [usize; 2]) -> Result<Vec<f32>, WeightsError> {
    checkpoint.linear("a", shape, &Slice::full(shape))
}

#[test]
fn a_missing_tensor_is_named_with_the_closest_one() {
    let (_dir, checkpoint) = one_file(&one_norm("model.layers.0.self_attn.q_proj.weight"));
    let error = checkpoint.tensor("model.layers.0.self_attn.q_a_proj.weight", &[2]).unwrap_err();
    let WeightsError::MissingTensor { name, closest, .. } = &error else { panic!("{error}") };
    assert_eq!(name, "model.layers.0.self_attn.q_a_proj.weight");
    assert_eq!(closest.as_deref(), Some("model.layers.0.self_attn.q_proj.weight"));
    assert_eq!(error.exit_code(), 65);
    let error = checkpoint.tensor("lm_head", &[2]).unwrap_err();
    assert!(matches!(error, WeightsError::MissingTensor { closest: None, .. }), "{error}");
}

#[test]
fn a_quantised_weight_lacks_a_part() {
    for lost in ["a.weight_scale", "a.weight_shape"] {
        let parts: Vec<_> = int4_parts().into_iter().filter(|part| part.0 != lost).collect();
        let (_dir, checkpoint) = one_file(&parts);
        let error = linear(&checkpoint, [2, 32]).unwrap_err();
        assert!(
            matches!(&error, WeightsError::MissingTensor { name, .. } if name == lost),
            "{error}"
        );
    }
}

#[test]
fn a_part_that_would_change_the_meaning_is_refused() {
    let mut parts = int4_parts();
    parts.push(("a.weight_zero_point", Dtype::I32, &[1], i32_bytes(&[3])));
    let (_dir, checkpoint) = one_file(&parts);
    let error = linear(&checkpoint, [2, 32]).unwrap_err();
    assert!(matches!(error, WeightsError::Unsupported { .. }), "{error}");
}

#[test]
fn a_wrong_shape_is_told_with_the_right_one() {
    let (_dir, checkpoint) = one_file(&one_norm("model.norm.weight"));
    let error = checkpoint.tensor("model.norm", &[3]).unwrap_err();
    let WeightsError::WrongShape { name, expected, found } = error else { panic!("{error}") };
    assert_eq!((name.as_str(), expected, found), ("model.norm.weight", vec![3], vec![2]));
    let (_dir, checkpoint) = one_file(&int4_parts());
    for shape in [[2, 64], [3, 32], [2, 31]] {
        let error = linear(&checkpoint, shape).unwrap_err();
        assert!(matches!(error, WeightsError::WrongShape { .. }), "{error}");
    }
    linear(&checkpoint, [2, 32]).unwrap();
}

#[test]
fn a_wrong_number_format_is_told() {
    let ints = ("model.norm.weight", Dtype::I32, &[2usize][..], i32_bytes(&[1, 2]));
    let (_dir, checkpoint) = one_file(&[ints]);
    let error = checkpoint.tensor("model.norm", &[2]).unwrap_err();
    assert!(matches!(&error, WeightsError::WrongDtype { found, .. } if found == "I32"), "{error}");
    let mut parts = int4_parts();
    parts[1] = ("a.weight_scale", Dtype::F32, &[2, 1], f32_bytes(&[1.0, 2.0]));
    let (_dir, checkpoint) = one_file(&parts);
    let error = linear(&checkpoint, [2, 32]).unwrap_err();
    assert!(
        matches!(&error, WeightsError::WrongDtype { name, .. } if name == "a.weight_scale"),
        "{error}"
    );
    let doubles = ("a.weight", Dtype::F64, &[1usize, 1][..], vec![0; 8]);
    let (_dir, checkpoint) = one_file(&[doubles]);
    let error = linear(&checkpoint, [1, 1]).unwrap_err();
    assert!(matches!(&error, WeightsError::WrongDtype { found, .. } if found == "F64"), "{error}");
}

#[test]
fn a_slice_outside_the_weight_is_refused() {
    let (_dir, checkpoint) = one_file(&int4_parts());
    let slice = Slice { rows: 1..3, cols: 0..32 };
    let error = checkpoint.linear("a", [2, 32], &slice).unwrap_err();
    assert!(matches!(error, WeightsError::SliceOutside { .. }), "{error}");
    let slices = [slice, Slice { rows: 0..2, cols: 0..64 }];
    let formats = [PackedFormat::Int4 { group: 32 }, PackedFormat::Bf16];
    for (slice, format) in slices.iter().zip(formats) {
        let error = checkpoint.packed("a", [2, 32], slice, format).unwrap_err();
        assert!(matches!(error, WeightsError::SliceOutside { .. }), "{error}");
    }
}

/// Every length that is too short: in the prefix, in the header, in the data.
#[test]
fn a_truncated_file_is_found_at_every_length() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "model.safetensors", &int4_parts());
    let path = dir.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    for length in 0..whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        let error = Checkpoint::open(dir.path()).unwrap_err();
        assert!(matches!(error, WeightsError::Truncated { .. }), "{length}: {error}");
    }
    let mut longer = whole;
    longer.push(0);
    fs::write(&path, &longer).unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(error, WeightsError::Header { .. }), "{error}");
}

/// Reading beyond the new end of a mapped file would kill the process.
#[test]
fn a_file_cut_short_while_open_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let values = numbers(1 << 16, 4);
    write(dir.path(), "model.safetensors", &[("a", Dtype::F32, &[1 << 16], f32_bytes(&values))]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let path = dir.path().join("model.safetensors");
    fs::OpenOptions::new().write(true).open(path).unwrap().set_len(64).unwrap();
    let error = checkpoint.tensor("a", &[1 << 16]).unwrap_err();
    assert!(matches!(error, WeightsError::Shrank { found: 64, .. }), "{error}");
    assert_eq!(error.exit_code(), 74);
    assert!(checkpoint.digest().is_err());
}

fn open_with_header(header: &str, data: usize) -> WeightsError {
    let dir = tempfile::tempdir().unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + data, 0);
    fs::write(dir.path().join("model.safetensors"), file).unwrap();
    Checkpoint::open(dir.path()).unwrap_err()
}

#[test]
fn malformed_headers_are_refused() {
    let twice = "comes twice";
    let sizes = "bytes for";
    let layout = "a gap or an overlap";
    let entry = |name: &str, dtype: &str, shape: &str, offsets: &str| {
        format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
    };
    let a = entry("a", "F32", "[1]", "[0,4]");
    for (what, entries, data) in [
        ("", "nonsense".to_owned(), 0),
        (twice, format!("{a},{a}"), 4),
        (twice, format!(r#""__metadata__":{{}},"__metadata__":{{}},{a}"#), 4),
        ("expected a string", format!(r#""__metadata__":{{"x":1}},{a}"#), 4),
        (sizes, entry("a", "F32", "[2]", "[0,4]"), 4),
        ("ends before it starts", entry("a", "F32", "[1]", "[4,0]"), 4),
        (
            "more elements than can be counted",
            entry("a", "F32", "[4294967296,4294967296]", "[0,0]"),
            0,
        ),
        ("offset beyond any file", entry("a", "X", "[1]", "[0,18446744073709551615]"), 0),
        ("expected usize", entry("a", "F32", "[-1]", "[0,4]"), 4),
        ("unknown field", a.replace("\"shape\"", "\"extra\":1,\"shape\""), 4),
        (layout, format!("{a},{}", entry("b", "F32", "[1]", "[2,6]")), 6),
        (layout, format!("{a},{}", entry("b", "F32", "[1]", "[6,10]")), 10),
    ] {
        let error = open_with_header(&format!("{{{entries}}}"), data);
        let WeightsError::Header { reason, .. } = &error else { panic!("{what}: {error}") };
        assert!(reason.contains(what), "{reason} lacks {what:?}");
    }
}

#[test]
fn limits_of_the_header() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = fs::File::create(dir.path().join("model.safetensors")).unwrap();
    file.write_all(&(MAX_HEADER_BYTES + 1).to_le_bytes()).unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(error, WeightsError::HeaderTooLarge { .. }), "{error}");
    let empty = r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    let entries: Vec<String> = (0..=MAX_TENSORS).map(|i| format!(r#""{i}":{empty}"#)).collect();
    let error = open_with_header(&format!("{{{}}}", entries.join(",")), 0);
    assert!(error.to_string().contains("more than 65536 tensors"), "{error}");
}

fn open_with_index(index: &str) -> Result<Checkpoint, WeightsError> {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "one.safetensors", &one_norm("a"));
    write(dir.path(), "two.safetensors", &one_norm("b"));
    fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    Checkpoint::open(dir.path())
}

#[test]
fn an_index_must_agree_with_its_files() {
    let index = |entries: &str| open_with_index(&format!(r#"{{"weight_map":{{{entries}}}}}"#));
    let both = r#""a":"one.safetensors","b":"two.safetensors""#;
    assert_eq!(index(both).unwrap().files().count(), 2);
    // Files that the index does not name are no part of the checkpoint.
    assert!(!index(r#""a":"one.safetensors""#).unwrap().contains("b"));
    let error = index(&format!(r#"{both},"c":"three.safetensors""#)).unwrap_err();
    assert!(
        matches!(&error, WeightsError::IndexedFileMissing { file, .. }
            if file == "three.safetensors"),
        "{error}"
    );
    for entries in [
        format!(r#"{both},"c":"two.safetensors""#),
        r#""b":"two.safetensors","a":"two.safetensors""#.to_owned(),
        r#""b":"one.safetensors""#.to_owned(),
    ] {
        let error = index(&entries).unwrap_err();
        assert!(matches!(error, WeightsError::IndexMismatch { .. }), "{entries}: {error}");
    }
    assert!(matches!(open_with_index("[]").unwrap_err(), WeightsError::IndexSyntax { .. }));
    assert!(matches!(index("").unwrap_err(), WeightsError::NoFiles { .. }));
}

#[test]
fn an_index_cannot_reach_outside_its_directory() {
    for entry in [
        "../one.safetensors",
        "/etc/one.safetensors",
        "sub/one.safetensors",
        r"sub\\one.safetensors",
        "..",
        "",
        "one.bin",
        ".safetensors",
    ] {
        let index = format!(r#"{{"weight_map":{{"a":"{entry}"}}}}"#);
        let error = open_with_index(&index).unwrap_err();
        assert!(matches!(error, WeightsError::IndexPath { .. }), "{entry}: {error}");
    }
}

#[test]
fn a_directory_without_weights_is_a_configuration_error() {
    let dir = tempfile::tempdir().unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(error, WeightsError::NoFiles { .. }), "{error}");
    assert_eq!(error.exit_code(), 78);
    let error = Checkpoint::open(&dir.path().join("absent")).unwrap_err();
    assert!(matches!(error, WeightsError::Io { .. }), "{error}");
}

#[test]
fn a_tensor_may_be_stored_only_once() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "one.safetensors", &one_norm("model.norm.weight"));
    write(dir.path(), "two.safetensors", &one_norm("language_model.model.norm.weight"));
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(
        matches!(&error, WeightsError::Duplicate { first, second, .. }
            if first == "one.safetensors" && second == "two.safetensors"),
        "{error}"
    );
}

#[test]
fn the_digest_sees_names_headers_and_data() {
    let digest = |file: &str, name: &str, values: &[f32]| {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), file, &[(name, Dtype::F32, &[values.len()], f32_bytes(values))]);
        Checkpoint::open(dir.path()).unwrap().digest().unwrap()
    };
    let mut values = numbers(600_000, 8);
    let first = digest("a.safetensors", "x", &values);
    assert_eq!(digest("a.safetensors", "x", &values), first);
    assert_ne!(digest("b.safetensors", "x", &values), first);
    assert_ne!(digest("a.safetensors", "y", &values), first);
    *values.last_mut().unwrap() += 1.0;
    assert_ne!(digest("a.safetensors", "x", &values), first);
    values.push(0.0);
    assert_ne!(digest("a.safetensors", "x", &values), first);
}

proptest! {
    /// Whatever the bytes say, the answer is weights or an error: no panic, no fault.
    #[test]
    fn damaged_files_never_panic(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        keep in any::<prop::sample::Index>(),
        cut in any::<bool>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "model.safetensors", &int4_parts());
        let path = dir.path().join("model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        for (place, byte) in damage {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        if cut {
            bytes.truncate(keep.index(bytes.len()));
        }
        fs::write(&path, bytes).unwrap();
        if let Ok(checkpoint) = Checkpoint::open(dir.path()) {
            let _ = linear(&checkpoint, [2, 32]);
            checkpoint.digest().unwrap();
        }
    }
}
