//! Lists of digests beside the files they are of. Knows nothing of what the files hold.

use crate::digest::Digest;

/// Name of a list.
pub const SUMS: &str = "BLAKE3SUMS";

/// The line of a file: 64 hex digits, two spaces, its name.
pub fn line(name: &str, digest: &Digest) -> String {
    format!("{digest}  {name}\n")
}

/// Names and digests, line by line; `None` for a line that is none.
pub fn entries(list: &str) -> impl Iterator<Item = Option<(&str, Digest)>> {
    list.lines().map(|line| {
        let (digest, name) = line.split_once("  ")?;
        Some((name, digest.parse().ok()?))
    })
}
