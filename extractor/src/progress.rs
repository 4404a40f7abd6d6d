//! Progress of a run in tokens: a bar on a terminal, a log line every ten seconds elsewhere. Says
//! which side waits, the target or the disk. Knows nothing of what the tokens are.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// A signal is answered after a batch, and supervisors kill 30 s after SIGTERM.
const LONG_BATCH_S: f64 = 20.0;

/// Where the time of a run goes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Waits {
    /// Seconds the pipeline waited for the states: for the target model, or for files.
    pub target_s: f64,
    /// Seconds the pipeline waited for shards and manifest.
    pub disk_s: f64,
}

/// Counts tokens towards a known total.
pub struct Progress {
    bar: ProgressBar,
    started: Instant,
    logged: Instant,
    total_tokens: u64,
    tokens: u64,
    waits: Waits,
    warned: bool,
    giver: &'static str,
}

impl Progress {
    /// Starts the clock for `total_tokens`, whose states `giver` gives.
    pub fn start(total_tokens: u64, giver: &'static str) -> Self {
        let bar = ProgressBar::new(total_tokens);
        let style = ProgressStyle::with_template(
            "{bar:30} {human_pos}/{human_len} tok  {per_sec}  ETA {eta}  {msg}",
        );
        if let Ok(style) = style {
            bar.set_style(style);
        }
        let now = Instant::now();
        Self {
            bar,
            started: now,
            logged: now,
            total_tokens,
            tokens: 0,
            waits: Waits::default(),
            warned: false,
            giver,
        }
    }

    /// Adds one finished batch.
    pub fn advance(&mut self, tokens: u64, target_s: f64, disk_s: f64) {
        self.tokens += tokens;
        self.waits.target_s += target_s;
        self.waits.disk_s += disk_s;
        if target_s > LONG_BATCH_S && !self.warned {
            self.warned = true;
            tracing::warn!(
                "a batch of {tokens} tokens took {target_s:.0} s: a stop asked for by SIGTERM may \
                 take longer than the 30 s that supervisors wait; lower --batch-tokens"
            );
        }
        self.bar.set_position(self.tokens);
        self.bar.set_message(self.share_of_waits());
        if self.bar.is_hidden() && self.logged.elapsed() >= LOG_INTERVAL {
            self.logged = Instant::now();
            self.log();
        }
    }

    fn log(&self) {
        let rate = self.tokens_per_second();
        let left = self.total_tokens.saturating_sub(self.tokens) as f64;
        tracing::info!(
            "{}/{} tokens, {rate:.0} tok/s, ETA {:.0} s, {}",
            self.tokens,
            self.total_tokens,
            left / rate.max(1e-9),
            self.share_of_waits()
        );
    }

    fn share_of_waits(&self) -> String {
        let elapsed = self.seconds().max(1e-9);
        format!(
            "{} {:.0} %, disk {:.0} %",
            self.giver,
            100.0 * self.waits.target_s / elapsed,
            100.0 * self.waits.disk_s / elapsed
        )
    }

    /// Tokens finished so far.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Seconds since the start.
    pub fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// Mean rate since the start.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds().max(1e-9)
    }

    /// Takes the bar off the terminal.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
