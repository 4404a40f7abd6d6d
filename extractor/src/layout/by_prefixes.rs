//! The way to lay out a chat whose template transforms contents: what is rendered up to a turn has
//! to be a prefix of the whole. Contents cannot be told apart, so none may hold special text.

use super::{Answer, Layout, Layouter, THOUGHTS, ascending, common_prefix, tokenizer_fault};
use crate::conversation::{Chat, Role};
use crate::reject::{Fault, RejectReason};

impl Layouter<'_> {
    pub(super) fn by_prefixes(&self, chat: &Chat, plain: String) -> Result<Layout, Fault> {
        let mut answers = Vec::new();
        for (turn, message) in chat.messages.iter().enumerate() {
            let answer = message.role == Role::Assistant;
            let thoughts = THOUGHTS.iter().filter_map(|key| message.extra.get(*key)?.as_str());
            for text in thoughts.chain([message.content.as_str()]) {
                if self.special_in(text, answer)?.is_some() {
                    return Err(unclear(turn, "contents, and this one holds special tokens' text"));
                }
            }
            if !answer {
                continue;
            }
            let whole = self.render(chat, chat.messages.get(..=turn).unwrap_or_default(), false)?;
            let start = self.start_of_turn(chat, turn, &whole)?;
            let start = start.filter(|_| plain.starts_with(&whole));
            let start = start.ok_or_else(|| unclear(turn, "earlier turns as the chat grows"))?;
            answers.push(self.answer_from(start, &whole)?);
        }
        if !ascending(answers.iter().map(|answer| &answer.range)) {
            return Err(unclear(0, "the order of turns"));
        }
        Ok(Layout { text: plain, contents: Vec::new(), answers })
    }

    /// Where the model's own text begins in `whole`, which ends with the turn.
    fn start_of_turn(&self, chat: &Chat, turn: usize, whole: &str) -> Result<Option<usize>, Fault> {
        let earlier = chat.messages.get(..turn).unwrap_or_default();
        let prompt = self.render(chat, earlier, true)?;
        if whole.starts_with(&prompt) {
            return Ok(Some(prompt.len()));
        }
        // History may keep only a part of the prompt, up to one of its special tokens.
        let before = self.render(chat, earlier, false)?;
        let (Some(header), Some(turn_text)) =
            (prompt.strip_prefix(&before), whole.strip_prefix(&before))
        else {
            return Ok(None);
        };
        let kept = common_prefix(header, turn_text);
        let specials = self.tokenizer.special_text(header).map_err(tokenizer_fault)?;
        let parts = specials.iter().map(|token| token.start).rfind(|&start| start <= kept);
        Ok(parts.filter(|&start| start > 0).map(|start| before.len() + start))
    }

    /// The answer that runs from `start` to the end of `whole`.
    fn answer_from(&self, start: usize, whole: &str) -> Result<Answer, Fault> {
        let tail = whole.get(start..).unwrap_or_default();
        let end = self.end_marker(tail, tail.len())?;
        let specials = self.tokenizer.special_text(tail).map_err(tokenizer_fault)?;
        let marker = specials.iter().find(|token| token.end == end);
        let content_end = start + marker.map_or(end, |token| token.start);
        Ok(Answer { range: start..start + end, content_end })
    }
}

fn unclear(turn: usize, what: &str) -> Fault {
    Fault::new(
        RejectReason::BoundaryUnclear,
        format!(
            "turn {turn}: the chat template changes {what}, so the answer's place is uncertain"
        ),
    )
}
