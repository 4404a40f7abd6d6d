//! `tiktoken.model`, the vocabulary format of Kimi: base64 tokens with ranks, Kimi's split
//! pattern, and 256 special ids behind the ranks. Knows nothing of chat templates.

use std::collections::BTreeMap;

use fancy_regex::Regex;

use super::bpe::Bpe;
use super::{Token, TokenizerError};

/// Special ids follow the ranks without a gap.
const SPECIAL_IDS: usize = 256;
/// Kimi's encoder looks at blocks of this many characters...
const BLOCK_CHARS: usize = 400_000;
/// ...and cuts longer runs that are all white space or all not.
const RUN_CHARS: usize = 25_000;

const PATTERN: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+",
    r"|\s+(?!\S)",
    r"|\s+",
);

/// The ordinary part of the tokenizer; special tokens are matched by the caller.
#[derive(Clone, Debug)]
pub(super) struct Tiktoken {
    bpe: Bpe,
    pattern: Regex,
}

impl Tiktoken {
    /// Reads the text of a `tiktoken.model` file.
    pub(super) fn parse(file: &str) -> Result<Self, TokenizerError> {
        let mut by_rank = BTreeMap::new();
        for (index, line) in file.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
            let entry = line.split_once(' ').and_then(|(token, rank)| {
                Some((rank.trim().parse::<u32>().ok()?, decode_base64(token)?))
            });
            let Some((rank, token)) = entry else {
                return Err(TokenizerError::Line {
                    line: index + 1,
                    detail: "`BASE64 RANK` is expected".into(),
                });
            };
            if token.is_empty() || by_rank.insert(rank, token).is_some() {
                return Err(TokenizerError::Line {
                    line: index + 1,
                    detail: format!("rank {rank} is empty or given twice"),
                });
            }
        }
        let count = by_rank.len();
        if by_rank.last_key_value().is_none_or(|(&last, _)| last as usize + 1 != count) {
            return Err(TokenizerError::Vocabulary(format!(
                "{count} ranks are expected to be 0 to {}, without a gap",
                count.saturating_sub(1)
            )));
        }
        let bpe = Bpe::new(by_rank.into_values().collect()).ok_or_else(|| {
            TokenizerError::Vocabulary(
                "every byte has to be a token, and no token may be there twice".into(),
            )
        })?;
        let pattern = Regex::new(PATTERN).map_err(|error| TokenizerError::Split(error.into()))?;
        Ok(Self { bpe, pattern })
    }

    /// The special tokens with their ids: the names given, `<|reserved_token_{id}|>` elsewhere.
    pub(super) fn specials(
        &self,
        named: &BTreeMap<u32, String>,
    ) -> Result<BTreeMap<String, u32>, TokenizerError> {
        let first = u32::try_from(self.bpe.len()).unwrap_or(u32::MAX);
        let ids = first..first.saturating_add(SPECIAL_IDS as u32);
        if let Some((id, name)) = named.iter().find(|(id, _)| !ids.contains(id)) {
            return Err(TokenizerError::Vocabulary(format!(
                "special token {name} has id {id}; with {first} ranks the special ids are {first} \
                 to {}: the two files are not of one model",
                ids.end - 1
            )));
        }
        let mut specials = BTreeMap::new();
        for id in ids {
            let name = named.get(&id).cloned();
            let name = name.unwrap_or_else(|| format!("<|reserved_token_{id}|>"));
            if let Some(other) = specials.insert(name.clone(), id) {
                return Err(TokenizerError::Vocabulary(format!(
                    "special token {name} has the ids {other} and {id}"
                )));
            }
        }
        Ok(specials)
    }

    /// The bytes of an ordinary token.
    pub(super) fn token(&self, id: u32) -> Option<&[u8]> {
        self.bpe.token(id)
    }

    /// Appends the tokens of text without special tokens; `base` is where it starts.
    pub(super) fn encode(
        &self,
        text: &str,
        base: usize,
        tokens: &mut Vec<Token>,
    ) -> Result<(), TokenizerError> {
        for block in cuts(text) {
            let block_base = base + (block.as_ptr() as usize - text.as_ptr() as usize);
            for piece in self.pattern.find_iter(block) {
                let piece = piece.map_err(|error| TokenizerError::Split(error.into()))?;
                let piece_base = block_base + piece.start();
                self.bpe.encode(piece.as_str().as_bytes(), |id, start, end| {
                    tokens.push(Token { id, start: piece_base + start, end: piece_base + end });
                });
            }
        }
        Ok(())
    }
}

/// Parts of the text that are encoded on their own, as Kimi's encoder cuts it.
fn cuts(text: &str) -> Vec<&str> {
    // Characters are at most as many as bytes, so short text needs no look.
    if text.len() <= RUN_CHARS {
        return vec![text];
    }
    let mut parts = Vec::new();
    let (mut start, mut in_block, mut run, mut run_is_space) = (0, 0, 0, false);
    for (at, character) in text.char_indices() {
        let space = is_python_space(character);
        if in_block == BLOCK_CHARS {
            parts.push(text.get(start..at).unwrap_or_default());
            (start, in_block, run) = (at, 0, 0);
        }
        if run > 0 && space == run_is_space {
            run += 1;
            if run > RUN_CHARS {
                parts.push(text.get(start..at).unwrap_or_default());
                (start, run) = (at, 1);
            }
        } else {
            (run, run_is_space) = (1, space);
        }
        in_block += 1;
    }
    parts.push(text.get(start..).unwrap_or_default());
    parts
}

/// Python's `str.isspace` also counts the four information separators.
fn is_python_space(character: char) -> bool {
    character.is_whitespace() || matches!(character, '\u{1c}'..='\u{1f}')
}

/// Standard alphabet, padding optional. `None` for anything else.
fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=').bytes().map(|digit| {
        Some(match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        })
    });
    let mut bytes = Vec::with_capacity(text.len() * 3 / 4);
    let (mut bits, mut count) = (0_u32, 0);
    for digit in digits {
        bits = (bits << 6 | u32::from(digit?)) & 0xffff;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count & 0xff) as u8);
        }
    }
    (count < 6).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(lines: &[&str]) -> String {
        let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut file = String::new();
        for byte in 0..=255_usize {
            let pair = [alphabet[byte >> 2] as char, alphabet[(byte & 3) << 4] as char];
            file += &format!("{}{}== {byte}\n", pair[0], pair[1]);
        }
        file + &lines.join("\n")
    }

    #[test]
    fn base64_accepts_only_whole_bytes() {
        assert_eq!(decode_base64("YWJj"), Some(b"abc".to_vec()));
        assert_eq!(decode_base64("YWI="), Some(b"ab".to_vec()));
        assert_eq!(decode_base64("/+8="), Some(vec![0xff, 0xef]));
        assert_eq!(decode_base64("Y"), None);
        assert_eq!(decode_base64("Y*=="), None);
    }

    #[test]
    fn damaged_vocabularies_are_named() {
        assert!(Tiktoken::parse(&model(&["YWI= 256"])).is_ok());
        for (damage, wanted) in [
            ("YWI= 300", "without a gap"),
            ("YWI= 7", "twice"),
            ("YQ== 256", "twice"),
            ("YWI=", "line 257"),
            ("Y*= 256", "line 257"),
        ] {
            let error = Tiktoken::parse(&model(&[damage])).unwrap_err().to_string();
            assert!(error.contains(wanted), "{damage}: {error}");
        }
        assert!(Tiktoken::parse("").is_err());
    }

    #[test]
    fn special_ids_outside_their_range_are_refused() {
        let tiktoken = Tiktoken::parse(&model(&[])).unwrap();
        let named = BTreeMap::from([(256, "[BOS]".into())]);
        let specials = tiktoken.specials(&named).unwrap();
        assert_eq!(specials.len(), 256);
        assert_eq!(specials["[BOS]"], 256);
        assert_eq!(specials["<|reserved_token_257|>"], 257);
        assert!(tiktoken.specials(&BTreeMap::from([(255, "x".into())])).is_err());
        assert!(tiktoken.specials(&BTreeMap::from([(512, "x".into())])).is_err());
        let twice = BTreeMap::from([(256, "x".into()), (300, "x".into())]);
        assert!(tiktoken.specials(&twice).is_err());
    }
}
