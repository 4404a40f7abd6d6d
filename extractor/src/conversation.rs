//! One parsed input row: who said what, before any template or tokenizer. Knows nothing of files
//! or tokens; accepts the spellings in which training sets come.

use serde_json::{Map, Value};

use crate::integers::require_kept;
use crate::reject::{Fault, RejectReason, Source};

/// A parsed input line.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// The line it came from.
    pub source: Source,
    /// What it holds.
    pub body: Body,
}

/// The three kinds of row.
#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    /// Turns, to be laid out by the target's chat template.
    Chat(Chat),
    /// Running text, trained whole.
    Text(String),
    /// A row tokenised elsewhere: ids and mask of equal length.
    Tokens {
        /// Token ids, [tokens].
        input_ids: Vec<u32>,
        /// 1 where the draft is trained, [tokens].
        loss_mask: Vec<u8>,
    },
}

/// The turns of one conversation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chat {
    /// In order of speaking.
    pub messages: Vec<Message>,
    /// Tool declarations for the template, if any: a list.
    pub tools: Option<Value>,
    /// The last answer was cut off, so its end marker must not be trained.
    pub truncated: bool,
}

/// One turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said; text parts are joined.
    pub content: String,
    /// The content was null, which templates can tell from an empty one.
    pub content_is_null: bool,
    /// Other keys of the message, passed to the template (`reasoning_content`, `tool_calls`...).
    pub extra: Map<String, Value>,
}

impl Message {
    /// A turn without further keys.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into(), content_is_null: false, extra: Map::new() }
    }

    /// Whether the turn calls tools, which makes an empty content legitimate.
    pub fn calls_tools(&self) -> bool {
        matches!(self.extra.get("tool_calls"), Some(Value::Array(calls)) if !calls.is_empty())
    }
}

/// Who speaks. The names passed to templates are those of the `messages` spelling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Instructions.
    System,
    /// The person.
    User,
    /// The model: its turns are trained.
    Assistant,
    /// The answer of a tool.
    Tool,
}

impl Role {
    /// The name templates know.
    pub const fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }

    fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "system" | "developer" => Self::System,
            "user" | "human" => Self::User,
            "assistant" | "gpt" | "model" | "chatgpt" => Self::Assistant,
            "tool" | "function" | "observation" | "function_response" => Self::Tool,
            _ => return None,
        })
    }
}

impl Body {
    /// Reads a row: exactly one of `messages`, `conversations`, `text`, or `input_ids` with
    /// `loss_mask`. Other keys are allowed and ignored, but for `tools` and `truncated`.
    pub fn parse(row: Value) -> Result<Self, Fault> {
        let Value::Object(mut row) = row else {
            return Err(Fault::new(
                RejectReason::NotAnObject,
                format!("a row is a JSON object, this is {}", kind(&row)),
            ));
        };
        let present: Vec<&str> = ["messages", "conversations", "text", "input_ids"]
            .into_iter()
            .filter(|key| row.get(*key).is_some_and(|value| !value.is_null()))
            .collect();
        match present.as_slice() {
            [key @ ("messages" | "conversations")] => {
                let turns = row.remove(*key).unwrap_or_default();
                Chat::parse(key, turns, &mut row).map(Self::Chat)
            }
            ["text"] => text_row(row.remove("text").unwrap_or_default()),
            ["input_ids"] => tokens_row(&row),
            [] => Err(Fault::new(
                RejectReason::NoConversation,
                format!(
                    "none of messages, conversations, text, input_ids; the keys are [{}]",
                    row.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
                ),
            )),
            several => Err(Fault::new(
                RejectReason::AmbiguousConversation,
                format!("only one of {} can be meant", several.join(", ")),
            )),
        }
    }
}

impl Chat {
    fn parse(key: &str, turns: Value, row: &mut Map<String, Value>) -> Result<Self, Fault> {
        let Value::Array(turns) = turns else {
            return Err(bad_field(key, "a list of turns", &turns));
        };
        let turns = turns.into_iter().enumerate().map(|(index, turn)| parse_message(index, turn));
        let mut messages = turns.collect::<Result<Vec<_>, _>>()?;
        // Some sets keep the instructions beside the turns; dropping them would go unnoticed.
        match row.remove("system") {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) if text.trim().is_empty() => {}
            Some(Value::String(text)) if messages.iter().all(|turn| turn.role != Role::System) => {
                messages.insert(0, Message::new(Role::System, text));
            }
            Some(Value::String(_)) => {
                return Err(Fault::new(
                    RejectReason::BadField,
                    "`system` stands beside the turns and among them: only one can be meant",
                ));
            }
            Some(other) => return Err(bad_field("system", "a string", &other)),
        }
        let truncated = match row.get("truncated") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(truncated)) => *truncated,
            Some(other) => return Err(bad_field("truncated", "true or false", other)),
        };
        let tools = row.remove("tools").map(parse_tools).transpose()?.flatten();
        let chat = Self { messages, tools, truncated };
        chat.check_turns()?;
        Ok(chat)
    }

    /// Every user and assistant turn says something, and every assistant turn answers something.
    fn check_turns(&self) -> Result<(), Fault> {
        let mut answerable = false;
        let mut answers = 0_usize;
        for (index, message) in self.messages.iter().enumerate() {
            let silent = message.content.trim().is_empty();
            let may_be_silent = match message.role {
                Role::System | Role::Tool => true,
                Role::User => false,
                Role::Assistant => message.calls_tools(),
            };
            if silent && !may_be_silent {
                return Err(Fault::new(
                    RejectReason::EmptyContent,
                    format!("turn {index} ({}) says nothing", message.role.name()),
                ));
            }
            match message.role {
                Role::User | Role::Tool => answerable = true,
                Role::System => {}
                Role::Assistant if answerable => {
                    answerable = false;
                    answers += 1;
                }
                Role::Assistant => {
                    return Err(Fault::new(
                        RejectReason::NotAlternating,
                        format!(
                            "turn {index} is the assistant's, but no user or tool spoke before it"
                        ),
                    ));
                }
            }
        }
        if answers == 0 {
            return Err(Fault::new(
                RejectReason::NoAssistantTurn,
                format!("{} turns and none is the assistant's", self.messages.len()),
            ));
        }
        Ok(())
    }
}

fn parse_message(index: usize, turn: Value) -> Result<Message, Fault> {
    let Value::Object(mut turn) = turn else {
        return Err(bad_field(&format!("turn {index}"), "an object", &turn));
    };
    let role = match (turn.remove("role"), turn.remove("from")) {
        (Some(role), None) | (None, Some(role)) => role,
        (None, None) => {
            return Err(Fault::new(
                RejectReason::UnknownRole,
                format!("turn {index} has neither `role` nor `from`"),
            ));
        }
        (Some(_), Some(_)) => {
            return Err(Fault::new(
                RejectReason::BadField,
                format!("turn {index} has both `role` and `from`"),
            ));
        }
    };
    let role = match &role {
        Value::String(name) => Role::parse(name).ok_or_else(|| {
            Fault::new(
                RejectReason::UnknownRole,
                format!(
                    "turn {index} is by {:?}; known are system, user, assistant, tool and their \
                     other spellings human, gpt, model, developer, function, observation",
                    clip(name)
                ),
            )
        })?,
        other => return Err(bad_field(&format!("the role of turn {index}"), "a string", other)),
    };
    let content = match (turn.remove("content"), turn.remove("value")) {
        (Some(content), None) | (None, Some(content)) => content,
        (None, None) => Value::Null,
        (Some(_), Some(_)) => {
            return Err(Fault::new(
                RejectReason::BadField,
                format!("turn {index} has both `content` and `value`"),
            ));
        }
    };
    let content_is_null = content.is_null();
    let content = join_content(index, content)?;
    Ok(Message { role, content, content_is_null, extra: turn })
}

fn join_content(index: usize, content: Value) -> Result<String, Fault> {
    let parts = match content {
        Value::String(text) => return Ok(text),
        Value::Null => return Ok(String::new()),
        Value::Array(parts) => parts,
        other => {
            let field = format!("the content of turn {index}");
            return Err(bad_field(&field, "a string or a list of text parts", &other));
        }
    };
    let mut text = String::new();
    for part in parts {
        match &part {
            Value::String(piece) => text.push_str(piece),
            Value::Object(part) => {
                match (part.get("type").and_then(Value::as_str), part.get("text")) {
                    (None | Some("text"), Some(Value::String(piece))) => text.push_str(piece),
                    (kind, _) => {
                        return Err(Fault::new(
                            RejectReason::UnsupportedContent,
                            format!(
                                "turn {index} has a part of type {:?}: only text is understood",
                                kind.map_or("(none)".into(), clip)
                            ),
                        ));
                    }
                }
            }
            other => {
                return Err(bad_field(&format!("a part of turn {index}"), "an object", other));
            }
        }
    }
    Ok(text)
}

/// Tools come as a list or as that list in a JSON string; both are common.
fn parse_tools(tools: Value) -> Result<Option<Value>, Fault> {
    let tools = match tools {
        Value::String(text) if text.trim().is_empty() => return Ok(None),
        Value::String(text) => {
            let tools = serde_json::from_str(&text).map_err(|error| {
                Fault::new(
                    RejectReason::BadField,
                    format!("`tools` is a string, but not JSON: {error}"),
                )
            })?;
            require_kept(&text, [&tools])?;
            tools
        }
        other => other,
    };
    match tools {
        Value::Null => Ok(None),
        Value::Array(list) if list.is_empty() => Ok(None),
        Value::Array(_) => Ok(Some(tools)),
        other => Err(bad_field("tools", "a list, or a list in a JSON string", &other)),
    }
}

fn text_row(text: Value) -> Result<Body, Fault> {
    match text {
        Value::String(text) if text.trim().is_empty() => {
            Err(Fault::new(RejectReason::EmptyContent, "`text` is empty"))
        }
        Value::String(text) => Ok(Body::Text(text)),
        other => Err(bad_field("text", "a string", &other)),
    }
}

fn tokens_row(row: &Map<String, Value>) -> Result<Body, Fault> {
    let input_ids = integers("input_ids", row.get("input_ids"), u64::from(u32::MAX))?;
    let loss_mask = integers("loss_mask", row.get("loss_mask"), 1)?;
    if input_ids.is_empty() || input_ids.len() != loss_mask.len() {
        return Err(Fault::new(
            RejectReason::BadTokens,
            format!(
                "{} input_ids and {} loss_mask values: equally many are expected, at least one",
                input_ids.len(),
                loss_mask.len()
            ),
        ));
    }
    let narrow = |value: &u64| u32::try_from(*value).unwrap_or(u32::MAX);
    Ok(Body::Tokens {
        input_ids: input_ids.iter().map(narrow).collect(),
        loss_mask: loss_mask.iter().map(|&value| u8::from(value == 1)).collect(),
    })
}

fn integers(key: &str, list: Option<&Value>, largest: u64) -> Result<Vec<u64>, Fault> {
    let fault = |detail: String| Fault::new(RejectReason::BadTokens, detail);
    let Some(Value::Array(list)) = list else {
        return Err(fault(format!("`{key}` has to be a list of integers")));
    };
    list.iter()
        .enumerate()
        .map(|(index, value)| {
            let integer = match value {
                Value::Bool(flag) if largest == 1 => Some(u64::from(*flag)),
                other => other.as_u64(),
            };
            integer.filter(|&integer| integer <= largest).ok_or_else(|| {
                let shown = clip(&value.to_string());
                fault(format!(
                    "{key}[{index}] is {shown}; integers from 0 to {largest} are expected"
                ))
            })
        })
        .collect()
}

fn bad_field(field: &str, expected: &str, got: &Value) -> Fault {
    Fault::new(RejectReason::BadField, format!("{field} has to be {expected}, not {}", kind(got)))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Input quoted in an error is cut, so that a hostile line cannot flood the log.
fn clip(text: &str) -> String {
    text.chars().take(40).collect()
}
