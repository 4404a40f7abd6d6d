//! Marks that stand for message contents in a rendering, and how the marked rendering maps to the
//! plain one. Knows nothing of turns' boundaries.

use std::ops::Range;

use serde_json::Value;

use super::THOUGHTS;
use crate::conversation::{Chat, Message, Role};

/// Marks are private-use characters of plane 15, one for each content.
const FIRST_MARK: u32 = 0xF0000;
const MARKS: usize = 0xFFFD;

/// A mark in a rendering: which content, and which bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) slot: usize,
    pub(super) start: usize,
    pub(super) end: usize,
}

/// A marked rendering and the plain one, place for place.
pub(super) struct Matched<'a> {
    pub(super) marked: &'a Marked,
    pub(super) plain: &'a str,
    /// The marked rendering.
    pub(super) text: String,
    /// Marks of `text`, left to right.
    pub(super) marks: Vec<Mark>,
    /// For each mark, where its content stands in `plain`.
    pub(super) places: Vec<Range<usize>>,
}

/// The chat with every content replaced by a mark.
pub(super) struct Marked {
    pub(super) messages: Vec<Message>,
    /// For each mark: which turn, and the text it stands for.
    slots: Vec<(usize, String)>,
}

impl Marked {
    /// Text of `answer_specials` in an answer stays as it is, so that templates see it and it
    /// counts as their own. With `mark_silence` an empty content is marked too, which shows where a
    /// turn that only calls tools stands, but misleads templates that ask whether it says
    /// anything. `None` when there are more contents than marks.
    pub(super) fn new(chat: &Chat, answer_specials: &[String], mark_silence: bool) -> Option<Self> {
        let mut marked = Self { messages: Vec::with_capacity(chat.messages.len()), slots: vec![] };
        for (turn, message) in chat.messages.iter().enumerate() {
            let kept = if message.role == Role::Assistant { answer_specials } else { &[] };
            let mut copy = message.clone();
            if mark_silence || !(message.content.is_empty() && message.calls_tools()) {
                copy.content = marked.add_parts(turn, &message.content, kept)?;
            }
            for key in THOUGHTS {
                if let Some(Value::String(text)) = copy.extra.get_mut(key)
                    && !text.is_empty()
                {
                    *text = marked.add_parts(turn, text, kept)?;
                }
            }
            marked.messages.push(copy);
        }
        Some(marked)
    }

    /// The text with all but the `kept` parts replaced by marks.
    fn add_parts(&mut self, turn: usize, text: &str, kept: &[String]) -> Option<String> {
        let mut marked = String::new();
        let mut from = 0;
        // Where each name stands next: text is searched once for each, however often they occur.
        let names = kept.iter().filter(|name| !name.is_empty());
        let mut next: Vec<_> = names.filter_map(|name| Some((text.find(name)?, name))).collect();
        while let Some(&(at, name)) =
            next.iter().min_by_key(|(at, name)| (*at, std::cmp::Reverse(name.len())))
        {
            let before = text.get(from..at)?;
            if !before.is_empty() {
                marked.push(self.add(turn, before)?);
            }
            marked.push_str(name);
            from = at + name.len();
            for (at, name) in &mut next {
                if *at < from {
                    *at = text.get(from..)?.find(name.as_str()).map_or(usize::MAX, |it| from + it);
                }
            }
            next.retain(|(at, _)| *at != usize::MAX);
        }
        let rest = text.get(from..)?;
        if !rest.is_empty() || text.is_empty() {
            marked.push(self.add(turn, rest)?);
        }
        Some(marked)
    }

    fn add(&mut self, turn: usize, text: &str) -> Option<char> {
        let slot = self.slots.len();
        let mark = u32::try_from(slot).ok().filter(|_| slot < MARKS)?;
        self.slots.push((turn, text.to_owned()));
        char::from_u32(FIRST_MARK + mark)
    }

    /// The turn whose content a mark stands for.
    pub(super) fn turn_of(&self, slot: usize) -> usize {
        self.slots.get(slot).map_or(usize::MAX, |slot| slot.0)
    }

    /// Where each mark's content stands in the plain rendering. `None` when that is not the marked
    /// one with contents, whole or trimmed, put in.
    pub(super) fn match_plain<'a>(&'a self, text: String, plain: &'a str) -> Option<Matched<'a>> {
        let (rendered, marks) = (text.as_str(), marks_of(&text));
        let mut places = Vec::with_capacity(marks.len());
        let mut at = marks.first().map_or(rendered.len(), |mark| mark.start);
        if plain.get(..at)? != rendered.get(..at)? {
            return None;
        }
        for (index, mark) in marks.iter().enumerate() {
            let next = marks.get(index + 1);
            let between = rendered.get(mark.end..next.map_or(rendered.len(), |mark| mark.start))?;
            let content = &self.slots.get(mark.slot)?.1;
            let rest = plain.get(at..)?;
            let length = readings(content).into_iter().find_map(|reading| {
                let behind = rest.strip_prefix(reading)?.strip_prefix(between)?;
                (next.is_some() || behind.is_empty()).then_some(reading.len())
            })?;
            places.push(at..at + length);
            at += length + between.len();
        }
        (at == plain.len()).then_some(Matched { marked: self, plain, text, marks, places })
    }
}

impl Matched<'_> {
    /// A byte position of the marked text, not inside a mark, in the plain text.
    pub(super) fn to_plain(&self, position: usize) -> usize {
        let passed = self.marks.partition_point(|mark| mark.end <= position);
        let last = passed.checked_sub(1);
        match last.and_then(|last| Some((self.marks.get(last)?, self.places.get(last)?))) {
            Some((mark, place)) => place.end + position - mark.end,
            None => position,
        }
    }
}

/// What templates make of a content, the likeliest first: itself, or trimmed in some way.
fn readings(content: &str) -> [&str; 7] {
    [
        content,
        content.trim(),
        content.trim_start(),
        content.trim_end(),
        content.trim_matches('\n'),
        content.trim_start_matches('\n'),
        content.trim_end_matches('\n'),
    ]
}

pub(super) fn is_mark(character: char) -> bool {
    slot_of(character).is_some()
}

fn slot_of(character: char) -> Option<usize> {
    let slot = u32::from(character).checked_sub(FIRST_MARK)?;
    usize::try_from(slot).ok().filter(|&slot| slot < MARKS)
}

/// The marks of a rendering, left to right.
pub(super) fn marks_of(rendered: &str) -> Vec<Mark> {
    let characters = rendered.char_indices();
    characters
        .filter_map(|(start, character)| {
            let slot = slot_of(character)?;
            Some(Mark { slot, start, end: start + character.len_utf8() })
        })
        .collect()
}
