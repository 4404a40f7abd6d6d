//! JSONL lines from one or more files, in order, in bounded memory. A bad line is a reject with
//! its number; only unreadable files are errors. Knows nothing of templates or tokens.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;

use crate::conversation::{Body, Conversation};
use crate::input_file::{BlockReader, Changed, Survey};
use crate::integers::require_kept;
use crate::reject::{Fault, Reject, RejectReason, Source};

/// Longest accepted line in bytes, without its line end.
pub const MAX_LINE_BYTES: usize = 16 << 20;
/// Deepest accepted nesting of JSON brackets.
pub const MAX_JSON_DEPTH: usize = 64;

const BOM: &[u8] = b"\xef\xbb\xbf";

/// One line that is not blank.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// File and 1-based number.
    pub source: Source,
    /// First 16 bytes of BLAKE3 over the raw line, without its line end or a leading BOM.
    pub digest: [u8; 16],
    /// What the line holds, or why it cannot be used.
    pub parsed: Result<Conversation, Reject>,
}

/// Why the input as a whole cannot be read.
#[derive(Debug, Error)]
pub enum PromptsError {
    /// No file was named.
    #[error("no prompt files are named: set `prompts` in [data] or pass --prompts FILE")]
    NoFiles,
    /// A file that does not open or is not a regular file.
    #[error("opening prompts {}", .path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// A file without a single line that is not blank.
    #[error("{} is empty: one JSON object a line is expected", .0.display())]
    Empty(PathBuf),
    /// A file that became another one between its survey and its reading.
    #[error(
        "{} was changed after it was looked at first, behind line {line}: nothing of what stands \
         there now was taken, what was captured before is kept; run again when the file is whole",
        .path.display()
    )]
    Changed {
        /// The file.
        path: PathBuf,
        /// Last line read.
        line: u64,
    },
    /// The disk gave an error in the middle of a file.
    #[error("reading {} after line {line}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Last line read whole.
        line: u64,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
}

impl PromptsError {
    /// Process exit code: 65 bad data, 74 I/O, 78 configuration.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NoFiles => 78,
            Self::Empty(_) | Self::Changed { .. } => 65,
            Self::Open { .. } | Self::Read { .. } => 74,
        }
    }
}

/// Iterator over the lines of all files, in the order named.
#[derive(Debug)]
pub struct Prompts {
    /// Files, with what they have to be the same as.
    waiting: VecDeque<(PathBuf, Option<Survey>)>,
    open: Option<OpenFile>,
    bytes_read: u64,
    bytes_total: u64,
}

#[derive(Debug)]
struct OpenFile {
    path: Arc<Path>,
    reader: BlockReader,
    lines_read: u64,
    bytes_read: u64,
    yielded: bool,
}

impl Prompts {
    /// Opens the first file and checks that every other one opens too, so that a misspelt name is
    /// found before hours of work.
    pub fn open(paths: &[PathBuf]) -> Result<Self, PromptsError> {
        if paths.is_empty() {
            return Err(PromptsError::NoFiles);
        }
        let mut bytes_total = 0;
        for path in paths {
            let error = |source| PromptsError::Open { path: path.clone(), source };
            let bytes = open_regular(path)?.metadata().map_err(error)?.len();
            if bytes == 0 {
                return Err(PromptsError::Empty(path.clone()));
            }
            bytes_total += bytes;
        }
        let waiting = paths.iter().map(|path| (path.clone(), None)).collect();
        Ok(Self { waiting, open: None, bytes_read: 0, bytes_total })
    }

    /// Reads each file, in the order named, as it was surveyed: not what was appended since, and
    /// nothing of a part that has changed. Called before the first line is taken.
    pub fn as_surveyed(mut self, surveys: &[Survey]) -> Self {
        for ((_, surveyed), survey) in self.waiting.iter_mut().zip(surveys) {
            *surveyed = Some(survey.clone());
        }
        self
    }

    /// Bytes read so far and bytes of all files, for a progress bar.
    pub fn progress(&self) -> (u64, u64) {
        let current = self.open.as_ref().map_or(0, |file| file.bytes_read);
        (self.bytes_read + current, self.bytes_total)
    }

    fn next_line(&mut self) -> Result<Option<Line>, PromptsError> {
        loop {
            let Some(file) = self.open.as_mut() else {
                let Some((path, survey)) = self.waiting.pop_front() else { return Ok(None) };
                self.open = Some(OpenFile {
                    reader: BlockReader::new(open_regular(&path)?, survey),
                    path: path.into(),
                    lines_read: 0,
                    bytes_read: 0,
                    yielded: false,
                });
                continue;
            };
            if let Some(line) = file.next_line()? {
                return Ok(Some(line));
            }
            if !file.yielded {
                return Err(PromptsError::Empty(file.path.to_path_buf()));
            }
            self.bytes_read += file.bytes_read;
            self.open = None;
        }
    }
}

impl Iterator for Prompts {
    type Item = Result<Line, PromptsError>;

    fn next(&mut self) -> Option<Self::Item> {
        let line = self.next_line().transpose();
        if matches!(line, Some(Err(_))) {
            self.waiting.clear();
            self.open = None;
        }
        line
    }
}

fn open_regular(path: &Path) -> Result<File, PromptsError> {
    let error = |source| PromptsError::Open { path: path.to_path_buf(), source };
    // The kind is looked up by name first: opening a FIFO would wait for its writer.
    if !std::fs::metadata(path).map_err(error)?.is_file() {
        return Err(error(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
    }
    File::open(path).map_err(error)
}

impl OpenFile {
    fn next_line(&mut self) -> Result<Option<Line>, PromptsError> {
        while let Some(mut raw) = read_raw_line(&mut self.reader).map_err(|it| self.fault(it))? {
            self.lines_read += 1;
            self.bytes_read += raw.consumed;
            if self.lines_read == 1 {
                raw.drop_bom();
            }
            if raw.is_blank() {
                continue;
            }
            self.yielded = true;
            let source = Source { file: Arc::clone(&self.path), line: self.lines_read };
            let parsed = match raw.parse() {
                Ok(body) => Ok(Conversation { source: source.clone(), body }),
                Err(fault) => Err(fault.at(source.clone())),
            };
            return Ok(Some(Line { source, digest: raw.digest(), parsed }));
        }
        Ok(None)
    }

    fn fault(&self, source: io::Error) -> PromptsError {
        let (path, line) = (self.path.to_path_buf(), self.lines_read);
        match source.get_ref().is_some_and(|inner| inner.is::<Changed>()) {
            true => PromptsError::Changed { path, line },
            false => PromptsError::Read { path, line, source },
        }
    }
}

/// The bytes of one line; of an overlong one only the length and the hash are kept.
struct RawLine {
    bytes: Vec<u8>,
    length: usize,
    /// Whether there is more than white space.
    holds_text: bool,
    /// Bytes taken from the file, line end included.
    consumed: u64,
    overlong: Option<blake3::Hasher>,
}

fn read_raw_line(reader: &mut impl BufRead) -> io::Result<Option<RawLine>> {
    let (bytes, length, consumed) = (Vec::new(), 0, 0);
    let mut line = RawLine { bytes, length, holds_text: false, consumed, overlong: None };
    loop {
        let available = match reader.fill_buf() {
            Ok(available) => available,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if available.is_empty() {
            return Ok((line.length > 0).then_some(line));
        }
        let end = available.iter().position(|&byte| byte == b'\n');
        let taken = end.unwrap_or(available.len());
        line.push(available.get(..taken).unwrap_or_default());
        let consumed = taken + usize::from(end.is_some());
        line.consumed += consumed as u64;
        reader.consume(consumed);
        if end.is_some() {
            // A lone "\n" is a line too: it counts, and is blank.
            line.trim_carriage_return();
            return Ok(Some(line));
        }
    }
}

impl RawLine {
    fn push(&mut self, bytes: &[u8]) {
        self.length += bytes.len();
        self.holds_text |= !bytes.iter().all(u8::is_ascii_whitespace);
        if let Some(hasher) = &mut self.overlong {
            hasher.update(bytes);
            return;
        }
        self.bytes.extend_from_slice(bytes);
        // One more byte than the limit may still be the carriage return of the line end.
        if self.bytes.len() > MAX_LINE_BYTES + 1 {
            let mut hasher = blake3::Hasher::new();
            hasher.update(&std::mem::take(&mut self.bytes));
            self.overlong = Some(hasher);
        }
    }

    fn trim_carriage_return(&mut self) {
        if self.bytes.last() == Some(&b'\r') {
            self.bytes.pop();
            self.length -= 1;
        }
    }

    fn drop_bom(&mut self) {
        if self.bytes.starts_with(BOM) {
            self.bytes.drain(..BOM.len());
            self.length -= BOM.len();
            self.holds_text = !self.bytes.iter().all(u8::is_ascii_whitespace);
        }
    }

    fn is_blank(&self) -> bool {
        !self.holds_text
    }

    fn digest(&self) -> [u8; 16] {
        let hash = match &self.overlong {
            Some(hasher) => hasher.finalize(),
            None => blake3::hash(&self.bytes),
        };
        let mut digest = [0; 16];
        digest.copy_from_slice(&hash.as_bytes()[..16]);
        digest
    }

    fn parse(&self) -> Result<Body, Fault> {
        if self.length > MAX_LINE_BYTES {
            return Err(Fault::new(
                RejectReason::LineTooLong,
                format!("{} bytes; at most {MAX_LINE_BYTES} are read", self.length),
            ));
        }
        let text = std::str::from_utf8(&self.bytes).map_err(|error| {
            Fault::new(RejectReason::NotUtf8, format!("byte {} of the line", error.valid_up_to()))
        })?;
        if nests_too_deep(&self.bytes) {
            return Err(Fault::new(
                RejectReason::JsonTooDeep,
                format!("more than {MAX_JSON_DEPTH} brackets inside one another"),
            ));
        }
        let row = serde_json::from_str(text).map_err(|error: serde_json::Error| {
            // The parser sees one line, so its line number would mislead.
            let detail = error.to_string().replace(" at line 1 column ", ", at byte ");
            Fault::new(RejectReason::BadJson, format!("one JSON object is expected: {detail}"))
        })?;
        let body = Body::parse(row)?;
        if let Body::Chat(chat) = &body {
            let keys = chat.messages.iter().flat_map(|message| message.extra.values());
            require_kept(text, keys.chain(&chat.tools))?;
        }
        Ok(body)
    }
}

/// Counts brackets outside strings; runs before the parser so that its stack stays small.
fn nests_too_deep(json: &[u8]) -> bool {
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    for &byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'[' | b'{' if !in_string => depth += 1,
            b']' | b'}' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_JSON_DEPTH {
            return true;
        }
    }
    false
}
