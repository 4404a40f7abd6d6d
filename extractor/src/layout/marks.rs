//! Marks that stand for message contents in a rendering, and how the marked rendering maps to the
//! plain one. Knows nothing of turns' boundaries.

use std::ops::Range;

use serde_json::Value;

use super::THOUGHTS;
use crate::conversation::{Chat, Message};

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

/// The chat with every content replaced by a mark.
pub(super) struct Marked {
    pub(super) messages: Vec<Message>,
    /// For each mark: which turn, and the text it stands for.
    slots: Vec<(usize, String)>,
}

impl Marked {
    /// `None` when there are more contents than marks.
    pub(super) fn new(chat: &Chat) -> Option<Self> {
        let mut marked = Self { messages: Vec::with_capacity(chat.messages.len()), slots: vec![] };
        for (turn, message) in chat.messages.iter().enumerate() {
            let mut copy = message.clone();
            // Templates ask whether a turn that calls tools says anything too.
            if !(message.content.is_empty() && message.calls_tools()) {
                copy.content = marked.add(turn, &message.content)?;
            }
            for key in THOUGHTS {
                if let Some(Value::String(text)) = copy.extra.get_mut(key)
                    && !text.is_empty()
                {
                    *text = marked.add(turn, text)?;
                }
            }
            marked.messages.push(copy);
        }
        Some(marked)
    }

    fn add(&mut self, turn: usize, text: &str) -> Option<String> {
        let slot = self.slots.len();
        let mark = u32::try_from(slot).ok().filter(|_| slot < MARKS)?;
        self.slots.push((turn, text.to_owned()));
        char::from_u32(FIRST_MARK + mark).map(String::from)
    }

    /// The turn whose content a mark stands for.
    pub(super) fn turn_of(&self, slot: usize) -> usize {
        self.slots.get(slot).map_or(usize::MAX, |slot| slot.0)
    }

    /// Where each mark's content stands in the plain rendering. `None` when that is not the marked
    /// one with contents, whole or trimmed, put in.
    pub(super) fn match_plain(
        &self,
        rendered: &str,
        marks: &[Mark],
        plain: &str,
    ) -> Option<Vec<Range<usize>>> {
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
        (at == plain.len()).then_some(places)
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

/// A byte position of the marked rendering, not inside a mark, in the plain one.
pub(super) fn to_plain(position: usize, marks: &[Mark], places: &[Range<usize>]) -> usize {
    let passed = marks.partition_point(|mark| mark.end <= position);
    match passed.checked_sub(1).and_then(|last| Some((marks.get(last)?, places.get(last)?))) {
        Some((mark, place)) => place.end + position - mark.end,
        None => position,
    }
}
