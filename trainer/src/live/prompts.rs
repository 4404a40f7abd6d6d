//! Prompts for live decoding: the turns of a conversation before its first answer, as token ids.
//! Knows no model.

use std::path::Path;

use extractor::conversation::{Body, Chat, Message, Role};
use extractor::encode::Encoder;
use serde_json::{Value, json};

use super::LiveError;

/// One prompt, ready for the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// File and line, for messages.
    pub name: String,
    /// Token ids up to where the assistant speaks.
    pub input_ids: Vec<u32>,
}

/// Reads up to `limit` prompts of a JSONL file: rows with `messages` or `conversations` (turns
/// before the first answer are used; an answer need not be there), with `turns`, a list of user
/// texts of which the first is used, or with `input_ids` and `loss_mask` (tokens before the first
/// trained one are used). An unusable line is an error.
pub fn read_prompts(
    path: &Path,
    encoder: &Encoder,
    limit: usize,
) -> Result<Vec<Prompt>, LiveError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| LiveError::Prompts { path: path.to_owned(), source })?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .take(limit)
        .map(|(at, line)| {
            let wrong = |reason| LiveError::Prompt { path: path.to_owned(), line: at + 1, reason };
            let input_ids = match prompt_of(line).map_err(wrong)? {
                Asked::Chat(chat) => {
                    encoder.encode_prompt(&chat).map_err(|fault| wrong(fault.detail))?
                }
                Asked::Tokens(ids) => ids,
            };
            Ok(Prompt { name: format!("{}:{}", path.display(), at + 1), input_ids })
        })
        .collect()
}

/// What a row asks.
#[derive(Debug)]
enum Asked {
    Chat(Chat),
    Tokens(Vec<u32>),
}

fn prompt_of(line: &str) -> Result<Asked, String> {
    let mut row: Value = serde_json::from_str(line).map_err(|error| error.to_string())?;
    if let Some(turns) = row.get("turns").and_then(Value::as_array) {
        let first = turns.first().and_then(Value::as_str);
        let first = first.ok_or("`turns` must be a list of texts that is not empty")?;
        let messages = vec![Message::new(Role::User, first)];
        return Ok(Asked::Chat(Chat { messages, ..Chat::default() }));
    }
    for key in ["messages", "conversations"] {
        if let Some(Value::Array(turns)) = row.get_mut(key) {
            // The parser of training rows wants an answer; which one does not matter here.
            turns.push(json!({ "role": "user", "content": "." }));
            turns.push(json!({ "role": "assistant", "content": "." }));
        }
    }
    let mut chat = match Body::parse(row).map_err(|fault| fault.detail)? {
        Body::Chat(chat) => chat,
        Body::Tokens { mut input_ids, loss_mask } => {
            let prompt = loss_mask.iter().position(|&trained| trained == 1);
            input_ids.truncate(prompt.unwrap_or(input_ids.len()));
            return match input_ids.is_empty() {
                true => Err("no token before the first trained one".to_owned()),
                false => Ok(Asked::Tokens(input_ids)),
            };
        }
        Body::Text(_) => return Err("a text has no prompt".to_owned()),
    };
    chat.messages.truncate(chat.messages.len().saturating_sub(2));
    if let Some(answer) = chat.messages.iter().position(|m| m.role == Role::Assistant) {
        chat.messages.truncate(answer);
    }
    match chat.messages.iter().any(|message| message.role == Role::User) {
        true => Ok(Asked::Chat(chat)),
        false => Err("no user turn before the first answer".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(line: &str) -> Result<Vec<(Role, String)>, String> {
        let Asked::Chat(chat) = prompt_of(line)? else { return Err("token ids".to_owned()) };
        Ok(chat.messages.into_iter().map(|m| (m.role, m.content)).collect())
    }

    #[test]
    fn turns_before_the_first_answer_are_the_prompt() {
        let expected = vec![(Role::System, "s".to_owned()), (Role::User, "a".to_owned())];
        let line = r#"{"messages": [{"role": "system", "content": "s"},
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"}]}"#;
        assert_eq!(turns(line).unwrap(), expected);
        let line = r#"{"conversations": [{"from": "system", "value": "s"},
            {"from": "human", "value": "a"}]}"#;
        assert_eq!(turns(line).unwrap(), expected);
        let line = r#"{"question_id": 81, "turns": ["a", "later"]}"#;
        assert_eq!(turns(line).unwrap(), [(Role::User, "a".to_owned())]);
    }

    #[test]
    fn tokens_before_the_first_trained_one_are_the_prompt() {
        let line = r#"{"input_ids": [7, 8, 9, 7], "loss_mask": [0, 0, 1, 1]}"#;
        assert!(matches!(prompt_of(line).unwrap(), Asked::Tokens(ids) if ids == [7, 8]));
        assert!(prompt_of(r#"{"input_ids": [7], "loss_mask": [1]}"#).is_err());
    }

    #[test]
    fn rows_without_a_question_are_refused() {
        for line in [
            r#"{"messages": [{"role": "system", "content": "s"}]}"#,
            r#"{"turns": []}"#,
            r#"{"text": "a"}"#,
            "{",
        ] {
            assert!(turns(line).is_err(), "{line}");
        }
    }
}
