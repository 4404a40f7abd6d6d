//! Standard output of both programs, and what an error in it means. Knows no command.

use std::io::{self, BufWriter, ErrorKind, Write};

use thiserror::Error;

/// Standard output, which keeps the error that ended it: what a command makes of it, as a
/// serializer does, may not say.
pub struct Output {
    to: Box<dyn Write>,
    fault: Option<io::Error>,
}

/// What the command has to say can't be written.
#[derive(Debug, Error)]
#[error("writing to standard output (what was stored stays; run again with room for the output)")]
pub struct OutputFault(#[source] io::Error);

impl OutputFault {
    /// 74, as of every error of files.
    pub fn exit_code(&self) -> u8 {
        74
    }
}

impl Output {
    /// Standard output line by line, for reports that grow.
    pub fn lines() -> Self {
        Self { to: Box::new(io::stdout().lock()), fault: None }
    }

    /// Standard output in blocks, for tables.
    pub fn blocks() -> Self {
        Self { to: Box::new(BufWriter::new(io::stdout().lock())), fault: None }
    }

    fn note<T>(&mut self, done: io::Result<T>) -> io::Result<T> {
        if let Err(error) = &done
            && error.kind() != ErrorKind::Interrupted
        {
            let same = error.raw_os_error().map(io::Error::from_raw_os_error);
            self.fault.get_or_insert(same.unwrap_or_else(|| error.kind().into()));
        }
        done
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let done = self.to.write(bytes);
        self.note(done)
    }

    fn flush(&mut self) -> io::Result<()> {
        let done = self.to.flush();
        self.note(done)
    }
}

/// What a command that ended with `outcome` comes to once its output is written out: an error that
/// is not the output's stays, and a reader that has seen enough is no failure.
pub fn written<E: From<OutputFault>>(outcome: Result<bool, E>, mut out: Output) -> Result<bool, E> {
    let failed_within = out.fault.is_some();
    // What goes wrong here is kept, too.
    let _ = out.flush();
    match (outcome, out.fault) {
        (Err(error), _) if !failed_within => Err(error),
        (outcome, Some(fault)) if fault.kind() == ErrorKind::BrokenPipe => {
            Ok(outcome.unwrap_or(true))
        }
        (_, Some(fault)) => Err(OutputFault(fault).into()),
        (outcome, None) => outcome,
    }
}
