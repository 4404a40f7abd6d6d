//! What an input file amounts to: lines to account for, bytes, digests; and reading it again as it
//! was. Knows nothing of what the lines hold.

use std::fs::File;
use std::io::{self, BufRead, Read};
use std::path::Path;

use shared::digest::Digest;
use shared::manifest::InputFile;
use thiserror::Error;

/// Bytes that are compared at once.
const BLOCK: usize = 1 << 18;
const BOM: &[u8] = b"\xef\xbb\xbf";

/// An input file as it was when it was looked at first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// What the manifest registers.
    pub file: InputFile,
    /// BLAKE3 of every [`BLOCK`] bytes; the last may have fewer.
    blocks: Vec<Digest>,
}

/// A block of a file is not the one that was surveyed.
#[derive(Debug, Error)]
#[error("it was changed meanwhile")]
pub struct Changed;

/// Reads the file once, in bounded memory but for 32 bytes a block.
pub fn survey(path: &Path) -> io::Result<Survey> {
    let mut reader = BlockReader::new(File::open(path)?, None);
    let (mut hasher, mut blocks) = (blake3::Hasher::new(), Vec::new());
    let (mut lines, mut blank, mut bytes) = (0, 0, 0_u64);
    let mut holds_text = false;
    loop {
        let block = reader.fill_buf()?;
        if block.is_empty() {
            break;
        }
        hasher.update(block);
        blocks.push(Digest::of(block));
        let text = if bytes == 0 { block.strip_prefix(BOM).unwrap_or(block) } else { block };
        for &byte in text {
            if byte == b'\n' {
                let count = if std::mem::take(&mut holds_text) { &mut lines } else { &mut blank };
                *count += 1;
            }
            holds_text |= !byte.is_ascii_whitespace();
        }
        let read = block.len();
        bytes += read as u64;
        reader.consume(read);
        if read < BLOCK {
            // The end, as it was: what is appended meanwhile would begin a block of its own.
            break;
        }
    }
    // Spaces at the end may be the beginning of a line that somebody is writing.
    lines += u64::from(holds_text);
    let digest = Digest(*hasher.finalize().as_bytes());
    let file = InputFile { file: path.display().to_string(), lines, blank, bytes, digest };
    Ok(Survey { file, blocks })
}

/// Reads a file block by block. With a survey, up to the end that was surveyed, for a file may
/// grow; a block that has changed is an error whose source is [`Changed`], and no byte of it comes
/// out.
#[derive(Debug)]
pub(crate) struct BlockReader {
    file: File,
    /// Digests of the blocks to come, and the bytes in them.
    surveyed: Option<(std::vec::IntoIter<Digest>, u64)>,
    block: Vec<u8>,
    taken: usize,
}

impl BlockReader {
    pub(crate) fn new(file: File, survey: Option<Survey>) -> Self {
        let surveyed = survey.map(|it| (it.blocks.into_iter(), it.file.bytes));
        Self { file, surveyed, block: Vec::new(), taken: 0 }
    }

    fn next_block(&mut self) -> io::Result<()> {
        self.taken = 0;
        self.block.clear();
        let left = self.surveyed.as_ref().map_or(u64::MAX, |(_, bytes)| *bytes);
        let mut part = (&self.file).take(left.min(BLOCK as u64));
        part.read_to_end(&mut self.block)?;
        if let Some((digests, bytes)) = &mut self.surveyed
            && let Some(digest) = digests.next()
        {
            if Digest::of(&self.block) != digest {
                self.block.clear();
                return Err(io::Error::other(Changed));
            }
            *bytes -= self.block.len() as u64;
        }
        Ok(())
    }
}

impl Read for BlockReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.fill_buf()?.read(into)?;
        self.consume(read);
        Ok(read)
    }
}

impl BufRead for BlockReader {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.taken == self.block.len() {
            self.next_block()?;
        }
        Ok(self.block.get(self.taken..).unwrap_or_default())
    }

    fn consume(&mut self, bytes: usize) {
        self.taken = self.block.len().min(self.taken + bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::prompts::Prompts;

    #[test]
    fn a_file_that_grows_while_it_is_surveyed_is_read_as_it_was_surveyed() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let (path, done) = (file.path().to_path_buf(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    file.write_all(b"{}\n").unwrap();
                }
            });
            let again = || {
                let survey = survey(&path)?;
                let bytes = survey.file.bytes;
                let mut again = BlockReader::new(File::open(&path)?, Some(survey));
                Ok::<_, io::Error>((bytes, io::copy(&mut again, &mut io::sink())?))
            };
            let read: Vec<_> = (0..50).map(|_| again()).collect();
            done.store(true, Ordering::Relaxed);
            read.into_iter().for_each(|read| {
                let (surveyed, read) = read.unwrap();
                assert_eq!(surveyed, read);
            });
        });
    }

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
            let survey = survey(file.path()).unwrap().file;
            let counts = (yielded.len() as u64, text.len() as u64);
            assert_eq!((survey.lines, survey.bytes), counts, "{text:.40?}");
            let physical = text.lines().count() as u64 - unfinished;
            assert_eq!(survey.lines + survey.blank, physical, "{text:.40?}");
            assert!(yielded.iter().all(|&line| line <= physical), "{text:.40?}: {yielded:?}");
        }
    }

    /// A file of two blocks and a bit that is changed after its survey.
    #[test]
    fn what_is_read_is_what_was_surveyed() {
        let first = "0123456\n".repeat(BLOCK / 8);
        let whole = [first.as_str(), &first, "7\n8"].concat();
        let changed = |at: usize| {
            let mut bytes = whole.clone().into_bytes();
            bytes[at] ^= 1;
            bytes
        };
        let last = whole.len() - 1;
        for (now, kept) in [
            (whole.clone().into_bytes(), Ok(whole.len())),
            ([whole.as_bytes(), b"9\n10\n"].concat(), Ok(whole.len())),
            (changed(0), Err(0)),
            (changed(BLOCK), Err(BLOCK)),
            (changed(2 * BLOCK - 1), Err(BLOCK)),
            (changed(last), Err(2 * BLOCK)),
            (whole.as_bytes()[..last].to_vec(), Err(2 * BLOCK)),
            (whole.as_bytes()[..2 * BLOCK].to_vec(), Err(2 * BLOCK)),
            (whole.as_bytes()[..BLOCK + 1].to_vec(), Err(BLOCK)),
            (Vec::new(), Err(0)),
        ] {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(whole.as_bytes()).unwrap();
            let survey = survey(file.path()).unwrap();
            file.as_file().set_len(0).unwrap();
            let mut file = file.reopen().unwrap();
            file.write_all(&now).unwrap();
            std::io::Seek::rewind(&mut file).unwrap();
            let mut reader = BlockReader::new(file, Some(survey));
            let mut read = Vec::new();
            let ended = reader.read_to_end(&mut read);
            let is_changed = |it: io::Error| it.get_ref().is_some_and(|it| it.is::<Changed>());
            match kept {
                Ok(bytes) => assert_eq!(ended.unwrap(), bytes),
                Err(_) => assert!(is_changed(ended.unwrap_err())),
            }
            assert_eq!(read.len(), kept.unwrap_or_else(|bytes| bytes));
            assert!(whole.as_bytes().starts_with(&read));
        }
    }
}
