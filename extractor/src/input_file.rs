//! What an input file amounts to: lines to account for, bytes, digest. Knows nothing of what the
//! lines hold.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use shared::digest::Digest;

const BOM: &[u8] = b"\xef\xbb\xbf";

/// One input file, as the manifest registers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputFile {
    /// The name by which it was given.
    pub file: String,
    /// Lines that are not blank; each of them gets an outcome.
    pub lines: u64,
    /// Size.
    pub bytes: u64,
    /// BLAKE3 of the whole file.
    pub digest: Digest,
}

impl InputFile {
    /// Reads the file once, in bounded memory.
    pub fn survey(path: &Path) -> io::Result<Self> {
        let mut reader = BufReader::with_capacity(1 << 18, File::open(path)?);
        let mut hasher = blake3::Hasher::new();
        let (mut lines, mut bytes, mut holds_text) = (0, 0_u64, false);
        loop {
            let chunk = reader.fill_buf()?;
            if chunk.is_empty() {
                break;
            }
            hasher.update(chunk);
            let text = if bytes == 0 { chunk.strip_prefix(BOM).unwrap_or(chunk) } else { chunk };
            for &byte in text {
                match byte {
                    b'\n' => lines += u64::from(std::mem::take(&mut holds_text)),
                    _ => holds_text |= !byte.is_ascii_whitespace(),
                }
            }
            let read = chunk.len();
            bytes += read as u64;
            reader.consume(read);
        }
        lines += u64::from(holds_text);
        let digest = Digest(*hasher.finalize().as_bytes());
        Ok(Self { file: path.display().to_string(), lines, bytes, digest })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::prompts::Prompts;

    #[test]
    fn counts_the_lines_that_the_reader_yields() {
        for text in ["\u{feff}{}\r\n\n  \n{}", "{}\n{}\n", "x", "\u{feff}\n{}\n\r\n{}\n\t\n"] {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(text.as_bytes()).unwrap();
            let yielded = Prompts::open(&[file.path().to_path_buf()]).unwrap().count() as u64;
            let survey = InputFile::survey(file.path()).unwrap();
            assert_eq!((survey.lines, survey.bytes), (yielded, text.len() as u64), "{text:?}");
        }
    }
}
