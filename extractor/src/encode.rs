//! A conversation becomes token ids and a loss mask: the assistant's own tokens and their end
//! marker are trained, found from the boundaries of the rendering. Knows nothing of batches.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use shared::TokenSample;
use thiserror::Error;

use crate::conversation::{Body, Chat, Conversation, Message, Role};
use crate::layout::{Layout, Layouter};
use crate::reject::{Fault, Reject, RejectReason};
use crate::template::{ChatTemplate, TemplateError};
use crate::tokenizer::{SpecialText, Token, Tokenizer, TokenizerConfig, TokenizerError, stop_ids};

/// What happens to a sample with more than `max_tokens`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overlong {
    /// Its end is cut off.
    #[default]
    Truncate,
    /// It becomes a reject.
    Reject,
}

/// How conversations become samples. Every field can change the bytes of a data set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EncodeOptions {
    /// Longest sample, in tokens.
    pub max_tokens: usize,
    /// What happens to longer ones.
    pub overlong: Overlong,
    /// Samples with fewer trained tokens are rejected.
    pub min_trainable_tokens: usize,
    /// Train the last answer only.
    pub last_turn_only: bool,
    /// Accept chats and tokenised rows of which every token is trained.
    pub allow_all_trainable: bool,
    /// Special tokens whose text in an answer is meant as such, for instance `<think>`.
    pub answer_specials: Vec<String>,
    /// Variables for the chat template, for instance `thinking`.
    pub chat_template_kwargs: Map<String, Value>,
    /// Number of ids the model has; ids above are refused.
    pub vocab_size: Option<usize>,
}

impl Default for EncodeOptions {
    fn default() -> Self {
        Self {
            max_tokens: 4096,
            overlong: Overlong::Truncate,
            min_trainable_tokens: 1,
            last_turn_only: false,
            allow_all_trainable: false,
            answer_specials: Vec::new(),
            chat_template_kwargs: Map::new(),
            vocab_size: None,
        }
    }
}

/// Why a model's tokenizer or template cannot be used at all.
#[derive(Debug, Error)]
pub enum EncoderError {
    /// The tokenizer.
    #[error("loading the tokenizer")]
    Tokenizer(#[from] TokenizerError),
    /// The chat template.
    #[error("loading the chat template")]
    Template(#[from] TemplateError),
    /// Tokenizer and model do not belong together.
    #[error(
        "the tokenizer has {tokenizer} ids and the model {model}: ids above would have no \
         embedding; take both from one model directory"
    )]
    Vocabulary {
        /// Ids of the tokenizer.
        tokenizer: usize,
        /// Ids of the model.
        model: usize,
    },
    /// A name in `answer_specials` that the tokenizer does not know.
    #[error("answer_specials names {0:?}, which is no special token of this tokenizer")]
    UnknownSpecial(String),
}

impl EncoderError {
    /// Process exit code: 74 I/O, 65 bad data, 78 configuration.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Tokenizer(error) | Self::Template(TemplateError::Read(error)) => {
                error.exit_code()
            }
            Self::Template(_) | Self::Vocabulary { .. } => 65,
            Self::UnknownSpecial(_) => 78,
        }
    }
}

/// An encoded conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// Ids and mask.
    pub sample: TokenSample,
    /// Whether its end was cut off at `max_tokens`.
    pub truncated: bool,
}

/// Tokenizer, chat template and options of one target model.
#[derive(Debug)]
pub struct Encoder {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    stop_ids: BTreeSet<u32>,
    options: EncodeOptions,
}

impl Encoder {
    /// Reads tokenizer and template from a model directory. A model without a chat template can
    /// still encode `text` and tokenised rows.
    pub fn load(dir: &Path, options: EncodeOptions) -> Result<Self, EncoderError> {
        let mut encoder = Self::new(Tokenizer::load(dir)?, ChatTemplate::load(dir)?, options)?;
        let eos = TokenizerConfig::load(dir)?.named_tokens().remove("eos_token");
        let eos = eos.and_then(|name| encoder.tokenizer.special_id(&name));
        encoder.stop_ids = stop_ids(dir)?.into_iter().chain(eos).collect();
        Ok(encoder)
    }

    /// Joins the parts, checking that they fit one another.
    pub fn new(
        tokenizer: Tokenizer,
        mut template: Option<ChatTemplate>,
        options: EncodeOptions,
    ) -> Result<Self, EncoderError> {
        if let Some(model) = options.vocab_size.filter(|&size| tokenizer.vocab_size() > size) {
            return Err(EncoderError::Vocabulary { tokenizer: tokenizer.vocab_size(), model });
        }
        let is_unknown = |name: &&String| tokenizer.special_id(name).is_none();
        if let Some(name) = options.answer_specials.iter().find(is_unknown) {
            return Err(EncoderError::UnknownSpecial(name.clone()));
        }
        if let Some(template) = &mut template {
            template.set_variables(&options.chat_template_kwargs);
        }
        Ok(Self { tokenizer, template, stop_ids: BTreeSet::new(), options })
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Ids that end a turn: `eos_token_id` of generation_config.json and config.json (its
    /// `text_config` too), `eos_token` of tokenizer_config.json.
    pub fn stop_ids(&self) -> &BTreeSet<u32> {
        &self.stop_ids
    }

    /// A chat template did not end; what it makes of any conversation cannot be known any more.
    pub fn is_endless(&self) -> bool {
        self.template.as_ref().is_some_and(ChatTemplate::is_endless)
    }

    /// The options it was made with.
    pub fn options(&self) -> &EncodeOptions {
        &self.options
    }

    /// BLAKE3 over the tokenizer and the template's text. The options are not part of it.
    pub fn digest(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.tokenizer.digest());
        hasher.update(self.template.as_ref().map_or("", ChatTemplate::source).as_bytes());
        *hasher.finalize().as_bytes()
    }

    /// Ids and mask of a conversation, or why it cannot be used.
    pub fn encode(&self, conversation: &Conversation) -> Result<Encoded, Reject> {
        let encoded = match &conversation.body {
            Body::Chat(chat) => self.encode_chat(chat),
            Body::Text(text) => self.encode_text(text),
            Body::Tokens { input_ids, loss_mask } => {
                Ok((input_ids.clone(), loss_mask.clone(), false))
            }
        };
        encoded
            .and_then(|(ids, mask, whole)| self.finish(ids, mask, whole))
            .map_err(|fault| fault.at(conversation.source.clone()))
    }

    /// Ids of the chat up to where the assistant would speak next: a prompt for generation. Turns
    /// after the last one of a user or tool are left out.
    pub fn encode_prompt(&self, chat: &Chat) -> Result<Vec<u32>, Fault> {
        let asks = |role| matches!(role, Role::User | Role::Tool);
        let end = chat.messages.iter().rposition(|message| asks(message.role));
        let messages = chat.messages.get(..end.map_or(0, |last| last + 1)).unwrap_or_default();
        let prompt =
            Chat { messages: messages.to_vec(), tools: chat.tools.clone(), truncated: false };
        let layout = self.layouter()?.lay_out(&prompt, true)?;
        Ok(self.tokens_of(&layout)?.iter().map(|token| token.id).collect())
    }

    /// Renders a chat and says where contents and answers stand.
    pub fn lay_out(&self, chat: &Chat) -> Result<Layout, Fault> {
        self.layouter()?.lay_out(chat, false)
    }

    fn layouter(&self) -> Result<Layouter<'_>, Fault> {
        let template = self.template.as_ref().ok_or_else(|| {
            Fault::new(
                RejectReason::NoTemplate,
                "the model directory has no chat_template.jinja, and tokenizer_config.json no \
                 chat_template: only `text` and `input_ids` rows can be encoded",
            )
        })?;
        let answer_specials = &self.options.answer_specials;
        let (tokenizer, stop_ids) = (&self.tokenizer, &self.stop_ids);
        let rendered = Cell::new(0);
        Ok(Layouter { template, tokenizer, answer_specials, stop_ids, rendered })
    }

    fn encode_chat(&self, chat: &Chat) -> Result<(Vec<u32>, Vec<u8>, bool), Fault> {
        let layout = self.lay_out(chat)?;
        let mut tokens = self.tokens_of(&layout)?;
        let mut trained: Vec<Range<usize>> =
            layout.answers.iter().map(|answer| answer.range.clone()).collect();
        if let (true, Some(last), Some(range)) =
            (chat.truncated, layout.answers.last(), trained.last_mut())
        {
            range.end = last.content_end;
            let is_last_turn = chat.messages.last().is_some_and(|m| m.role == Role::Assistant);
            if is_last_turn {
                tokens.retain(|token| token.start < last.content_end);
            }
        }
        if self.options.last_turn_only {
            trained.drain(..trained.len().saturating_sub(1));
        }
        let end = match self.options.overlong {
            Overlong::Truncate => tokens.get(self.options.max_tokens).map(|token| token.start),
            Overlong::Reject => None,
        };
        trained.retain(|range| !range.is_empty() && end.is_none_or(|end| range.start < end));
        self.require_answers(chat, &layout, &trained)?;
        let mask = tokens.iter().map(|token| u8::from(starts_inside(token, &trained))).collect();
        Ok((tokens.iter().map(|token| token.id).collect(), mask, false))
    }

    /// Refuses a chat of whose `trained` answers one is empty: a template without a place for tool
    /// calls, say, leaves nothing but the end marker of a turn that only calls, and a draft would
    /// be taught to answer nothing.
    fn require_answers(
        &self,
        chat: &Chat,
        layout: &Layout,
        trained: &[Range<usize>],
    ) -> Result<(), Fault> {
        let is_answer = |(_, message): &(usize, &Message)| message.role == Role::Assistant;
        let turns = chat.messages.iter().enumerate().filter(is_answer);
        for ((turn, _), answer) in turns.zip(&layout.answers) {
            let is_trained = trained.iter().any(|range| range.start == answer.range.start);
            if is_trained && self.is_empty(layout, &answer.range)? {
                return Err(Fault::new(
                    RejectReason::EmptyAnswer,
                    format!(
                        "turn {turn}: the chat template writes nothing of what the assistant says \
                         or calls there, and an empty answer would be trained"
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Whether an answer is nothing but special tokens and white space. Text of special tokens in a
    /// content is text.
    fn is_empty(&self, layout: &Layout, answer: &Range<usize>) -> Result<bool, Fault> {
        let is_blank =
            |range: Range<usize>| layout.text.get(range).is_none_or(|text| text.trim().is_empty());
        let is_inside =
            |place: &&Range<usize>| place.start < answer.end && answer.start < place.end;
        if layout.contents.iter().filter(is_inside).any(|place| !is_blank(place.clone())) {
            return Ok(false);
        }
        let text = layout.text.get(answer.clone()).unwrap_or_default();
        let mut from = answer.start;
        for special in self.tokenizer.special_text(text).map_err(tokenizer_fault)? {
            if !is_blank(from..answer.start + special.start) {
                return Ok(false);
            }
            from = answer.start + special.end;
        }
        Ok(is_blank(from..answer.end))
    }

    fn tokens_of(&self, layout: &Layout) -> Result<Vec<Token>, Fault> {
        let ordinary: Vec<Range<usize>> =
            layout.contents.iter().filter(|range| !range.is_empty()).cloned().collect();
        self.tokenizer.encode_spans(&layout.text, &ordinary).map_err(tokenizer_fault)
    }

    /// A document, trained whole but for what the tokenizer puts before it.
    fn encode_text(&self, text: &str) -> Result<(Vec<u32>, Vec<u8>, bool), Fault> {
        let (prefix, suffix) = self.tokenizer.document_ends();
        let body = self.tokenizer.encode(text, SpecialText::Allowed).map_err(tokenizer_fault)?;
        let mask = std::iter::repeat_n(0, prefix.len())
            .chain(std::iter::repeat_n(1, body.len() + suffix.len()));
        Ok(([prefix, &body, suffix].concat(), mask.collect(), true))
    }

    fn finish(
        &self,
        mut ids: Vec<u32>,
        mut mask: Vec<u8>,
        may_train_all: bool,
    ) -> Result<Encoded, Fault> {
        let options = &self.options;
        let vocab_size = options.vocab_size.unwrap_or_else(|| self.tokenizer.vocab_size());
        if let Some(at) = ids.iter().position(|&id| id as usize >= vocab_size) {
            let id = ids.get(at).copied().unwrap_or_default();
            return Err(Fault::new(
                RejectReason::IdOutOfVocab,
                format!("input_ids[{at}] is {id}; the model has {vocab_size} ids"),
            ));
        }
        let truncated = ids.len() > options.max_tokens;
        if truncated && options.overlong == Overlong::Reject {
            return Err(Fault::new(
                RejectReason::Overlong,
                format!("{} tokens; at most {} are wanted", ids.len(), options.max_tokens),
            ));
        }
        if !may_train_all
            && !options.allow_all_trainable
            && mask.iter().all(|&trained| trained == 1)
        {
            return Err(Fault::new(
                RejectReason::EverythingTrainable,
                format!(
                    "all {} tokens are marked as the assistant's: a prompt is expected before an \
                     answer (allow_all_trainable accepts it)",
                    ids.len()
                ),
            ));
        }
        let whole = ids.len();
        let looked_at = match truncated {
            true => format!("the first {} of {whole} tokens", options.max_tokens),
            false => format!("{whole} tokens"),
        };
        ids.truncate(options.max_tokens);
        mask.truncate(options.max_tokens);
        let sample = TokenSample::new(ids, mask)
            .map_err(|error| Fault::new(RejectReason::BadTokens, error.to_string()))?;
        match sample.trainable_tokens() {
            0 => Err(Fault::new(
                RejectReason::NothingTrainable,
                format!("none of {looked_at} is marked as the assistant's"),
            )),
            few if few < options.min_trainable_tokens => Err(Fault::new(
                RejectReason::TooFewTrainable,
                format!(
                    "{few} of {looked_at} are trained; at least {} are wanted",
                    options.min_trainable_tokens
                ),
            )),
            _ => Ok(Encoded { sample, truncated }),
        }
    }
}

/// `trained` is ascending and apart. A token without text of its own counts as starting there.
fn starts_inside(token: &Token, trained: &[Range<usize>]) -> bool {
    let next = trained.partition_point(|range| range.end <= token.start);
    trained.get(next).is_some_and(|range| range.contains(&token.start))
}

fn tokenizer_fault(error: TokenizerError) -> Fault {
    Fault::new(RejectReason::TokenizerError, error.to_string())
}
