//! The usual way to lay a chat out: render it with marks in place of contents. Knows nothing of
//! templates that do more with contents than place them.

use super::marks::{Mark, Marked, Matched, marks_of};
use super::{Answer, Layout, Layouter, ascending, common_prefix};
use crate::conversation::{Chat, Role};
use crate::reject::Fault;

impl Layouter<'_> {
    /// `None` when the template does more with contents than place them.
    pub(super) fn by_marks(
        &self,
        chat: &Chat,
        marked: &Marked,
        plain: &str,
        generation_prompt: bool,
    ) -> Result<Option<Layout>, Fault> {
        let Ok(text) = self.try_render(chat, &marked.messages, generation_prompt)? else {
            return Ok(None);
        };
        let Some(matched) = marked.match_plain(text, plain) else { return Ok(None) };
        let mut answers = Vec::new();
        for (turn, message) in chat.messages.iter().enumerate() {
            if message.role == Role::Assistant {
                let Some(answer) = self.answer(chat, &matched, turn)? else { return Ok(None) };
                answers.push(answer);
            }
        }
        if !ascending(answers.iter().map(|answer| &answer.range)) {
            return Ok(None);
        }
        Ok(Some(Layout { text: plain.to_owned(), contents: matched.places, answers }))
    }

    /// Where the answer of one turn stands in the plain text.
    fn answer(
        &self,
        chat: &Chat,
        matched: &Matched<'_>,
        turn: usize,
    ) -> Result<Option<Answer>, Fault> {
        let (marked, marks) = (matched.marked, &matched.marks);
        let of_turn = |mark: &&Mark| marked.turn_of(mark.slot) == turn;
        let Some(first) = marks.iter().find(of_turn) else { return Ok(None) };
        let Some(last) = marks.iter().rfind(of_turn) else { return Ok(None) };
        let before = marks.iter().rfind(|mark| mark.end <= first.start);
        if before.is_some_and(|mark| marked.turn_of(mark.slot) > turn) {
            return Ok(None);
        }
        let earlier = marked.messages.get(..turn).unwrap_or_default();
        let so_far = marked.messages.get(..=turn).unwrap_or_default();
        let Ok(prompt) = self.try_render(chat, earlier, true)? else { return Ok(None) };
        let Ok(turn_end) = self.try_render(chat, so_far, false)? else { return Ok(None) };

        let (prompt_slot, prompt_tail) = tail(&prompt);
        if prompt_slot != before.map(|mark| mark.slot) {
            return Ok(None);
        }
        let from = before.map_or(0, |mark| mark.end);
        let content_end = matched.to_plain(last.end);
        let Some(start) = start_of_answer(matched, from, first.start, prompt_tail) else {
            return Ok(None);
        };

        let (end_slot, end_tail) = tail(&turn_end);
        if end_slot != Some(last.slot) {
            return Ok(None);
        }
        let rest = matched.text.get(last.end..).unwrap_or_default();
        let marker = self.end_marker(rest, common_prefix(rest, end_tail))?;
        let end = matched.to_plain(last.end + marker);
        Ok((start <= content_end).then_some(Answer { range: start..end, content_end }))
    }
}

/// Where the model's own text begins, in the plain text. `from` is the end of the last content
/// before the turn and `content` the start of the turn's own, both in the marked text.
fn start_of_answer(
    matched: &Matched<'_>,
    from: usize,
    content: usize,
    prompt_tail: &str,
) -> Option<usize> {
    // The whole prompt may reach into the content, when that brings the think tag itself.
    let from_plain = matched.to_plain(from);
    if matched.plain.get(from_plain..)?.starts_with(prompt_tail) {
        return Some(from_plain + prompt_tail.len());
    }
    // History may keep only a part of the prompt (templates differ in think tags).
    let header = matched.text.get(from..content)?;
    let kept = common_prefix(header, prompt_tail);
    (kept == header.len()).then(|| matched.to_plain(from + kept))
}

/// The last mark of a rendering and the text behind it.
fn tail(rendered: &str) -> (Option<usize>, &str) {
    match marks_of(rendered).last() {
        Some(mark) => (Some(mark.slot), rendered.get(mark.end..).unwrap_or_default()),
        None => (None, rendered),
    }
}
