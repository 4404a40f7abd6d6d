//! The directory of a training run: its checkpoints by step, which of them to keep, and the lock
//! that keeps a second run out. Knows no contents of a checkpoint but its state.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use super::{Best, Checkpoint, CheckpointError, Parts, SUMS};

const PREFIX: &str = "step-";

const DAMAGED: &str =
    "a checkpoint has one from the start; --allow-older goes on from an older one";

/// `RUN/`: `metrics.jsonl`, `checkpoints/step-NNNNNNNN/`, `LOCK`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunDir {
    root: PathBuf,
}

/// Held while a process trains in a run directory; the kernel releases it with the process.
#[derive(Debug)]
pub struct RunLock {
    _file: File,
}

impl RunDir {
    /// Names the directory; touches nothing.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// `metrics.jsonl`.
    pub fn metrics(&self) -> PathBuf {
        self.root.join("metrics.jsonl")
    }

    fn checkpoints_dir(&self) -> PathBuf {
        self.root.join("checkpoints")
    }

    /// Where the checkpoint of a step is or will be.
    pub fn checkpoint(&self, step: u64) -> PathBuf {
        self.checkpoints_dir().join(format!("{PREFIX}{step:08}"))
    }

    pub(super) fn temporary(&self, step: u64) -> PathBuf {
        self.checkpoints_dir().join(format!(".{PREFIX}{step:08}.{}.tmp", std::process::id()))
    }

    /// Creates the directory, takes its lock (a held one is an error that names the holder) and
    /// removes what an earlier process left half written.
    pub fn claim(&self) -> Result<RunLock, CheckpointError> {
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| CheckpointError::Io { path, source }
        };
        let dir = self.checkpoints_dir();
        std::fs::create_dir_all(&dir).map_err(io(&dir))?;
        let path = self.root.join("LOCK");
        let options =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).clone();
        let mut file = options.open(&path).map_err(io(&path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                // Only for the message: an unreadable lock file is still a held lock.
                let _ = file.read_to_string(&mut holder);
                let (path, holder) = (self.root.clone(), holder.trim().to_owned());
                return Err(CheckpointError::Locked { path, holder });
            }
            Err(TryLockError::Error(source)) => return Err(io(&path)(source)),
        }
        file.set_len(0).map_err(io(&path))?;
        file.write_all(format!("process {}\n", std::process::id()).as_bytes())
            .map_err(io(&path))?;
        for entry in self.names()? {
            if entry.starts_with('.') && entry.ends_with(".tmp") {
                let stale = dir.join(entry);
                std::fs::remove_dir_all(&stale).map_err(io(&stale))?;
            }
        }
        Ok(RunLock { _file: file })
    }

    fn names(&self) -> Result<Vec<String>, CheckpointError> {
        let dir = self.checkpoints_dir();
        let read = |source| CheckpointError::Io { path: dir.clone(), source };
        match std::fs::read_dir(&dir) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(read(error)),
            Ok(entries) => entries
                .map(|entry| Ok(entry.map_err(read)?.file_name().to_string_lossy().into_owned()))
                .collect(),
        }
    }

    /// Steps of all complete checkpoints, ascending.
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        let mut steps = self.all_steps()?;
        steps.retain(|&step| self.checkpoint(step).join(SUMS).is_file());
        Ok(steps)
    }

    /// Steps of everything that is named like a checkpoint, ascending.
    fn all_steps(&self) -> Result<Vec<u64>, CheckpointError> {
        let step = |name: String| name.strip_prefix(PREFIX).and_then(|digits| digits.parse().ok());
        let mut steps: Vec<u64> = self.names()?.into_iter().filter_map(step).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// The newest checkpoint. One without its list of digests is an error: checkpoints appear
    /// whole, and only older ones are ever removed.
    pub fn latest(&self) -> Result<PathBuf, CheckpointError> {
        let Some(&step) = self.all_steps()?.last() else {
            return Err(CheckpointError::None { path: self.root.clone() });
        };
        let newest = self.checkpoint(step);
        match newest.join(SUMS).is_file() {
            true => Ok(newest),
            false => Err(CheckpointError::Missing { path: newest.join(SUMS), why: DAMAGED }),
        }
    }

    /// Renames damaged checkpoints to `damaged-step-NNNNNNNN` (a second one of the step to
    /// `damaged-step-NNNNNNNN-2`) until the newest is sound, and says so. Every file of the newest
    /// is read.
    pub fn set_damaged_aside(&self) -> Result<(), CheckpointError> {
        let _lock = self.claim()?;
        let rename = |step: u64, error: &CheckpointError| {
            let aside = self.aside(step);
            tracing::warn!("{error}: set aside as {}", aside.display());
            Ok(shared::durable::publish_dir(&self.checkpoint(step), &aside)?)
        };
        self.find_sound(rename).map(drop)
    }

    /// A name for a damaged checkpoint that no earlier one of its step has.
    fn aside(&self, step: u64) -> PathBuf {
        let name = format!("damaged-{PREFIX}{step:08}");
        let later = (2..).map(|count| format!("{name}-{count}"));
        let mut names = std::iter::once(name.clone()).chain(later);
        let free = names.find(|name| !self.checkpoints_dir().join(name).exists());
        self.checkpoints_dir().join(free.unwrap_or(name))
    }

    /// The newest checkpoint whose every byte is what was written; renames nothing, so that it can
    /// be asked for while another process sets the others aside.
    pub fn newest_sound(&self) -> Result<PathBuf, CheckpointError> {
        self.find_sound(|_, _| Ok(()))
    }

    /// The newest sound checkpoint; `damaged` is called for each newer one.
    fn find_sound(
        &self,
        damaged: impl Fn(u64, &CheckpointError) -> Result<(), CheckpointError>,
    ) -> Result<PathBuf, CheckpointError> {
        for &step in self.all_steps()?.iter().rev() {
            let path = self.checkpoint(step);
            match Checkpoint::load(&path, Parts::Everything) {
                Ok(_) => return Ok(path),
                Err(error) if error.is_damage() => damaged(step, &error)?,
                Err(error) => return Err(error),
            }
        }
        Err(CheckpointError::None { path: self.root.clone() })
    }

    /// The checkpoint with the longest accepted drafts on held-out samples; the newest when none
    /// was evaluated.
    pub fn best(&self) -> Result<PathBuf, CheckpointError> {
        let latest = self.latest()?;
        let state = Checkpoint::load_state(&latest)?;
        Ok(self.existing(state.best).map_or(latest, |best| self.checkpoint(best.step)))
    }

    /// The same, or `None` where its checkpoint is gone.
    pub fn existing(&self, best: Option<Best>) -> Option<Best> {
        let there = |best: &Best| self.checkpoint(best.step).join(SUMS).is_file();
        let kept = best.filter(there);
        if let (Some(best), None) = (best, kept) {
            tracing::warn!("the best checkpoint, of step {}, is gone", best.step);
        }
        kept
    }

    /// The checkpoint that `path` names: itself, or the best one of a run directory.
    pub fn resolve(path: &Path) -> Result<PathBuf, CheckpointError> {
        if !path.exists() {
            return Err(CheckpointError::NotThere(path.to_owned()));
        }
        match path.join("checkpoints").is_dir() {
            true => Self::new(path).best(),
            false => Ok(path.to_owned()),
        }
    }

    /// Removes all but the `keep` newest checkpoints, the best one, and those that a kept one names
    /// as its best: `--allow-older` may go back to it.
    pub fn prune(&self, keep: usize, best: Option<Best>) -> Result<(), CheckpointError> {
        let steps = self.steps()?;
        let (old, newest) = steps.split_at(steps.len().saturating_sub(keep));
        let named = newest.iter().filter_map(|&step| {
            // A damaged one names nothing.
            Checkpoint::load_state(&self.checkpoint(step)).ok()?.best
        });
        let kept: Vec<u64> = named.chain(best).map(|best| best.step).collect();
        for &step in old.iter().filter(|step| !kept.contains(step)) {
            let path = self.checkpoint(step);
            // First the list of digests: without it the directory is no checkpoint any more,
            // so one half removed is never taken for one.
            let removed =
                std::fs::remove_file(path.join(SUMS)).and_then(|()| std::fs::remove_dir_all(&path));
            removed.map_err(|source| CheckpointError::Io { path, source })?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    #[test]
    fn the_best_checkpoint_outlives_newer_ones() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir::new(dir.path());
        for step in 1..=4 {
            std::fs::create_dir_all(run_dir.checkpoint(step)).unwrap();
            std::fs::write(run_dir.checkpoint(step).join("BLAKE3SUMS"), "").unwrap();
        }
        run_dir.prune(2, Some(Best { step: 1, acceptance_length: 2.5 })).unwrap();
        assert_eq!(run_dir.steps().unwrap(), [1, 3, 4]);
        run_dir.prune(1, None).unwrap();
        assert_eq!(run_dir.steps().unwrap(), [4]);
    }

    #[test]
    fn one_run_directory_has_one_writer() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir::new(dir.path());
        let lock = run_dir.claim().unwrap();
        let error = run_dir.claim().unwrap_err();
        assert_eq!(error.exit_code(), 73);
        assert!(error.to_string().contains("process"), "{error}");
        drop(lock);
        run_dir.claim().unwrap();
    }
}
