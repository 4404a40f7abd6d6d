//! An error as one line, for records that keep text. Knows no kind of error.

use std::error::Error;

/// The error's words and those of all its causes, outermost first, joined by `: `.
pub fn in_words(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |&error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
