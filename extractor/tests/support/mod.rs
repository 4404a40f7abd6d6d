//! What the input tests share: the bundled model, fixtures, chats from JSON.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, dead_code)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use extractor::conversation::{Body, Chat, Conversation, Message, Role};
use extractor::encode::{EncodeOptions, Encoded, Encoder};
use extractor::reject::{Reject, Source};
use serde_json::Value;

pub(crate) fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

pub(crate) fn nano_kimi_dir() -> PathBuf {
    repository().join("models/nano-kimi")
}

pub(crate) fn nano_kimi(options: EncodeOptions) -> Encoder {
    Encoder::load(&nano_kimi_dir(), options).unwrap()
}

pub(crate) fn fixture(name: &str) -> String {
    std::fs::read_to_string(repository().join("tests/fixtures").join(name)).unwrap()
}

pub(crate) fn json_fixture(name: &str) -> Value {
    serde_json::from_str(&fixture(name)).unwrap()
}

pub(crate) fn conversation(body: Body) -> Conversation {
    let file = Arc::from(Path::new("test.jsonl"));
    Conversation { source: Source { file, line: 1 }, body }
}

/// A chat as templates get it, without the reader's checks.
pub(crate) fn chat(messages: &Value) -> Chat {
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
        let content = message["content"].as_str().unwrap_or_default().into();
        Message { role, content, content_is_null: message["content"].is_null(), extra }
    });
    Chat { messages: messages.collect(), tools: None, truncated: false }
}

pub(crate) fn encode(encoder: &Encoder, chat: Chat) -> Result<Encoded, Reject> {
    encoder.encode(&conversation(Body::Chat(chat)))
}

/// The text of each stretch of trained tokens.
pub(crate) fn trained_text(encoder: &Encoder, encoded: &Encoded) -> Vec<String> {
    let sample = &encoded.sample;
    let mut stretches: Vec<Vec<u32>> = Vec::new();
    let mut inside = false;
    for (&id, &trained) in sample.input_ids().iter().zip(sample.loss_mask()) {
        match (trained == 1, inside) {
            (true, false) => stretches.push(vec![id]),
            (true, true) => stretches.last_mut().unwrap().push(id),
            _ => {}
        }
        inside = trained == 1;
    }
    stretches.iter().map(|ids| encoder.tokenizer().decode_lossy(ids).unwrap()).collect()
}
