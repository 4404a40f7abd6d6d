//! Token ids against the tiktoken library's, in both modes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]
#![allow(clippy::disallowed_methods)] // test files need not be durable

use std::path::PathBuf;

use extractor::tokenizer::{SpecialText, Tokenizer};
use serde_json::{Value, json};

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn nano_kimi() -> Tokenizer {
    Tokenizer::load(&repository().join("models/nano-kimi")).unwrap()
}

fn golden() -> Value {
    let path = repository().join("tests/fixtures/tokenizer_cases.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn ids_equal_tiktoken_in_both_modes_and_decode_back() {
    let tokenizer = nano_kimi();
    let golden = golden();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 104);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        for (key, mode) in
            [("special_allowed", SpecialText::Allowed), ("ordinary", SpecialText::Ordinary)]
        {
            let wanted = ids(&case[key]);
            assert_eq!(tokenizer.encode(text, mode).unwrap(), wanted, "{key} {text:?}");
            assert_eq!(tokenizer.decode_lossy(&wanted).unwrap(), text, "{key} {text:?}");
        }
    }
}

#[test]
fn long_runs_are_cut_as_kimi_cuts_them() {
    let tokenizer = nano_kimi();
    for case in golden()["long_run_cases"].as_array().unwrap() {
        let pieces = case["pieces"].as_array().unwrap();
        let text: String = pieces
            .iter()
            .map(|piece| {
                piece[0].as_str().unwrap().repeat(piece[1].as_u64().unwrap().try_into().unwrap())
            })
            .collect();
        assert_eq!(text.chars().count() as u64, case["chars"].as_u64().unwrap());
        let got = tokenizer.encode(&text, SpecialText::Ordinary).unwrap();
        assert_eq!(got.len() as u64, case["count_kimi_split"].as_u64().unwrap());
        let sum: u64 = got.iter().map(|&id| u64::from(id)).sum();
        assert_eq!(sum, case["sum_of_ids"].as_u64().unwrap());
        let weighted: u64 = got.iter().zip(0..).map(|(&id, at)| u64::from(id) * at).sum();
        assert_eq!(weighted, case["sum_of_id_times_position"].as_u64().unwrap());
    }
}

#[test]
fn tokenizer_json_equals_the_tokenizers_library() {
    let dir = repository().join("tests/fixtures/stories260k");
    let tokenizer = Tokenizer::load(&dir).unwrap();
    assert_eq!(tokenizer.vocab_size(), 512);
    assert_eq!(tokenizer.document_ends(), (&[1][..], &[][..]));
    assert_eq!(tokenizer.special_id("</s>"), Some(2));
    let path = repository().join("tests/fixtures/stories260k_tokenizer_cases.json");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    for case in golden["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        for (key, mode) in
            [("special_allowed", SpecialText::Allowed), ("ordinary", SpecialText::Ordinary)]
        {
            assert_eq!(tokenizer.encode(text, mode).unwrap(), ids(&case[key]), "{key} {text:?}");
        }
    }
}

/// Text behind a special token does not begin the document, also where some text is held ordinary
/// and the parts are encoded one by one.
#[test]
fn a_space_before_the_document_comes_once() {
    let path = repository().join("tests/fixtures/stories260k/tokenizer.json");
    let mut file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    file["normalizer"] = Value::Null;
    let metaspace =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false});
    for splitter in [metaspace.clone(), json!({"type": "Sequence", "pretokenizers": [metaspace]})] {
        file["pre_tokenizer"] = splitter;
        let tokenizer = Tokenizer::from_tokenizer_json(file.to_string().as_bytes()).unwrap();
        let tail = |text: &str, ordinary: &[std::ops::Range<usize>]| -> Vec<u32> {
            let tokens = tokenizer.encode_spans(text, ordinary).unwrap();
            let end = tokens.iter().rposition(|token| token.id == 2).unwrap();
            assert_ne!(tokens[0].id, 2);
            tokens[end + 1..].iter().map(|token| token.id).collect()
        };
        let whole = tail("One day</s>Once upon", &[]);
        assert_eq!(tail("One <s> day</s>Once upon", std::slice::from_ref(&(4..7))), whole);
        let first = tokenizer.encode("Once upon", SpecialText::Allowed).unwrap();
        assert_ne!(whole, first);
    }
}

#[test]
fn offsets_point_at_the_text_of_each_token() {
    let text = "Say <|im_end|> then  stop.\n你好 😀<|im_end|>";
    let first = text.find("<|im_end|>").unwrap();
    let tokenizer = nano_kimi();
    let tokens = tokenizer.encode_spans(text, std::slice::from_ref(&(0..first + 3))).unwrap();
    let special = tokenizer.special_id("<|im_end|>").unwrap();
    assert_eq!(tokens.iter().filter(|token| token.id == special).count(), 1);
    let mut at = 0;
    for token in &tokens {
        assert_eq!(token.start, at);
        assert_eq!(tokenizer.decode(&[token.id]).unwrap(), &text.as_bytes()[at..token.end]);
        at = token.end;
    }
    assert_eq!(at, text.len());
    assert!(tokenizer.decode(&[4096]).is_err());
}

#[test]
fn ids_of_think_tags_are_in_kimis_place() {
    let tokenizer = nano_kimi();
    // Kimi: [BOS] 163584, <think> 163606, </think> 163607; nano-kimi keeps the distances.
    let bos = tokenizer.special_id("[BOS]").unwrap();
    assert_eq!(tokenizer.special_id("<think>"), Some(bos + 163_606 - 163_584));
    assert_eq!(tokenizer.special_id("</think>"), Some(bos + 163_607 - 163_584));
    let ids = tokenizer.encode("<think>a</think>", SpecialText::Allowed).unwrap();
    assert_eq!(ids, [bos + 22, u32::from(b'a'), bos + 23]);
}

#[test]
fn hostile_tokenizer_files_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let error = Tokenizer::load(dir.path()).unwrap_err();
    assert!(error.to_string().contains("neither tokenizer.json nor tiktoken.model"), "{error}");
    let json = dir.path().join("tokenizer.json");
    for file in [&b""[..], b"{}", b"\xff\xfe", b"[1]"] {
        std::fs::write(&json, file).unwrap();
        assert_eq!(Tokenizer::load(dir.path()).unwrap_err().exit_code(), 65);
    }
    // Two tokens with one id.
    let path = repository().join("tests/fixtures/stories260k/tokenizer.json");
    let mut good: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    good["added_tokens"][2]["content"] = "<other>".into();
    good["model"]["vocab"]["<other>"] = 300.into();
    let shared = Tokenizer::from_tokenizer_json(good.to_string().as_bytes()).unwrap_err();
    assert!(shared.to_string().contains("id 300 is shared"), "{shared}");
    // A file above the limit is not read to its end.
    let file = std::fs::File::options().write(true).open(&json).unwrap();
    file.set_len((64 << 20) + 1).unwrap();
    let error = Tokenizer::load(dir.path()).unwrap_err();
    assert!(error.to_string().contains("67108865 bytes"), "{error}");
}

#[test]
fn monotonous_text_neither_fails_nor_loses_anything() {
    let tokenizer = nano_kimi();
    let units = ["a", "A", "ʰ", "\u{301}", " ", "\n", " \n", "1", "你", "'s", "-", "\u{85}", "aʰ"];
    for unit in units {
        let text = unit.repeat(60_000 / unit.len());
        let ids = tokenizer.encode(&text, SpecialText::Ordinary).unwrap();
        assert_eq!(tokenizer.decode_lossy(&ids).unwrap(), text, "{unit:?}");
    }
}

proptest::proptest! {
    #[test]
    fn any_text_comes_back_in_both_modes(
        text in "(\\PC|\\s|<\\|im_end\\|>|<think>|[ \\n]{2,9}|[a-z]{3,9}){0,30}",
    ) {
        static TOKENIZER: std::sync::LazyLock<Tokenizer> = std::sync::LazyLock::new(nano_kimi);
        for mode in [SpecialText::Allowed, SpecialText::Ordinary] {
            let ids = TOKENIZER.encode(&text, mode).unwrap();
            proptest::prop_assert_eq!(TOKENIZER.decode_lossy(&ids).unwrap(), text.clone());
        }
    }
}
