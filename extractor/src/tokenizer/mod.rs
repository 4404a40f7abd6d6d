//! Text to token ids and back, for `tokenizer.json` and for Kimi's `tiktoken.model`. Knows
//! nothing of conversations; the caller says where text of special tokens is meant as such.

mod bpe;
mod files;
mod huggingface;
mod tiktoken;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use fancy_regex::Regex;
use thiserror::Error;

pub use files::TokenizerConfig;
pub(crate) use files::{read_limited, stop_ids};
use huggingface::HuggingFace;
use tiktoken::Tiktoken;

/// Largest tokenizer file that is read, in bytes.
pub const MAX_TOKENIZER_BYTES: u64 = 64 << 20;

/// Whether text that looks like a special token is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialText {
    /// It becomes the special token's id.
    Allowed,
    /// It is encoded like any other text.
    Ordinary,
}

/// A token and the bytes of the text it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// First byte.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
}

/// Why a tokenizer cannot be used.
#[derive(Debug, Error)]
pub enum TokenizerError {
    /// Neither file is there.
    #[error("{} has neither tokenizer.json nor tiktoken.model", .0.display())]
    Missing(PathBuf),
    /// A file that cannot be read.
    #[error("reading {}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A file above its limit.
    #[error("{} has {bytes} bytes; at most {limit} are read", .path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// What is allowed.
        limit: u64,
    },
    /// A fault with the name of the file it was found in.
    #[error("{}", .path.display())]
    In {
        /// The file.
        path: PathBuf,
        /// The fault.
        #[source]
        source: Box<TokenizerError>,
    },
    /// A line of `tiktoken.model`.
    #[error("line {line}: {detail}")]
    Line {
        /// 1-based.
        line: usize,
        /// What was expected.
        detail: String,
    },
    /// The vocabulary as a whole.
    #[error("the vocabulary is unusable: {0}")]
    Vocabulary(String),
    /// A JSON file of unexpected form.
    #[error("not the JSON that is expected: {0}")]
    Json(String),
    /// The text could not be split.
    #[error("splitting the text")]
    Split(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// An id outside the vocabulary.
    #[error("token id {id} has no text: the vocabulary has {vocab_size} ids")]
    UnknownId {
        /// The id.
        id: u32,
        /// Number of ids.
        vocab_size: usize,
    },
}

impl TokenizerError {
    /// Process exit code: 74 I/O, 65 bad data.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Read { .. } => 74,
            _ => 65,
        }
    }
}

#[derive(Clone, Debug)]
enum Kind {
    Tiktoken(Box<Tiktoken>),
    HuggingFace(Box<HuggingFace>),
}

/// A tokenizer read from a model directory.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    kind: Kind,
    specials: BTreeMap<String, u32>,
    special_names: BTreeMap<u32, String>,
    special_pattern: Option<Regex>,
    vocab_size: usize,
    digest: [u8; 32],
}

impl Tokenizer {
    /// Reads `tokenizer.json`, or else `tiktoken.model` with the special tokens of
    /// `tokenizer_config.json`, from a model directory.
    pub fn load(dir: &Path) -> Result<Self, TokenizerError> {
        let json = dir.join("tokenizer.json");
        let model = dir.join("tiktoken.model");
        let read = |path: &Path| files::read_limited(path, MAX_TOKENIZER_BYTES);
        if json.exists() {
            Self::from_tokenizer_json(&read(&json)?).map_err(|error| error.within(json))
        } else if model.exists() {
            let config = TokenizerConfig::load(dir)?;
            let parsed = String::from_utf8(read(&model)?)
                .map_err(|_| TokenizerError::Vocabulary("the file is not text".into()))
                .and_then(|file| Self::from_tiktoken(&file, &config.added_tokens()?));
            parsed.map_err(|error| error.within(model))
        } else {
            Err(TokenizerError::Missing(dir.to_path_buf()))
        }
    }

    /// Reads the bytes of a `tokenizer.json`.
    pub fn from_tokenizer_json(file: &[u8]) -> Result<Self, TokenizerError> {
        let inner = HuggingFace::parse(file)?;
        let (specials, vocab_size) = (inner.specials(), inner.vocab_size()?);
        Self::new(Kind::HuggingFace(Box::new(inner)), specials, vocab_size, file)
    }

    /// Reads the text of a `tiktoken.model`; `named` are the special tokens that have names.
    pub fn from_tiktoken(
        file: &str,
        named: &BTreeMap<u32, String>,
    ) -> Result<Self, TokenizerError> {
        let inner = Tiktoken::parse(file)?;
        let specials = inner.specials(named)?;
        let vocab_size = specials.values().max().map_or(0, |&last| last as usize + 1);
        Self::new(Kind::Tiktoken(Box::new(inner)), specials, vocab_size, file.as_bytes())
    }

    fn new(
        kind: Kind,
        specials: BTreeMap<String, u32>,
        vocab_size: usize,
        file: &[u8],
    ) -> Result<Self, TokenizerError> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(file.len() as u64).to_le_bytes()).update(file);
        for (name, id) in &specials {
            hasher.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes());
            hasher.update(&id.to_le_bytes());
        }
        // Of two names that begin alike the longer is meant, so it is tried first.
        let mut names: Vec<&str> =
            specials.keys().map(String::as_str).filter(|name| !name.is_empty()).collect();
        names.sort_unstable_by_key(|name| (std::cmp::Reverse(name.len()), *name));
        let alternatives: Vec<_> = names.iter().map(|name| fancy_regex::escape(name)).collect();
        let special_pattern = (!alternatives.is_empty())
            .then(|| {
                Regex::new(&alternatives.join("|"))
                    .map_err(|error| TokenizerError::Split(error.into()))
            })
            .transpose()?;
        let special_names = specials.iter().map(|(name, &id)| (id, name.clone())).collect();
        let digest = *hasher.finalize().as_bytes();
        Ok(Self { kind, specials, special_names, special_pattern, vocab_size, digest })
    }

    /// Token ids of a text.
    pub fn encode(&self, text: &str, mode: SpecialText) -> Result<Vec<u32>, TokenizerError> {
        let end = if mode == SpecialText::Ordinary { text.len() } else { 0 };
        let tokens = self.encode_spans(text, std::slice::from_ref(&(0..end)))?;
        Ok(tokens.iter().map(|token| token.id).collect())
    }

    /// Tokens of a text. Text of a special token that touches one of the byte ranges in
    /// `ordinary` (ascending, apart) is encoded like any other text.
    pub fn encode_spans(
        &self,
        text: &str,
        ordinary: &[Range<usize>],
    ) -> Result<Vec<Token>, TokenizerError> {
        let mut tokens = Vec::with_capacity(text.len() / 3);
        let found = self.find_specials(text, ordinary)?;
        if let (Kind::HuggingFace(inner), false) = (&self.kind, found.some_ordinary) {
            inner.encode_full(text, &mut tokens)?;
            return Ok(tokens);
        }
        let mut start = 0;
        for special in found.specials {
            let (before, after) = self.strips(text, &special);
            let piece = text.get(start..before.max(start)).unwrap_or_default();
            self.encode_ordinary(piece, start, &mut tokens)?;
            tokens.push(special);
            start = after;
        }
        self.encode_ordinary(text.get(start..).unwrap_or_default(), start, &mut tokens)?;
        Ok(tokens)
    }

    /// Where text of special tokens stands, as (byte range, id), left to right.
    pub fn special_text(&self, text: &str) -> Result<Vec<Token>, TokenizerError> {
        Ok(self.find_specials(text, &[])?.specials)
    }

    fn find_specials(
        &self,
        text: &str,
        ordinary: &[Range<usize>],
    ) -> Result<Found, TokenizerError> {
        let mut found = Found { specials: Vec::new(), some_ordinary: false };
        let Some(pattern) = &self.special_pattern else { return Ok(found) };
        let mut from = 0;
        loop {
            let hit = pattern.find_from_pos(text, from);
            let Some(hit) = hit.map_err(|error| TokenizerError::Split(error.into()))? else {
                return Ok(found);
            };
            let next = ordinary.partition_point(|range| range.end <= hit.start());
            let touches = ordinary.get(next).is_some_and(|range| range.start < hit.end());
            if touches {
                found.some_ordinary = true;
                // Another special token may begin inside the text that was not one.
                let first = hit.as_str().chars().next().map_or(1, char::len_utf8);
                from = hit.start() + first;
                continue;
            }
            if let Some(&id) = self.specials.get(hit.as_str()) {
                found.specials.push(Token { id, start: hit.start(), end: hit.end() });
            }
            from = hit.end();
        }
    }

    /// The ends of a special token, with the white space that its definition takes in.
    fn strips(&self, text: &str, token: &Token) -> (usize, usize) {
        let Kind::HuggingFace(inner) = &self.kind else { return (token.start, token.end) };
        let (left, right) = inner.strips(token.id);
        let before = text.get(..token.start).unwrap_or_default();
        let after = text.get(token.end..).unwrap_or_default();
        (
            if left { before.trim_end().len() } else { token.start },
            if right { text.len() - after.trim_start().len() } else { token.end },
        )
    }

    fn encode_ordinary(
        &self,
        text: &str,
        base: usize,
        tokens: &mut Vec<Token>,
    ) -> Result<(), TokenizerError> {
        match &self.kind {
            Kind::Tiktoken(inner) => inner.encode(text, base, tokens),
            Kind::HuggingFace(inner) => inner.encode_ordinary(text, base, tokens),
        }
    }

    /// Bytes of the ids, special tokens by their names. Ids outside the vocabulary are an error.
    pub fn decode(&self, ids: &[u32]) -> Result<Vec<u8>, TokenizerError> {
        let unknown = |id| TokenizerError::UnknownId { id, vocab_size: self.vocab_size };
        match &self.kind {
            Kind::Tiktoken(inner) => {
                let mut bytes = Vec::with_capacity(ids.len() * 4);
                for &id in ids {
                    let special = || self.special_names.get(&id).map(String::as_bytes);
                    bytes.extend(inner.token(id).or_else(special).ok_or_else(|| unknown(id))?);
                }
                Ok(bytes)
            }
            Kind::HuggingFace(inner) => {
                if let Some(&id) = ids.iter().find(|&&id| id as usize >= self.vocab_size) {
                    return Err(unknown(id));
                }
                inner.decode(ids).map(String::into_bytes)
            }
        }
    }

    /// As [`Self::decode`]; bytes that are not UTF-8 become U+FFFD.
    pub fn decode_lossy(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        Ok(String::from_utf8_lossy(&self.decode(ids)?).into_owned())
    }

    /// The id of a special token by its name.
    pub fn special_id(&self, name: &str) -> Option<u32> {
        self.specials.get(name).copied()
    }

    /// All special (added) tokens, by name.
    pub fn specials(&self) -> &BTreeMap<String, u32> {
        &self.specials
    }

    /// Ids the file puts before and after a document that is not a chat (`<s>`).
    pub fn document_ends(&self) -> (&[u32], &[u32]) {
        match &self.kind {
            Kind::Tiktoken(_) => (&[], &[]),
            Kind::HuggingFace(inner) => (&inner.prefix, &inner.suffix),
        }
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// BLAKE3 over the vocabulary and the special tokens.
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }
}

struct Found {
    specials: Vec<Token>,
    some_ordinary: bool,
}

impl TokenizerError {
    fn within(self, path: PathBuf) -> Self {
        Self::In { path, source: Box::new(self) }
    }
}
