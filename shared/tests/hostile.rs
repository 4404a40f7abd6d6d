//! Headers made to break readers: each is refused with a named error, and cheaply.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod support;

use std::fs;

use proptest::prelude::*;
use shared::header::HeaderError;
use shared::*;

/// A file with this header text and `data` zero bytes behind it.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

fn read(bytes: &[u8]) -> Result<ShardHeader, HeaderError> {
    ShardHeader::read(bytes, bytes.len() as u64, &HeaderLimits::SHARD)
}

fn refusal(header: &str, data: usize) -> String {
    read(&file(header, data)).unwrap_err().to_string()
}

#[test]
fn lengths_are_checked_before_anything_is_allocated() {
    for (length, file_bytes) in [(0, 7), (1 << 63, 100), ((1 << 20) + 1, 1 << 30), (93, 100)] {
        let bytes: Vec<u8> = u64::to_le_bytes(length).to_vec();
        let error = ShardHeader::read(bytes.as_slice(), file_bytes, &HeaderLimits::SHARD);
        assert!(
            matches!(
                error,
                Err(HeaderError::TooShort { .. }
                    | HeaderError::TooLong { .. }
                    | HeaderError::Truncated { .. })
            ),
            "{error:?}"
        );
    }
    assert!(matches!(read(&file("", 0)), Err(HeaderError::Json(_))));
}

#[test]
fn text_that_is_no_header_is_refused() {
    let mut latin = file("{}", 0);
    latin[8] = 0xe9;
    assert!(matches!(read(&latin), Err(HeaderError::NotUtf8)));
    for text in ["[]", "null", "{", "{}x", r#"{"__metadata__":{"a":1}}"#] {
        assert!(matches!(read(&file(text, 0)), Err(HeaderError::Json(_))), "{text}");
    }
    let deep = format!("{{\"a\":{}1{}}}", "[".repeat(10_000), "]".repeat(10_000));
    assert!(matches!(read(&file(&deep, 0)), Err(HeaderError::Json(_))));
}

#[test]
fn duplicate_keys_are_refused() {
    let one = r#""a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    assert!(read(&file(&format!("{{{one}}}"), 1)).is_ok());
    assert!(refusal(&format!("{{{one},{one}}}"), 1).contains("occurs twice"));
    let metadata = r#""__metadata__":{"k":"v"}"#;
    assert!(refusal(&format!("{{{metadata},{metadata},{one}}}"), 1).contains("occurs twice"));
    assert!(refusal(r#"{"__metadata__":{"k":"v","k":"w"}}"#, 0).contains("occurs twice"));
    let field = r#"{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}"#;
    assert!(refusal(field, 1).contains("duplicate field"));
}

#[test]
fn offsets_must_tile_the_file() {
    let two = |a: &str, b: &str| {
        format!(
            concat!(
                r#"{{"a":{{"dtype":"U8","shape":[2],"data_offsets":{a}}},"#,
                r#""b":{{"dtype":"U8","shape":[2],"data_offsets":{b}}}}}"#
            ),
            a = a,
            b = b
        )
    };
    assert!(read(&file(&two("[0,2]", "[2,4]"), 4)).is_ok());
    for (a, b, data) in [
        ("[0,2]", "[1,3]", 3),
        ("[0,2]", "[3,5]", 5),
        ("[0,2]", "[0,2]", 2),
        ("[-2,0]", "[0,2]", 2),
        ("[0.0,2]", "[2,4]", 4),
        ("[2,0]", "[2,4]", 4),
        ("[0,2,2]", "[2,4]", 4),
        ("[0,1]", "[1,3]", 3),
        ("[0,2]", "[2,4]", 3),
        ("[0,2]", "[2,4]", 5),
        ("[0,2]", "[2,18446744073709551615]", 4),
    ] {
        assert!(read(&file(&two(a, b), data)).is_err(), "{a} {b} {data}");
    }
}

#[test]
fn impossible_shapes_are_refused() {
    let one =
        |shape: &str| format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}}}"#);
    let many_axes = format!("[{}1]", "1,".repeat(1_000_000 / 4));
    for shape in [
        "[0,9223372036854775807]",
        "[4294967296,4294967296,4294967296]",
        "[18446744073709551615,2]",
        "[-1]",
        "[1.5]",
        "[1,1,1,1,1]",
        many_axes.as_str(),
    ] {
        let error = read(&file(&one(shape), 0)).unwrap_err();
        let named = matches!(error, HeaderError::Json(_) | HeaderError::Tensor { .. });
        assert!(named, "{error}");
    }
}

#[test]
fn too_many_tensors_are_refused_while_reading() {
    let entries: Vec<String> = (0..4097)
        .map(|i| format!(r#""{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{}]}}"#, i + 1))
        .collect();
    assert!(refusal(&format!("{{{}}}", entries.join(",")), 4097).contains("more than 4096"));
    let fits = format!("{{{}}}", entries[..4096].join(","));
    assert_eq!(read(&file(&fits, 4096)).unwrap().tensors.len(), 4096);
}

#[test]
fn names_that_could_be_paths_are_refused() {
    for name in ["../../x", "/etc/passwd", "a\\u0000b", "A", "", "ä", &"x".repeat(65)] {
        let header = format!(r#"{{"{name}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#);
        assert!(matches!(read(&file(&header, 1)), Err(HeaderError::Name(_))), "{name:?}");
    }
}

#[test]
fn file_names_of_shards_are_bare() {
    for name in [
        "../shard-000000.safetensors",
        "/shard-000000.safetensors",
        "shard-0.safetensors",
        "shard-+00001.safetensors",
        "shard-0000000.safetensors",
        "shard-000000.safetensors/",
        "",
    ] {
        assert!(name.parse::<ShardId>().is_err(), "{name}");
    }
    assert_eq!("shard-000042.safetensors".parse::<ShardId>().unwrap(), ShardId(42));
}

#[test]
fn links_devices_fifos_and_directories_are_not_opened() {
    let dir = support::tempdir();
    let fifo = dir.path().join("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let link = dir.path().join("link");
    std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
    let spec = support::spec(StateDtype::Bf16);
    fs::create_dir(dir.path().join("shards")).unwrap();
    let sealed = support::seal(dir.path(), ShardId(0), &spec, &support::samples(&spec, 1));
    let sound = dir.path().join("sound");
    std::os::unix::fs::symlink(dir.path().join("shards").join(sealed.file), &sound).unwrap();
    for path in [fifo.as_path(), &link, &sound, dir.path(), "/dev/zero".as_ref()] {
        let error = ShardReader::open(path, &HeaderLimits::SHARD).unwrap_err();
        assert_eq!(error.exit_code(), 74, "{error}");
    }
}

#[test]
fn other_sets_of_tensors_are_refused() {
    let dir = support::tempdir();
    let spec = support::spec(StateDtype::Fp8);
    fs::create_dir_all(dir.path().join("shards")).unwrap();
    let sealed = support::seal(dir.path(), ShardId(0), &spec, &support::samples(&spec, 1));
    let path = dir.path().join("shards").join(&sealed.file);
    let whole = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&whole[8..8 + length]).unwrap();
    for (from, to, reason) in [
        (".loss_mask", ".lose_mask", "`loss_mask` is missing"),
        ("hidden_states.3\"", "hidden_states.4\"", "`hidden_states.3` is missing"),
        ("\"layers\":\"1,3\"", "\"layers\":\"3,1\"", "not ascending"),
        ("\"layers\":\"1,3\"", "\"layers\":\"1,4\"", "`hidden_states.4` is missing"),
        ("\"hidden_size\":\"6\"", "\"hidden_size\":\"5\"", "expected 2 tensors [3, 5]; got"),
        ("\"dtype\":\"fp8\"", "\"dtype\":\"fpx\"", "metadata `dtype`"),
        ("\"pre_norm\":\"true\"", "\"pre_norm\":\"fals\"", "after the final norm"),
        ("\"format_version\":\"1\"", "\"format_version\":\"2\"", "format version 2"),
        ("F8_E4M3", "F8_E5M2", "F8_E4M3 is expected"),
        ("\"dtype\":\"U8\"", "\"dtype\":\"I8\"", "loss_mask is I8, U8 is expected"),
        ("\"dtype\":\"U32\"", "\"dtype\":\"I32\"", "input_ids is I32, U32 is expected"),
        ("\"dtype\":\"F32\"", "\"dtype\":\"I32\"", "scale is I32, F32 is expected"),
    ] {
        assert!(header.contains(from), "{from}");
        let mut bytes = whole[..8].to_vec();
        bytes.extend(header.replacen(from, to, 1).as_bytes());
        bytes.extend(&whole[8 + length..]);
        fs::write(&path, bytes).unwrap();
        let error = ShardReader::open(&path, &HeaderLimits::SHARD).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}\n  should say: {reason}");
        assert_eq!(error.exit_code(), 65);
    }
}

#[test]
fn a_shard_cut_anywhere_is_refused() {
    let dir = support::tempdir();
    let spec = support::spec(StateDtype::Bf16);
    fs::create_dir_all(dir.path().join("shards")).unwrap();
    let sealed = support::seal(dir.path(), ShardId(0), &spec, &support::samples(&spec, 2));
    let whole = fs::read(dir.path().join("shards").join(sealed.file)).unwrap();
    for length in 0..whole.len() {
        assert!(read(&whole[..length]).is_err(), "{length}");
    }
}

proptest! {
    #[test]
    fn any_bytes_give_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = read(&bytes);
    }

    #[test]
    fn any_edit_of_a_header_gives_an_answer(
        at in 0usize..100,
        with in "[0-9{}\\[\\]\",:a-zA-Z.-]{0,3}",
    ) {
        let header = concat!(
            r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"#,
            r#""b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}"#
        );
        let mut text = header.to_owned();
        text.replace_range(at..at + 1, &with);
        if let Ok(header) = read(&file(&text, 6)) {
            let bytes: u64 = header.tensors.iter().map(|tensor| tensor.bytes).sum();
            prop_assert_eq!(bytes, 6);
        }
    }
}
