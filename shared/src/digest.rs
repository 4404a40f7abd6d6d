//! BLAKE3 digests, computed while bytes are written or read. Knows nothing of what is hashed.

use std::fmt;
use std::io::{self, Read, Write};
use std::str::FromStr;

use thiserror::Error;

/// 32 bytes of BLAKE3.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Digest of bytes in memory.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    /// Digest and number of bytes of all that `reader` still holds.
    pub fn of_reader(mut reader: impl Read) -> io::Result<(Self, u64)> {
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; 1 << 20];
        let mut bytes = 0;
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => return Ok((Self(*hasher.finalize().as_bytes()), bytes)),
                Ok(read) => {
                    hasher.update(buffer.get(..read).unwrap_or_default());
                    bytes += read as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// Text that is not 64 hex digits.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("`{0}` is not a digest: 64 hex digits are expected")]
pub struct MalformedDigest(String);

impl FromStr for Digest {
    type Err = MalformedDigest;

    fn from_str(text: &str) -> Result<Self, MalformedDigest> {
        let malformed = || MalformedDigest(text.chars().take(80).collect());
        blake3::Hash::from_hex(text).map(|hash| Self(*hash.as_bytes())).map_err(|_| malformed())
    }
}

/// Hashes what passes through on its way to `inner`.
pub struct HashingWriter<W> {
    inner: W,
    hasher: blake3::Hasher,
    bytes: u64,
}

impl<W: Write> HashingWriter<W> {
    /// Starts with nothing hashed.
    pub fn new(inner: W) -> Self {
        Self { inner, hasher: blake3::Hasher::new(), bytes: 0 }
    }

    /// The inner writer, the digest of all bytes it took, and their number.
    pub fn finish(self) -> (W, Digest, u64) {
        (self.inner, Digest(*self.hasher.finalize().as_bytes()), self.bytes)
    }
}

impl<W: Write> Write for HashingWriter<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        // Only what was taken is hashed: a short write is no error.
        let taken = self.inner.write(buffer)?;
        self.hasher.update(buffer.get(..taken).unwrap_or_default());
        self.bytes += taken as u64;
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
