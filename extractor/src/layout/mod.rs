//! Which characters of a rendered chat are whose: where contents stand and where each answer of
//! the assistant begins and ends. Found by rendering, never by a pattern: contents are replaced
//! by marks, and what the template writes around a mark is its own. Knows nothing of token ids.

mod marks;

use std::ops::Range;

use serde_json::Value;

use crate::conversation::{Chat, Message, Role};
use crate::reject::{Fault, RejectReason};
use crate::template::{ChatTemplate, TemplateError};
use crate::tokenizer::{Tokenizer, TokenizerError};
use marks::{Mark, Marked, is_mark, marks_of, to_plain};

/// Keys of a message besides `content` that hold running text.
const THOUGHTS: [&str; 2] = ["reasoning_content", "reasoning"];

/// A rendered chat. All ranges are byte ranges of `text`, ascending and apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// What the template wrote.
    pub text: String,
    /// Where message contents stand; `true` for the assistant's.
    pub contents: Vec<(Range<usize>, bool)>,
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

/// What laying out needs besides the chat.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layouter<'a> {
    pub(crate) template: &'a ChatTemplate,
    pub(crate) tokenizer: &'a Tokenizer,
    /// Special tokens whose text in an answer is meant as such (`<think>`).
    pub(crate) answer_specials: &'a [String],
}

impl Layouter<'_> {
    /// Renders the chat and finds its parts. With `generation_prompt` the text ends where the
    /// assistant's next turn begins.
    pub(crate) fn lay_out(&self, chat: &Chat, generation_prompt: bool) -> Result<Layout, Fault> {
        self.refuse_special_text_elsewhere(chat)?;
        let plain = self.render(chat, &chat.messages, generation_prompt)?;
        match self.by_marks(chat, &plain, generation_prompt)? {
            Some(layout) => Ok(layout),
            None => self.by_prefixes(chat, plain),
        }
    }

    fn render(
        &self,
        chat: &Chat,
        messages: &[Message],
        generation_prompt: bool,
    ) -> Result<String, Fault> {
        self.try_render(chat, messages, generation_prompt)
            .map_err(|error| Fault::new(RejectReason::TemplateError, error.to_string()))
    }

    fn try_render(
        &self,
        chat: &Chat,
        messages: &[Message],
        generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        self.template.render(messages, chat.tools.as_ref(), generation_prompt)
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

    /// The usual way. `None` when the template does more with contents than place them.
    fn by_marks(
        &self,
        chat: &Chat,
        plain: &str,
        generation_prompt: bool,
    ) -> Result<Option<Layout>, Fault> {
        let Some(marked) = Marked::new(chat).filter(|_| !plain.chars().any(is_mark)) else {
            return Ok(None);
        };
        let Ok(rendered) = self.try_render(chat, &marked.messages, generation_prompt) else {
            return Ok(None);
        };
        let marks = marks_of(&rendered);
        let Some(places) = marked.match_plain(&rendered, &marks, plain) else { return Ok(None) };
        let mut answers = Vec::new();
        for (index, message) in chat.messages.iter().enumerate() {
            if message.role != Role::Assistant {
                continue;
            }
            let Some(answer) = self.answer_by_marks(chat, &marked, &rendered, &marks, index)?
            else {
                return Ok(None);
            };
            answers.push(Answer {
                range: to_plain(answer.range.start, &marks, &places)
                    ..to_plain(answer.range.end, &marks, &places),
                content_end: to_plain(answer.content_end, &marks, &places),
            });
        }
        if !ascending(answers.iter().map(|answer| &answer.range)) {
            return Ok(None);
        }
        let contents = marks.iter().zip(&places).map(|(mark, place)| {
            let role = chat.messages.get(marked.turn_of(mark.slot)).map(|turn| turn.role);
            (place.clone(), role == Some(Role::Assistant))
        });
        Ok(Some(Layout { text: plain.to_owned(), contents: contents.collect(), answers }))
    }

    /// Where the answer of one turn stands in the marked rendering.
    fn answer_by_marks(
        &self,
        chat: &Chat,
        marked: &Marked,
        rendered: &str,
        marks: &[Mark],
        turn: usize,
    ) -> Result<Option<Answer>, Fault> {
        let of_turn = |mark: &&Mark| marked.turn_of(mark.slot) == turn;
        let Some(first) = marks.iter().position(|mark| of_turn(&mark)) else { return Ok(None) };
        let Some(last) = marks.iter().rfind(of_turn) else { return Ok(None) };
        let before = first.checked_sub(1).and_then(|index| marks.get(index));
        if before.is_some_and(|mark| marked.turn_of(mark.slot) > turn) {
            return Ok(None);
        }
        let (Some(earlier), Some(so_far)) =
            (marked.messages.get(..turn), marked.messages.get(..=turn))
        else {
            return Ok(None);
        };
        let Ok(prompt) = self.try_render(chat, earlier, true) else { return Ok(None) };
        let Ok(turn_end) = self.try_render(chat, so_far, false) else { return Ok(None) };

        // What the prompt writes after the last content is what stands before the answer, or the
        // part of it that history keeps (templates differ in think tags).
        let (prompt_slot, prompt_tail) = tail(&prompt);
        if prompt_slot != before.map(|mark| mark.slot) {
            return Ok(None);
        }
        let from = before.map_or(0, |mark| mark.end);
        let start = marks.get(first).map_or(from, |mark| mark.start);
        let header = rendered.get(from..start).unwrap_or_default();
        let shared = common_prefix(header, prompt_tail);
        if shared != prompt_tail.len() && shared != header.len() {
            return Ok(None);
        }

        let (end_slot, end_tail) = tail(&turn_end);
        if end_slot != Some(last.slot) {
            return Ok(None);
        }
        let rest = rendered.get(last.end..).unwrap_or_default();
        let marker = self.end_marker(rest, common_prefix(rest, end_tail))?;
        Ok(Some(Answer { range: from + shared..last.end + marker, content_end: last.end }))
    }

    /// Length of the end marker in `tail`, of which `limit` bytes belong to the turn: up to its
    /// last special token (`<|im_end|>` without the line break templates put behind it).
    fn end_marker(&self, tail: &str, limit: usize) -> Result<usize, Fault> {
        let specials = self.tokenizer.special_text(tail).map_err(tokenizer_fault)?;
        // A limit inside a special token means that the texts part before that token.
        let straddled = specials.iter().find(|token| token.start < limit && limit < token.end);
        let limit = straddled.map_or(limit, |token| token.start);
        let last = specials.iter().rfind(|token| token.end <= limit);
        Ok(last.map_or(limit, |token| token.end))
    }

    /// The way for templates that transform contents: what is rendered before a turn, and up to
    /// its end, has to be a prefix of the whole.
    fn by_prefixes(&self, chat: &Chat, plain: String) -> Result<Layout, Fault> {
        let unclear = |turn: usize, what: &str| {
            Fault::new(
                RejectReason::BoundaryUnclear,
                format!(
                    "turn {turn}: the chat template changes {what}, so the answer's place in \
                         the text is not certain"
                ),
            )
        };
        let mut answers = Vec::new();
        for (turn, message) in chat.messages.iter().enumerate() {
            let answer = message.role == Role::Assistant;
            let thoughts = THOUGHTS.iter().filter_map(|key| message.extra.get(*key)?.as_str());
            for text in thoughts.chain([message.content.as_str()]) {
                if self.special_in(text, answer)?.is_some() {
                    return Err(unclear(turn, "a content that holds text of special tokens"));
                }
            }
            if !answer {
                continue;
            }
            let prompt = self.render(chat, chat.messages.get(..turn).unwrap_or_default(), true)?;
            let whole = self.render(chat, chat.messages.get(..=turn).unwrap_or_default(), false)?;
            if !whole.starts_with(&prompt) || !plain.starts_with(&whole) {
                return Err(unclear(turn, "earlier turns as the chat grows"));
            }
            let tail = whole.get(prompt.len()..).unwrap_or_default();
            let end = prompt.len() + self.end_marker(tail, tail.len())?;
            let marker = self.tokenizer.special_text(tail).map_err(tokenizer_fault)?;
            let content_end = marker
                .last()
                .filter(|token| tail.get(token.end..).unwrap_or_default().trim().is_empty());
            let content_end = content_end.map_or(end, |token| prompt.len() + token.start);
            answers.push(Answer { range: prompt.len()..end, content_end });
        }
        if !ascending(answers.iter().map(|answer| &answer.range)) {
            return Err(unclear(0, "the order of turns"));
        }
        Ok(Layout { text: plain, contents: Vec::new(), answers })
    }
}

/// The last mark of a rendering and the text behind it.
fn tail(rendered: &str) -> (Option<usize>, &str) {
    match marks_of(rendered).last() {
        Some(mark) => (Some(mark.slot), rendered.get(mark.end..).unwrap_or_default()),
        None => (None, rendered),
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
