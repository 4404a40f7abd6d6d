//! Ends a run that stands still: counts how long its step, evaluation or checkpoint has not gone
//! on. Knows no devices and no processes.

use std::fmt;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Looks at a run in the time of a deadline. A process that was stopped for a while (SIGSTOP) has
/// missed one look, not all of them.
const LOOKS: u32 = 20;

/// What a run is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Reading the manifest and the tokens of all samples.
    Data,
    /// Meeting the other GPUs, loading weights.
    Start,
    /// Reading batches and training on them.
    Step,
    /// Measuring acceptance on the held-out samples.
    Evaluation,
    /// Gathering a checkpoint and writing it.
    Checkpoint,
}

/// A run that stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} has not gone on for {seconds} s: a GPU, the way to another one, or a disk hangs; {}, with \
     a longer --step-deadline if it is only slow",
    place(self),
    remedy(self.phase)
)]
pub struct Standstill {
    /// What does not go on.
    pub phase: Phase,
    /// In, or after, which optimizer step.
    pub step: u64,
    /// For how long.
    pub seconds: u64,
}

impl Standstill {
    /// 75: another try may do.
    pub fn exit_code(&self) -> u8 {
        75
    }
}

fn remedy(phase: Phase) -> &'static str {
    match phase {
        Phase::Data | Phase::Start => "nothing was begun: start again",
        Phase::Step | Phase::Evaluation | Phase::Checkpoint => {
            "`trainer fit --resume RUN` continues"
        }
    }
}

fn place(stands: &Standstill) -> impl fmt::Display {
    let step = stands.step;
    match stands.phase {
        Phase::Data => "reading the data set".to_owned(),
        Phase::Start => "the start".to_owned(),
        Phase::Step => format!("step {step}"),
        Phase::Evaluation => format!("the evaluation after step {step}"),
        Phase::Checkpoint => format!("the checkpoint of step {step}"),
    }
}

/// Called, on a thread of its own, when a run stands still.
pub type OnStandstill = fn(&Standstill);

/// What is counted: where the run is, if it is watched there, and looks since it went on.
#[derive(Debug, Default)]
struct Count {
    at: Option<(Phase, u64)>,
    looks: u32,
}

impl Count {
    /// One look; where the run is if it has been there for all looks of a deadline.
    fn look(&mut self) -> Option<(Phase, u64)> {
        self.looks += 1;
        self.at.filter(|_| self.looks >= LOOKS)
    }
}

/// Told by a run how it goes on. The default watches nothing.
#[derive(Clone, Debug, Default)]
pub struct Watch {
    count: Arc<Mutex<Count>>,
    /// The thread ends when all copies are dropped.
    _looking: Option<Sender<()>>,
}

impl Watch {
    /// Starts a thread that calls `end` once when a phase has not gone on for `seconds`; 0 watches
    /// nothing. The phase before the first is not watched.
    pub fn start(seconds: u64, end: OnStandstill) -> std::io::Result<Self> {
        if seconds == 0 {
            return Ok(Self::default());
        }
        let (looking, stop) = channel();
        let watch = Self { _looking: Some(looking), ..Self::default() };
        let count = watch.count.clone();
        let look = move || {
            let pause = Duration::from_secs(seconds) / LOOKS;
            while stop.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                // The run waits for this lock at most as long as a look takes.
                let stands = lock(&count).look();
                if let Some((phase, step)) = stands {
                    return end(&Standstill { phase, step, seconds });
                }
            }
        };
        std::thread::Builder::new().name("watch".into()).spawn(look)?;
        Ok(watch)
    }

    /// The run begins a phase.
    pub fn at(&self, phase: Phase, step: u64) {
        *lock(&self.count) = Count { at: Some((phase, step)), looks: 0 };
    }

    /// The phase goes on.
    pub fn goes_on(&self) {
        lock(&self.count).looks = 0;
    }

    /// What follows takes as long as it takes, or is for another process to watch.
    pub fn rest(&self) {
        lock(&self.count).at = None;
    }
}

fn lock(count: &Mutex<Count>) -> MutexGuard<'_, Count> {
    count.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks until the run is found standing still, `most` times at most.
    fn looks(watch: &Watch, most: u32) -> Option<(u32, (Phase, u64))> {
        (1..=most).find_map(|n| Some((n, lock(&watch.count).look()?)))
    }

    #[test]
    fn a_phase_stands_still_after_a_whole_deadline_without_progress() {
        let watch = Watch::default();
        watch.at(Phase::Step, 7);
        assert_eq!(looks(&watch, LOOKS - 1), None);
        watch.goes_on();
        assert_eq!(looks(&watch, LOOKS - 1), None);
        watch.at(Phase::Checkpoint, 7);
        assert_eq!(looks(&watch, 2 * LOOKS), Some((LOOKS, (Phase::Checkpoint, 7))));
    }

    #[test]
    fn waiting_for_another_process_is_not_counted() {
        let watch = Watch::default();
        assert_eq!(looks(&watch, 3 * LOOKS), None, "before the first phase");
        watch.at(Phase::Evaluation, 3);
        watch.rest();
        assert_eq!(looks(&watch, 3 * LOOKS), None);
        watch.at(Phase::Step, 4);
        assert_eq!(looks(&watch, LOOKS - 1), None, "the deadline begins with the phase");
    }

    #[test]
    fn the_words_say_what_stands_still_where_and_what_to_do() {
        let words = |phase| Standstill { phase, step: 12, seconds: 600 }.to_string();
        let step = words(Phase::Step);
        assert!(step.starts_with("step 12 has not gone on for 600 s"), "{step}");
        assert!(step.contains("--resume") && step.contains("--step-deadline"), "{step}");
        assert!(words(Phase::Evaluation).starts_with("the evaluation after step 12"));
        let data = words(Phase::Data);
        assert!(data.starts_with("reading the data set has not gone on"), "{data}");
        assert!(data.contains("start again") && !data.contains("--resume"), "{data}");
    }
}
