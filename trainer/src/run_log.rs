//! What a run shows: `metrics.jsonl` with slash names, a bar with rate and ETA on a terminal, log
//! lines elsewhere. Knows no model.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value};
use shared::durable;
use thiserror::Error;

/// Time between log lines where there is no terminal.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// Names of what an evaluation gives start so.
const EVALUATION: &str = "eval/";

/// Values of one optimizer step, by name.
pub type Record = Map<String, Value>;

/// Appends records and shows progress.
#[derive(Debug)]
pub struct RunLog {
    path: PathBuf,
    file: File,
    bar: ProgressBar,
    last_line: Instant,
    started: Instant,
    first_step: u64,
    total_steps: u64,
}

/// The log that could not be written.
#[derive(Debug, Error)]
pub enum RunLogError {
    /// The operating system refused.
    #[error("writing {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Its reason.
        #[source]
        source: io::Error,
    },
    /// Rewriting it after a resume.
    #[error(transparent)]
    Durable(#[from] shared::DurableError),
}

impl RunLog {
    /// Opens the log of a run that continues after `step`, whose evaluation may be part of what it
    /// continues from (`evaluated`): records that will be made again are removed.
    pub fn open(
        path: &Path,
        (step, evaluated): (u64, bool),
        total_steps: u64,
    ) -> Result<Self, RunLogError> {
        let io = |source| RunLogError::Io { path: path.to_owned(), source };
        if path.exists() {
            let bytes = std::fs::read(path).map_err(io)?;
            let kept = kept(&bytes, (step, evaluated), path);
            if kept != bytes {
                durable::write_file(path, &kept)?;
            }
        }
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(io)?;
        let bar = match io::stderr().is_terminal() {
            true => ProgressBar::new(total_steps).with_style(style()),
            false => ProgressBar::hidden(),
        };
        bar.set_position(step);
        let now = Instant::now();
        Ok(Self {
            path: path.to_owned(),
            file,
            bar,
            last_line: now,
            started: now,
            first_step: step,
            total_steps,
        })
    }

    /// Appends a record of a step.
    pub fn record(&mut self, step: u64, mut values: Record) -> Result<(), RunLogError> {
        let mut line = Map::new();
        line.insert("step".to_owned(), step.into());
        line.append(&mut values);
        let mut text = Value::Object(line).to_string();
        text.push('\n');
        self.file
            .write_all(text.as_bytes())
            .map_err(|source| RunLogError::Io { path: self.path.clone(), source })
    }

    /// Shows that a step is done; `message` is a short state such as loss and acceptance.
    pub fn progress(&mut self, step: u64, message: &str) {
        tracing::trace!(target: "aerie::steps", step, message);
        self.bar.set_position(step);
        self.bar.set_message(message.to_owned());
        let last = step == self.total_steps;
        if self.bar.is_hidden() && (last || self.last_line.elapsed() >= LOG_EVERY) {
            self.last_line = Instant::now();
            let done = (step - self.first_step).max(1) as f64;
            let left = self.total_steps.saturating_sub(step) as f64;
            let eta = self.started.elapsed().as_secs_f64() / done * left;
            tracing::info!("step {step}/{}  {message}  eta {eta:.0} s", self.total_steps);
        }
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

fn style() -> ProgressStyle {
    let template = "{bar:30} {pos}/{len} steps  {per_sec}  eta {eta}  {msg}";
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// The lines of a log that stay. The last one may be torn; others that are no records are damaged.
fn kept(bytes: &[u8], (step, evaluated): (u64, bool), path: &Path) -> Vec<u8> {
    let (mut kept, mut damaged) = (Vec::new(), 0);
    for line in bytes.split_inclusive(|&byte| byte == b'\n') {
        let record: Option<Record> = serde_json::from_slice(line).ok();
        let whole = line.ends_with(b"\n");
        match record.and_then(|record| Some((record.get("step")?.as_u64()?, record))) {
            Some((at, record)) => {
                let evaluation = record.keys().any(|name| name.starts_with(EVALUATION));
                if at < step || at == step && (evaluated || !evaluation) {
                    kept.extend_from_slice(line.trim_ascii_end());
                    kept.push(b'\n');
                }
            }
            None => damaged += usize::from(whole),
        }
    }
    if damaged > 0 {
        let path = path.display();
        tracing::warn!("{damaged} lines of {path} are damaged, and were left out");
    }
    kept
}

/// `name_0`, `name_1`, ... for the values of each depth.
pub fn put_depths(record: &mut Record, name: &str, values: &[f64]) {
    for (depth, value) in values.iter().enumerate() {
        record.insert(format!("{name}_{depth}"), (*value).into());
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    #[test]
    fn records_after_the_resumed_step_are_removed_and_a_torn_line_too() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut log = RunLog::open(&path, (0, false), 9).unwrap();
        for step in 1..=4 {
            let mut record = Record::new();
            put_depths(&mut record, "train/acc", &[0.5, 0.25]);
            log.record(step, record).unwrap();
        }
        std::fs::write(&path, std::fs::read_to_string(&path).unwrap() + "{\"step\": 2, \"tr")
            .unwrap();
        RunLog::open(&path, (2, false), 9).unwrap();
        let lines = std::fs::read_to_string(&path).unwrap();
        let expected = "{\"step\":1,\"train/acc_0\":0.5,\"train/acc_1\":0.25}\n\
                        {\"step\":2,\"train/acc_0\":0.5,\"train/acc_1\":0.25}\n";
        assert_eq!(lines, expected);
    }

    /// A process that made up for an evaluation and was killed before its next checkpoint leaves a
    /// record of what the next process will measure again.
    #[test]
    fn an_evaluation_that_is_made_again_has_one_record() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let lines = "{\"step\":1,\"eval/loss_0\":2.0}\n{\"step\":2,\"lr\":0.5}\n\
                     {\"step\":2,\"eval/loss_0\":1.0}\n";
        std::fs::write(&path, lines).unwrap();
        let read = || std::fs::read_to_string(&path).unwrap();
        RunLog::open(&path, (2, true), 9).unwrap();
        assert_eq!(read(), lines);
        RunLog::open(&path, (2, false), 9).unwrap();
        assert_eq!(read().lines().collect::<Vec<_>>(), lines.lines().take(2).collect::<Vec<_>>());
    }

    #[test]
    fn a_damaged_byte_costs_its_line_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        std::fs::write(&path, b"{\"step\":1}\n{\"st\xffep\":2}\n{\"step\":3}\n").unwrap();
        RunLog::open(&path, (3, false), 9).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"{\"step\":1}\n{\"step\":3}\n");
    }
}
