//! Token ids against the tiktoken library's, in both modes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::path::PathBuf;

use extractor::tokenizer::{SpecialText, Tokenizer};
use serde_json::Value;

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
