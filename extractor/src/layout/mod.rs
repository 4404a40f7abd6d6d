//! Which characters of a rendered chat are whose: where contents stand and where each answer of
//! the assistant begins and ends. Found by rendering, never by a pattern: contents are replaced
//! by marks, and what the template writes around a mark is its own. Knows nothing of token ids.

mod by_marks;
mod by_prefixes;
mod marks;

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ops::Range;

use serde_json::Value;

use crate::conversation::{Chat, Message};
use crate::reject::{Fault, RejectReason};
use crate::template::{ChatTemplate, TemplateError};
use crate::tokenizer::{Tokenizer, TokenizerError};
use marks::{Marked, is_mark};

/// Keys of a message besides `content` that hold running text.
const THOUGHTS: [&str; 2] = ["reasoning_content", "reasoning"];

/// A rendered chat. All ranges are byte ranges of `text`, ascending and apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// What the template wrote.
    pub text: String,
    /// Where message contents stand.
    pub contents: Vec<Range<usize>>,
    /// The assistant's turns, each from the end of its prompt to the end of its end marker.
    pub answers: Vec<Answer>,
}

/// One turn of the assistant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// From the first character the model itself writes to the end of its end marker.
    pub range: Range<usize>,
    /// Where its content ends, before the end marker.
    pub content_end: usize,
}

/// Most messages that laying out one chat may render, each once for every rendering it is in: a
/// template pays fuel for each rendering alone, and there are two of each answer's history.
const MAX_RENDERED_MESSAGES: usize = 1 << 21;
/// Bytes of rendered text that count as a message.
const BYTES_A_MESSAGE: usize = 1024;

/// What laying out one chat needs besides it.
#[derive(Debug)]
pub(crate) struct Layouter<'a> {
    pub(crate) template: &'a ChatTemplate,
    pub(crate) tokenizer: &'a Tokenizer,
    /// Special tokens whose text in an answer is meant as such (`<think>`).
    pub(crate) answer_specials: &'a [String],
    /// Special tokens that end a turn.
    pub(crate) stop_ids: &'a BTreeSet<u32>,
    /// Messages rendered so far, against [`MAX_RENDERED_MESSAGES`].
    pub(crate) rendered: Cell<usize>,
}

impl Layouter<'_> {
    /// Renders the chat and finds its parts. With `generation_prompt` the text ends where the
    /// assistant's next turn begins.
    pub(crate) fn lay_out(&self, chat: &Chat, generation_prompt: bool) -> Result<Layout, Fault> {
        self.refuse_special_text_elsewhere(chat)?;
        let plain = self.render(chat, &chat.messages, generation_prompt)?;
        let silent = |turn: &Message| turn.content.is_empty() && turn.calls_tools();
        let attempts: &[bool] =
            if chat.messages.iter().any(silent) { &[true, false] } else { &[true] };
        for &mark_silence in attempts {
            let marked = Marked::new(chat, self.answer_specials, mark_silence);
            if let Some(marked) = marked.filter(|_| !plain.chars().any(is_mark))
                && let Some(layout) = self.by_marks(chat, &marked, &plain, generation_prompt)?
            {
                return Ok(layout);
            }
        }
        self.by_prefixes(chat, plain)
    }

    fn render(
        &self,
        chat: &Chat,
        messages: &[Message],
        generation_prompt: bool,
    ) -> Result<String, Fault> {
        let rendered = self.try_render(chat, messages, generation_prompt)?;
        rendered.map_err(|error| Fault::new(RejectReason::TemplateError, error.to_string()))
    }

    /// What the template says of these messages; a fault is that the chat has too many.
    fn try_render(
        &self,
        chat: &Chat,
        messages: &[Message],
        generation_prompt: bool,
    ) -> Result<Result<String, TemplateError>, Fault> {
        let rendered = self.template.render(messages, chat.tools.as_ref(), generation_prompt);
        let bytes = rendered.as_ref().map_or(0, String::len);
        let so_far = self.rendered.get() + messages.len() + bytes / BYTES_A_MESSAGE;
        self.rendered.set(so_far);
        match so_far > MAX_RENDERED_MESSAGES {
            true => Err(Fault::new(
                RejectReason::TooManyTurns,
                format!(
                    "{} messages: finding the answers takes the chat template over \
                     {MAX_RENDERED_MESSAGES} of them; cut the conversation into parts",
                    chat.messages.len()
                ),
            )),
            false => Ok(rendered),
        }
    }

    /// Tools, tool calls and names reach the text in ways that cannot be followed, so text of
    /// special tokens in them could pass for the template's own.
    fn refuse_special_text_elsewhere(&self, chat: &Chat) -> Result<(), Fault> {
        let mut elsewhere = Vec::new();
        for message in &chat.messages {
            let others = message.extra.iter().filter(|(key, _)| !THOUGHTS.contains(&key.as_str()));
            others.for_each(|(_, value)| strings_of(value, &mut elsewhere));
        }
        chat.tools.iter().for_each(|tools| strings_of(tools, &mut elsewhere));
        for text in elsewhere {
            if let Some(name) = self.special_in(text, false)? {
                return Err(Fault::new(
                    RejectReason::SpecialTokenText,
                    format!("{name} stands in tools, tool calls or other keys of a message"),
                ));
            }
        }
        Ok(())
    }

    /// The first special token whose text stands in `text` and is not meant as such.
    fn special_in<'t>(&self, text: &'t str, answer: bool) -> Result<Option<&'t str>, Fault> {
        let found = self.tokenizer.special_text(text).map_err(tokenizer_fault)?;
        Ok(found
            .iter()
            .filter_map(|token| text.get(token.start..token.end))
            .find(|name| !(answer && self.answer_specials.iter().any(|allowed| allowed == name))))
    }

    /// Length of the end marker in `tail`, of which `limit` bytes belong to the turn: up to the
    /// first token that stops generation, or else the last special token (`<|im_end|>` without the
    /// line break that templates put behind it).
    fn end_marker(&self, tail: &str, limit: usize) -> Result<usize, Fault> {
        let specials = self.tokenizer.special_text(tail).map_err(tokenizer_fault)?;
        // A limit inside a special token means that the texts part before that token.
        let straddled = specials.iter().find(|token| token.start < limit && limit < token.end);
        let limit = straddled.map_or(limit, |token| token.start);
        let inside = specials.partition_point(|token| token.end <= limit);
        let inside = specials.get(..inside).unwrap_or_default();
        let stop = inside.iter().find(|token| self.stop_ids.contains(&token.id));
        Ok(stop.or_else(|| inside.last()).map_or(limit, |token| token.end))
    }
}

/// Bytes that both texts begin with, whole characters only.
fn common_prefix(left: &str, right: &str) -> usize {
    let pairs = left.chars().zip(right.chars());
    pairs.take_while(|(l, r)| l == r).map(|(l, _)| l.len_utf8()).sum()
}

fn ascending<'a>(ranges: impl Iterator<Item = &'a Range<usize>>) -> bool {
    let mut end = 0;
    ranges.into_iter().all(|range| {
        let fits = range.start >= end && range.end >= range.start;
        end = range.end;
        fits
    })
}

fn strings_of<'a>(value: &'a Value, into: &mut Vec<&'a str>) {
    match value {
        Value::String(text) => into.push(text),
        Value::Array(list) => list.iter().for_each(|item| strings_of(item, into)),
        Value::Object(map) => map.iter().for_each(|(key, item)| {
            into.push(key);
            strings_of(item, into);
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn tokenizer_fault(error: TokenizerError) -> Fault {
    Fault::new(RejectReason::TokenizerError, error.to_string())
}
