//! `tokenizer.json` through the tokenizers crate. Adds one thing: text of an added token can be
//! held ordinary in chosen places. Knows nothing of chat templates.

use std::collections::{BTreeMap, HashMap};

use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::{AddedVocabulary, PostProcessorWrapper, PreTokenizerWrapper, Tokenizer};

use super::{Token, TokenizerError};

/// Three readings of one file.
#[derive(Clone, Debug)]
pub(super) struct HuggingFace {
    /// Added tokens are recognised wherever they stand.
    full: Tokenizer,
    /// No added tokens: all text is ordinary.
    ordinary: Tokenizer,
    /// As `ordinary`, for text that does not start the document.
    ordinary_inner: Tokenizer,
    /// Whether white space before and after an added token belongs to it, by id.
    strips: HashMap<u32, (bool, bool)>,
    /// Ids the file wants before and after a document that is not a chat.
    pub(super) prefix: Vec<u32>,
    pub(super) suffix: Vec<u32>,
}

impl HuggingFace {
    /// Reads the bytes of a `tokenizer.json` file.
    pub(super) fn parse(file: &[u8]) -> Result<Self, TokenizerError> {
        let mut full = Tokenizer::from_bytes(file)
            .map_err(|error| TokenizerError::Vocabulary(error.to_string()))?;
        full.with_truncation(None).map_err(TokenizerError::Split)?;
        full.with_padding(None);
        let (prefix, suffix) = document_ends(&full)?;
        // The post-processor would trim offsets; what it adds is kept above.
        full.with_post_processor(None::<PostProcessorWrapper>);
        let mut ordinary = full.clone();
        ordinary.with_added_vocabulary(AddedVocabulary::new());
        let mut ordinary_inner = ordinary.clone();
        if let Some(mut splitter) = ordinary.get_pre_tokenizer().cloned() {
            never_first(&mut splitter);
            ordinary_inner.with_pre_tokenizer(Some(splitter));
        }
        let added = full.get_added_tokens_decoder().into_iter();
        let strips = added.map(|(id, token)| (id, (token.lstrip, token.rstrip))).collect();
        Ok(Self { full, ordinary, ordinary_inner, strips, prefix, suffix })
    }

    /// Added tokens, special or not, with their ids.
    pub(super) fn specials(&self) -> BTreeMap<String, u32> {
        let added = self.full.get_added_tokens_decoder();
        added.into_iter().map(|(id, token)| (token.content, id)).collect()
    }

    /// One more than the largest id; two tokens with one id are an error.
    pub(super) fn vocab_size(&self) -> Result<usize, TokenizerError> {
        let vocabulary = self.full.get_vocab(true);
        let mut ids: Vec<u32> = vocabulary.values().copied().collect();
        ids.sort_unstable();
        if let Some(pair) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            let id = pair[0];
            let mut names: Vec<&str> =
                vocabulary.iter().filter(|entry| *entry.1 == id).map(|(name, _)| &**name).collect();
            names.sort_unstable();
            return Err(TokenizerError::Vocabulary(format!("id {id} is shared by {names:?}")));
        }
        Ok(ids.last().map_or(0, |&last| last as usize + 1))
    }

    /// Tokens of a text whose added tokens are all meant.
    pub(super) fn encode_full(
        &self,
        text: &str,
        tokens: &mut Vec<Token>,
    ) -> Result<(), TokenizerError> {
        append(&self.full, text, 0, tokens)
    }

    /// Tokens of a text of which nothing is an added token; `base` is where it starts.
    pub(super) fn encode_ordinary(
        &self,
        text: &str,
        base: usize,
        tokens: &mut Vec<Token>,
    ) -> Result<(), TokenizerError> {
        let tokenizer = if base == 0 { &self.ordinary } else { &self.ordinary_inner };
        append(tokenizer, text, base, tokens)
    }

    /// Text of the ids, special tokens included.
    pub(super) fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.full.decode(ids, false).map_err(TokenizerError::Split)
    }

    /// Whether white space beside an added token belongs to it: (before, after).
    pub(super) fn strips(&self, id: u32) -> (bool, bool) {
        self.strips.get(&id).copied().unwrap_or_default()
    }
}

/// Takes the space away that some splitters put before the first piece of a document.
fn never_first(splitter: &mut PreTokenizerWrapper) {
    match splitter {
        PreTokenizerWrapper::Metaspace(metaspace)
            if metaspace.prepend_scheme == PrependScheme::First =>
        {
            metaspace.set_prepend_scheme(PrependScheme::Never);
        }
        PreTokenizerWrapper::Sequence(parts) => parts.as_mut().iter_mut().for_each(never_first),
        _ => {}
    }
}

fn append(
    tokenizer: &Tokenizer,
    text: &str,
    base: usize,
    tokens: &mut Vec<Token>,
) -> Result<(), TokenizerError> {
    if text.is_empty() {
        return Ok(());
    }
    let encoding = tokenizer.encode(text, false).map_err(TokenizerError::Split)?;
    let spans = encoding.get_ids().iter().zip(encoding.get_offsets());
    tokens.extend(spans.map(|(&id, &(start, end))| Token {
        id,
        start: base + start,
        end: base + end,
    }));
    Ok(())
}

/// What the post-processor puts around a document, learnt from one.
fn document_ends(tokenizer: &Tokenizer) -> Result<(Vec<u32>, Vec<u32>), TokenizerError> {
    let ids = |special| {
        let encoding = tokenizer.encode("a", special).map_err(TokenizerError::Split)?;
        Ok::<_, TokenizerError>(encoding.get_ids().to_vec())
    };
    let (bare, dressed) = (ids(false)?, ids(true)?);
    let at = dressed.windows(bare.len().max(1)).position(|window| window == bare.as_slice());
    let Some(at) = at else { return Ok((Vec::new(), Vec::new())) };
    let (prefix, rest) = dressed.split_at(at);
    Ok((prefix.to_vec(), rest.get(bare.len()..).unwrap_or_default().to_vec()))
}
