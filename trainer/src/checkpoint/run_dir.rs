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

    /// Renames damaged checkpoints to `damaged-step-NNNNNNNN` until the newest is sound, and says
    /// so. Every file of the newest is read.
    pub fn set_damaged_aside(&self) -> Result<(), CheckpointError> {
        let _lock = self.claim()?;
        let rename = |step: u64, error: &CheckpointError| {
            let aside = self.checkpoints_dir().join(format!("damaged-{PREFIX}{step:08}"));
            tracing::warn!("{error}: set aside as {}", aside.display());
            Ok(shared::durable::publish_dir(&self.checkpoint(step), &aside)?)
        };
        self.find_sound(rename).map(drop)
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
        Ok(state.best.map_or(latest, |best| self.checkpoint(best.step)))
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

    /// Removes all but the `keep` newest checkpoints and the best one.
    pub fn prune(&self, keep: usize, best: Option<Best>) -> Result<(), CheckpointError> {
        let steps = self.steps()?;
        for &step in steps.iter().take(steps.len().saturating_sub(keep)) {
            if best.is_none_or(|best| best.step != step) {
                let path = self.checkpoint(step);
                // First the list of digests: without it the directory is no checkpoint any more,
                // so one half removed is never taken for one.
                let removed = std::fs::remove_file(path.join(SUMS))
                    .and_then(|()| std::fs::remove_dir_all(&path));
                removed.map_err(|source| CheckpointError::Io { path, source })?;
            }
        }
        Ok(())
    }
}
