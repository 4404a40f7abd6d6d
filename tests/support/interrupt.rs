//! Ends running children at moments that a seed chooses: after so many lines of their log and a
//! few more microseconds. Knows nothing of what the children do.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

/// splitmix64: the same seed gives the same numbers for ever.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// A number below `limit`, which must not be 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}

/// A child whose log is read line by line.
#[derive(Debug)]
pub struct Watched {
    child: Child,
    log: BufReader<ChildStderr>,
    text: String,
}

impl Watched {
    /// Starts the command with its stderr in our hands and no standard output.
    pub fn start(mut command: Command) -> std::io::Result<Self> {
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        let log = child.stderr.take().ok_or(std::io::ErrorKind::BrokenPipe)?;
        Ok(Self { child, log: BufReader::new(log), text: String::new() })
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Reads `lines` lines of the log, or all that there are.
    pub fn wait_lines(&mut self, lines: u64) {
        for _ in 0..lines {
            if !self.wait_line() {
                return;
            }
        }
    }

    /// Reads until a line contains `text`; false when the log ends before.
    pub fn wait_for(&mut self, text: &str) -> bool {
        loop {
            let before = self.text.len();
            if !self.wait_line() {
                return false;
            }
            if self.text[before..].contains(text) {
                return true;
            }
        }
    }

    fn wait_line(&mut self) -> bool {
        self.log.read_line(&mut self.text).is_ok_and(|bytes| bytes > 0)
    }

    /// Lets the child go on for some microseconds, however busy the machine is.
    pub fn linger(&self, micros: u64) {
        let end = Instant::now() + Duration::from_micros(micros);
        while Instant::now() < end {
            std::thread::yield_now();
        }
    }

    /// SIGKILL. True when the child was still running.
    pub fn kill(mut self) -> bool {
        let running = matches!(self.child.try_wait(), Ok(None));
        // It may end by itself in between; either way it is gone after the wait.
        let _ = self.child.kill();
        let status = self.child.wait();
        running && !status.is_ok_and(|status| status.success())
    }

    /// Sends a signal by its name, as `TERM`.
    pub fn signal(&self, name: &str) {
        let sent =
            Command::new("sh").args(["-c", &format!("kill -{name} {}", self.child.id())]).status();
        assert!(sent.is_ok_and(|status| status.success()), "the signal was not sent");
    }

    /// Waits for the end: the exit code (-1 after a signal) and the whole log.
    pub fn finish(mut self) -> (i32, String) {
        // A log that is not UTF-8 is a failure of the test that reads it.
        let _ = self.log.read_to_string(&mut self.text);
        let code = self.child.wait().ok().and_then(|status| status.code());
        (code.unwrap_or(-1), self.text)
    }
}
