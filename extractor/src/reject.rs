//! Why an input line does not become a sample. A reject is data, not an error: the run goes on.
//! Knows nothing of how lines are read or encoded.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

/// Where an input line stands.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source {
    /// The file as it was named by the user.
    pub file: Arc<Path>,
    /// 1-based line number; blank lines count.
    pub line: u64,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file.display(), self.line)
    }
}

/// One input line that does not become a sample, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reject {
    /// The line.
    pub source: Source,
    /// The kind of fault; its name is stable.
    pub reason: RejectReason,
    /// What was expected and what came, for people.
    pub detail: String,
}

impl fmt::Display for Reject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.source, self.reason, self.detail)
    }
}

/// A fault found in a line before it is tied to its file and line number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The kind of fault.
    pub reason: RejectReason,
    /// What was expected and what came.
    pub detail: String,
}

impl Fault {
    /// A fault with its explanation.
    pub fn new(reason: RejectReason, detail: impl Into<String>) -> Self {
        Self { reason, detail: detail.into() }
    }

    /// Names the line the fault was found in.
    pub fn at(self, source: Source) -> Reject {
        Reject { source, reason: self.reason, detail: self.detail }
    }
}

macro_rules! reject_reasons {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// The kinds of fault. The names are part of the manifest and do not change.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
        #[serde(rename_all = "snake_case")]
        pub enum RejectReason { $($(#[$doc])* $variant,)* }

        impl RejectReason {
            /// Every reason, in the order of the stages that find them.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The stable snake_case name.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}

reject_reasons! {
    /// The line is longer than the reader's limit.
    LineTooLong = "line_too_long",
    /// The line is not UTF-8.
    NotUtf8 = "not_utf8",
    /// Brackets nest deeper than the reader's limit.
    JsonTooDeep = "json_too_deep",
    /// The line is not JSON.
    BadJson = "bad_json",
    /// The line is JSON, but not an object.
    NotAnObject = "not_an_object",
    /// None of `messages`, `conversations`, `text`, `input_ids`.
    NoConversation = "no_conversation",
    /// More than one of `messages`, `conversations`, `text`, `input_ids`.
    AmbiguousConversation = "ambiguous_conversation",
    /// A known key holds a value of the wrong type.
    BadField = "bad_field",
    /// An integer for the chat template that 64 bits do not hold.
    IntegerTooLarge = "integer_too_large",
    /// A role outside the closed set.
    UnknownRole = "unknown_role",
    /// A content part that is not text (image, audio...).
    UnsupportedContent = "unsupported_content",
    /// A user or assistant turn without text.
    EmptyContent = "empty_content",
    /// Nothing to train on: no turn of the assistant.
    NoAssistantTurn = "no_assistant_turn",
    /// An assistant turn that answers nothing: it comes first, or follows another one.
    NotAlternating = "not_alternating",
    /// `input_ids` or `loss_mask` malformed or of different length.
    BadTokens = "bad_tokens",
    /// A token id that the model does not have.
    IdOutOfVocab = "id_out_of_vocab",
    /// The target has no chat template, so turns cannot be laid out.
    NoTemplate = "no_template",
    /// The chat template refused the conversation or ran out of its limits.
    TemplateError = "template_error",
    /// So many turns that finding the answers in them takes too long.
    TooManyTurns = "too_many_turns",
    /// It cannot be told which characters of the rendered text are the answer.
    BoundaryUnclear = "boundary_unclear",
    /// The chat template writes nothing of what an assistant's turn says or calls.
    EmptyAnswer = "empty_answer",
    /// Text of a special token in a place whose origin cannot be told (tools, tool calls, names).
    SpecialTokenText = "special_token_text",
    /// The tokenizer refused the text.
    TokenizerError = "tokenizer_error",
    /// More tokens than allowed, and the policy is to reject.
    Overlong = "overlong",
    /// The loss mask is all zero.
    NothingTrainable = "nothing_trainable",
    /// The loss mask is all one, though the line is not a `text` row.
    EverythingTrainable = "everything_trainable",
    /// Fewer trainable tokens than the limit.
    TooFewTrainable = "too_few_trainable",
    /// A file to import is no finished safetensors file.
    BadFile = "bad_file",
    /// The states of a file to import are not layers x [tokens, hidden] of this model.
    BadStates = "bad_states",
    /// The states of a file to import have NaN or infinite values.
    NonFinite = "non_finite",
    /// A file to import has no loss mask, and no prompt has its token ids.
    NoLossMask = "no_loss_mask",
    /// The target died each time the sample was in its batch.
    TargetCrash = "target_crash",
    /// The sample alone needs more memory than the target has.
    OutOfMemory = "out_of_memory",
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_equal_the_serialised_form() {
        let mut seen = std::collections::BTreeSet::new();
        for reason in RejectReason::ALL {
            assert!(seen.insert(reason.name()), "{reason} twice");
            assert_eq!(serde_json::to_value(reason).unwrap(), reason.name());
            assert_eq!(format!("{reason:<30}|").find('|'), Some(30), "columns of `extractor plan`");
        }
    }
}
