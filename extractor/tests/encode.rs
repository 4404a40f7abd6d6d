//! Conversations to ids and masks, against goldens made with jinja2 and tiktoken.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::path::PathBuf;
use std::sync::Arc;

use extractor::conversation::{Body, Chat, Conversation, Message, Role};
use extractor::encode::{EncodeOptions, Encoded, Encoder};
use extractor::reject::{Reject, RejectReason, Source};
use serde_json::{Value, json};

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn nano_kimi(options: EncodeOptions) -> Encoder {
    Encoder::load(&repository().join("models/nano-kimi"), options).unwrap()
}

fn golden() -> Value {
    let path = repository().join("tests/fixtures/tokenizer_cases.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn conversation(body: Body) -> Conversation {
    let file = Arc::from(PathBuf::from("test.jsonl"));
    Conversation { source: Source { file, line: 1 }, body }
}

fn chat(messages: &Value) -> Chat {
    let messages = messages.as_array().unwrap().iter().map(|message| {
        let role = match message["role"].as_str().unwrap() {
            "system" => Role::System,
            "user" => Role::User,
            "tool" => Role::Tool,
            _ => Role::Assistant,
        };
        let mut extra = message.as_object().unwrap().clone();
        extra.remove("role");
        extra.remove("content");
        Message { role, content: message["content"].as_str().unwrap().into(), extra }
    });
    Chat { messages: messages.collect(), tools: None, truncated: false }
}

fn encode(encoder: &Encoder, chat: Chat) -> Result<Encoded, Reject> {
    encoder.encode(&conversation(Body::Chat(chat)))
}

#[test]
fn conversations_equal_the_goldens() {
    let encoder = nano_kimi(EncodeOptions::default());
    let golden = golden();
    let cases = golden["conversations"].as_array().unwrap();
    assert_eq!(cases.len(), 10);
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let chat = chat(&case["messages"]);
        assert_eq!(encoder.lay_out(&chat).unwrap().text, case["text"].as_str().unwrap(), "{name}");
        let sample = encode(&encoder, chat).unwrap().sample;
        let key = |key| case.get(key).cloned();
        let ids = key("ids_content_ordinary").unwrap_or_else(|| case["ids"].clone());
        let mask = key("mask_content_ordinary").unwrap_or_else(|| case["mask"].clone());
        assert_eq!(json!(sample.input_ids()), ids, "{name}");
        assert_eq!(json!(sample.loss_mask()), mask, "{name}");
    }
}
