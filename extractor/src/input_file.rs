//! What an input file amounts to: lines to account for, bytes, digest. Knows nothing of what the
//! lines hold.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use shared::digest::Digest;
use shared::manifest::InputFile;

const BOM: &[u8] = b"\xef\xbb\xbf";

/// Reads the file once, in bounded memory.
pub fn survey(path: &Path) -> io::Result<InputFile> {
    let mut reader = BufReader::with_capacity(1 << 18, File::open(path)?);
    let mut hasher = blake3::Hasher::new();
    let (mut lines, mut blank, mut bytes) = (0, 0, 0_u64);
    let mut holds_text = false;
    loop {
        let chunk = reader.fill_buf()?;
        if chunk.is_empty() {
            break;
        }
        hasher.update(chunk);
        let text = if bytes == 0 { chunk.strip_prefix(BOM).unwrap_or(chunk) } else { chunk };
        for &byte in text {
            if byte == b'\n' {
                let count = if std::mem::take(&mut holds_text) { &mut lines } else { &mut blank };
                *count += 1;
            }
            holds_text |= !byte.is_ascii_whitespace();
        }
        let read = chunk.len();
        bytes += read as u64;
        reader.consume(read);
    }
    // Spaces at the end may be the beginning of a line that somebody is writing.
    lines += u64::from(holds_text);
    let digest = Digest(*hasher.finalize().as_bytes());
    Ok(InputFile { file: path.display().to_string(), lines, blank, bytes, digest })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::prompts::Prompts;

    #[test]
    fn counts_the_lines_that_the_reader_yields() {
        // More white space than a line may have bytes is blank all the same.
        let long_blank = format!("{{}}\n{}\n{{}}\n", " ".repeat(17 << 20));
        for (text, unfinished) in [
            ("\u{feff}{}\r\n\n  \n{}", 0),
            ("{}\n{}\n", 0),
            ("x", 0),
            ("\u{feff}\n{}\n\r\n{}\n\t\n", 0),
            ("{}\n  ", 1),
            (&long_blank, 0),
        ] {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(text.as_bytes()).unwrap();
            let yielded: Vec<u64> = Prompts::open(&[file.path().to_path_buf()])
                .unwrap()
                .map(|line| line.unwrap().source.line)
                .collect();
            let survey = survey(file.path()).unwrap();
            let counts = (yielded.len() as u64, text.len() as u64);
            assert_eq!((survey.lines, survey.bytes), counts, "{text:.40?}");
            let physical = text.lines().count() as u64 - unfinished;
            assert_eq!(survey.lines + survey.blank, physical, "{text:.40?}");
            assert!(yielded.iter().all(|&line| line <= physical), "{text:.40?}: {yielded:?}");
        }
    }
}
