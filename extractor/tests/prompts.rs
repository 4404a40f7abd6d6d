//! JSONL as it comes: every spelling, and every way of being broken.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]
#![allow(clippy::disallowed_methods)] // test files need not be durable

use std::io::Write;
use std::path::{Path, PathBuf};

use extractor::conversation::{Body, Role};
use extractor::prompts::{Line, MAX_LINE_BYTES, Prompts, PromptsError};
use extractor::reject::RejectReason;
use proptest::prelude::*;
use serde_json::{Value, json};

fn read(bytes: &[u8]) -> Vec<Line> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.jsonl");
    std::fs::write(&path, bytes).unwrap();
    Prompts::open(&[path]).unwrap().map(Result::unwrap).collect()
}

fn reason(row: &str) -> RejectReason {
    let lines = read(row.as_bytes());
    assert_eq!(lines.len(), 1, "{row}");
    lines[0].parsed.as_ref().unwrap_err().reason
}

fn body(row: &Value) -> Body {
    let lines = read(row.to_string().as_bytes());
    let conversation = lines[0].parsed.as_ref();
    conversation.unwrap_or_else(|reject| panic!("{reject}")).body.clone()
}

fn said(body: &Body) -> Vec<(Role, String)> {
    let Body::Chat(chat) = body else { panic!("{body:?}") };
    chat.messages.iter().map(|message| (message.role, message.content.clone())).collect()
}

const GOOD: &str =
    r#"{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}]}"#;

#[test]
fn all_spellings_say_the_same() {
    let wanted = vec![
        (Role::System, "s".to_owned()),
        (Role::User, "q".to_owned()),
        (Role::Assistant, "a".to_owned()),
    ];
    for row in [
        json!({"id": 7, "messages": [{"role": "system", "content": "s"},
            {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}),
        json!({"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"},
            {"from": "gpt", "value": "a"}], "source": "sharegpt", "text": null}),
        json!({"system": "s", "tools": "", "conversations": [{"from": "human", "value": "q"},
            {"from": "gpt", "value": "a"}]}),
        json!({"system": " ", "conversations": [{"role": "developer", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"from": "model", "value": ["", "a"]}]}),
    ] {
        assert_eq!(said(&body(&row)), wanted, "{row}");
    }
    assert_eq!(body(&json!({"text": "t"})), Body::Text("t".into()));
    let tokens = body(&json!({"input_ids": [1, 2], "loss_mask": [0, true]}));
    assert_eq!(tokens, Body::Tokens { input_ids: vec![1, 2], loss_mask: vec![0, 1] });
}

#[test]
fn tools_come_as_a_list_or_as_json_in_a_string() {
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let with = |tools: Value| {
        let mut row: Value = serde_json::from_str(GOOD).unwrap();
        row["tools"] = tools;
        row
    };
    for spelling in [tools.clone(), json!(tools.to_string())] {
        let Body::Chat(chat) = body(&with(spelling)) else { panic!() };
        assert_eq!(chat.tools, Some(tools.clone()));
    }
    for none in [json!(null), json!([]), json!("")] {
        let Body::Chat(chat) = body(&with(none)) else { panic!() };
        assert_eq!(chat.tools, None);
    }
    let lines = read(with(json!("{not json")).to_string().as_bytes());
    let reject = lines[0].parsed.as_ref().unwrap_err();
    assert_eq!(reject.reason, RejectReason::BadField);
    assert!(reject.detail.contains("tools"), "{reject}");
}

/// The parser makes floating-point numbers of them, and a template would print those.
#[test]
fn integers_for_the_template_that_lost_their_digits_are_rejected() {
    let (huge, kept) = ("18446744073709551616", u64::MAX);
    let call = |arguments: &str, more: &str| {
        format!(
            r#"{{"messages":[{{"role":"user","content":"q"}},{{"role":"assistant","content":"",
            "tool_calls":[{{"function":{{"name":"f","arguments":{arguments}}}}}]}}]{more}}}"#
        )
        .replace('\n', "")
    };
    let id = format!(r#","id":{huge}"#);
    for row in [
        call(&format!(r#"{{"x":[1,{huge}]}}"#), ""),
        call(r#"{"x":-9223372036854775809}"#, ""),
        call("{}", &format!(r#","tools":[{{"maximum":{huge}}}]"#)),
        call("{}", &format!(r#","tools":"[{{\"maximum\":{huge}}}]""#)),
    ] {
        assert_eq!(reason(&row), RejectReason::IntegerTooLarge, "{row}");
        let detail = read(row.as_bytes())[0].parsed.as_ref().unwrap_err().detail.clone();
        assert!(detail.contains("64 bits") && detail.contains("as a string"), "{detail}");
    }
    for row in [
        call(&format!(r#"{{"x":{kept},"y":-9223372036854775808}}"#), ""),
        // Meant as it is parsed, or given as text, or for nobody.
        call(r#"{"x":1e20,"y":100000000000000000000.0}"#, ""),
        call(&format!(r#""{{\"x\":{huge}}}""#), ""),
        call(r#"{"x":1.5}"#, &id),
    ] {
        assert!(read(row.as_bytes())[0].parsed.is_ok(), "{row}");
    }
}

#[test]
fn cut_off_answers_are_marked() {
    let mut row: Value = serde_json::from_str(GOOD).unwrap();
    row["truncated"] = true.into();
    assert!(matches!(body(&row), Body::Chat(chat) if chat.truncated));
    row["truncated"] = "yes".into();
    assert_eq!(reason(&row.to_string()), RejectReason::BadField);
}

#[test]
fn every_fault_has_its_reason() {
    let chat = |turns: &str| format!("{{\"messages\":[{turns}]}}");
    let (q, a) = (r#"{"role":"user","content":"q"}"#, r#"{"role":"assistant","content":"a"}"#);
    let deep = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
    for (row, wanted) in [
        ("{".to_owned(), RejectReason::BadJson),
        ("{\"text\":\"\u{1}\"}".into(), RejectReason::BadJson),
        ("{\"text\":\"\0\"}".into(), RejectReason::BadJson),
        (r#"{"text":"\ud800"}"#.into(), RejectReason::BadJson),
        ("[1]".into(), RejectReason::NotAnObject),
        ("7".into(), RejectReason::NotAnObject),
        (r#"{"prompt":"x"}"#.into(), RejectReason::NoConversation),
        (r#"{"text":"x","input_ids":[1]}"#.into(), RejectReason::AmbiguousConversation),
        (r#"{"messages":"x"}"#.into(), RejectReason::BadField),
        (
            format!(
                "{{\"system\":\"s\",{}",
                &chat(&format!("{},{q},{a}", q.replace("user", "system")))[1..]
            ),
            RejectReason::BadField,
        ),
        (format!("{{\"system\":[],{}", &chat(&format!("{q},{a}"))[1..]), RejectReason::BadField),
        (r#"{"messages":["x"]}"#.into(), RejectReason::BadField),
        (r#"{"text":7}"#.into(), RejectReason::BadField),
        (r#"{"text":" "}"#.into(), RejectReason::EmptyContent),
        (chat(""), RejectReason::NoAssistantTurn),
        (chat(q), RejectReason::NoAssistantTurn),
        (chat(&format!("{a},{q}")), RejectReason::NotAlternating),
        (chat(&format!("{q},{a},{a}")), RejectReason::NotAlternating),
        (chat(&format!("{q},{}", a.replace("assistant", "critic"))), RejectReason::UnknownRole),
        (chat(&format!("{q},{}", a.replace("assistant", "Assistant"))), RejectReason::UnknownRole),
        (chat(&format!("{q},{}", a.replace("role", "who"))), RejectReason::UnknownRole),
        (chat(&format!("{q},{}", a.replace("\"a\"", "\" \""))), RejectReason::EmptyContent),
        (chat(&format!("{q},{}", a.replace("\"a\"", "null"))), RejectReason::EmptyContent),
        (chat(&format!("{},{a}", q.replace("\"q\"", "\"\""))), RejectReason::EmptyContent),
        (chat(&format!("{},{a}", q.replace("\"q\"", "7"))), RejectReason::BadField),
        (
            chat(&format!("{},{a}", q.replace("\"q\"", r#"[{"type":"image_url"}]"#))),
            RejectReason::UnsupportedContent,
        ),
        (r#"{"input_ids":[1,2],"loss_mask":[1]}"#.into(), RejectReason::BadTokens),
        (r#"{"input_ids":[1]}"#.into(), RejectReason::BadTokens),
        (r#"{"input_ids":[],"loss_mask":[]}"#.into(), RejectReason::BadTokens),
        (r#"{"input_ids":[-1],"loss_mask":[1]}"#.into(), RejectReason::BadTokens),
        (r#"{"input_ids":[1.5],"loss_mask":[1]}"#.into(), RejectReason::BadTokens),
        (r#"{"input_ids":[4294967296],"loss_mask":[1]}"#.into(), RejectReason::BadTokens),
        (r#"{"input_ids":[1],"loss_mask":[2]}"#.into(), RejectReason::BadTokens),
        (format!("{{\"x\":{},\"text\":\"t\"}}", deep(64)), RejectReason::JsonTooDeep),
        (deep(1_000_000), RejectReason::JsonTooDeep),
    ] {
        assert_eq!(reason(&row), wanted, "{}", row.chars().take(200).collect::<String>());
    }
    // Brackets in strings do not nest, and 64 levels are fine.
    assert!(read(format!("{{\"text\":\"\\\"{}\"}}", "[".repeat(100)).as_bytes())[0].parsed.is_ok());
    let row = format!("{{\"x\":{},\"text\":\"t\"}}", deep(63));
    assert!(read(row.as_bytes())[0].parsed.is_ok());
    // An assistant that calls tools may say nothing.
    let call = a.replace("\"a\"", "null,\"tool_calls\":[{}]");
    assert!(read(chat(&format!("{q},{call}")).as_bytes())[0].parsed.is_ok());
}

#[test]
fn a_bad_line_does_not_end_the_file() {
    let mut file = b"\xef\xbb\xbf".to_vec();
    file.extend_from_slice(format!("{GOOD}\r\n\n  \r\n{{\n").as_bytes());
    file.extend_from_slice(b"{\"text\":\"\xff\"}\n");
    // These separate lines elsewhere, but not in JSONL.
    file.extend_from_slice("{\"text\":\"a\u{2028}b\u{85}c\"}\n".as_bytes());
    file.extend_from_slice(GOOD.as_bytes());
    let lines = read(&file);
    let numbers: Vec<u64> = lines.iter().map(|line| line.source.line).collect();
    assert_eq!(numbers, [1, 4, 5, 6, 7]);
    let faults: Vec<Option<RejectReason>> =
        lines.iter().map(|line| line.parsed.as_ref().err().map(|reject| reject.reason)).collect();
    let wanted = [None, Some(RejectReason::BadJson), Some(RejectReason::NotUtf8), None, None];
    assert_eq!(faults, wanted);
    // Neither the BOM nor the line end is part of the line.
    assert_eq!(lines[0].digest, lines[4].digest);
    assert_eq!(lines[0].digest, blake3::hash(GOOD.as_bytes()).as_bytes()[..16]);
    let shown = lines[1].parsed.as_ref().unwrap_err().to_string();
    assert!(shown.contains("x.jsonl:4: bad_json: "), "{shown}");
}

#[test]
fn lines_above_the_limit_are_skipped_without_keeping_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.jsonl");
    let mut file = std::fs::File::create(&path).unwrap();
    let fits = |bytes: usize| format!("{{\"text\":\"{}\"}}", "a".repeat(bytes - 11));
    writeln!(file, "{}", fits(MAX_LINE_BYTES)).unwrap();
    write!(file, "{}\r\n", fits(MAX_LINE_BYTES)).unwrap();
    writeln!(file, "{}", fits(MAX_LINE_BYTES + 1)).unwrap();
    writeln!(file, "{}", fits(MAX_LINE_BYTES + 2)).unwrap();
    let long = fits(100 << 20);
    writeln!(file, "{long}").unwrap();
    writeln!(file, "{GOOD}").unwrap();
    drop(file);
    let lines: Vec<Line> = Prompts::open(&[path]).unwrap().map(Result::unwrap).collect();
    let too_long: Vec<bool> = lines.iter().map(|line| line.parsed.is_err()).collect();
    assert_eq!(too_long, [false, false, true, true, true, false]);
    let reject = lines[4].parsed.as_ref().unwrap_err();
    assert_eq!(reject.reason, RejectReason::LineTooLong);
    assert!(reject.detail.starts_with("104857600 bytes"), "{reject}");
    assert_eq!(lines[4].digest, blake3::hash(long.as_bytes()).as_bytes()[..16]);
}

#[test]
fn files_that_cannot_be_read_are_errors_that_name_them() {
    let dir = tempfile::tempdir().unwrap();
    let good = dir.path().join("good.jsonl");
    std::fs::write(&good, GOOD).unwrap();
    let open = |path: &Path| Prompts::open(&[good.clone(), path.to_path_buf()]);
    let missing = open(&dir.path().join("missing.jsonl")).unwrap_err();
    assert!(missing.to_string().contains("missing.jsonl"), "{missing}");
    assert_eq!(missing.exit_code(), 74);
    assert!(matches!(open(dir.path()).unwrap_err(), PromptsError::Open { .. }));
    assert!(matches!(open(Path::new("/dev/zero")).unwrap_err(), PromptsError::Open { .. }));
    let empty = dir.path().join("empty.jsonl");
    std::fs::write(&empty, "").unwrap();
    assert!(open(&empty).unwrap_err().to_string().contains("empty.jsonl is empty"));
    // Only blank lines are found out while reading, after the good file.
    std::fs::write(&empty, "\n \n").unwrap();
    let mut prompts = open(&empty).unwrap();
    assert!(prompts.next().unwrap().is_ok());
    let error = prompts.next().unwrap().unwrap_err();
    assert_eq!(error.exit_code(), 65);
    assert!(prompts.next().is_none());
    assert!(matches!(Prompts::open(&[]).unwrap_err(), PromptsError::NoFiles));
}

#[test]
fn several_files_are_read_in_the_order_named() {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = ["b", "a"]
        .iter()
        .map(|name| {
            let path = dir.path().join(name);
            std::fs::write(&path, format!("{GOOD}\n{{\"text\":\"{name}\"}}\n")).unwrap();
            path
        })
        .collect();
    let mut prompts = Prompts::open(&paths).unwrap();
    let total = 2 * (GOOD.len() as u64 + 1 + 13);
    assert_eq!(prompts.progress(), (0, total));
    let lines: Vec<Line> = prompts.by_ref().map(Result::unwrap).collect();
    assert_eq!(prompts.progress(), (total, total));
    let places: Vec<(&Path, u64)> =
        lines.iter().map(|line| (&*line.source.file, line.source.line)).collect();
    let wanted = [(&*paths[0], 1), (&*paths[0], 2), (&*paths[1], 1), (&*paths[1], 2)];
    assert_eq!(places, wanted);
}

proptest! {
    #[test]
    fn any_bytes_give_one_line_a_line(lines in proptest::collection::vec(
        proptest::collection::vec(prop_oneof![0..10_u8, 11..=255_u8], 1..40), 1..8)) {
        let mut file = b"{\"text\":\"first\"}\n".to_vec();
        for line in &lines {
            file.extend_from_slice(line);
            file.push(b'\n');
        }
        let read = read(&file);
        let blank = |line: &&Vec<u8>| line.iter().all(u8::is_ascii_whitespace);
        prop_assert_eq!(read.len(), 1 + lines.len() - lines.iter().filter(blank).count());
        prop_assert!(read.is_sorted_by(|a, b| a.source.line < b.source.line));
    }
}
