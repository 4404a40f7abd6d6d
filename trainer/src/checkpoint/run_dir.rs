//! The directory of a training run: its checkpoints by step, which of them to keep, and the lock
//! that keeps a second run out. Knows no contents of a checkpoint but its state.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use shared::durable::{publish_dir, publish_dir_with};
use shared::files::{Files, RealFiles};

use super::{Best, Checkpoint, CheckpointError, Parts, SUMS};

const PREFIX: &str = "step-";

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
    pub fn all_steps(&self) -> Result<Vec<u64>, CheckpointError> {
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
            false => Err(CheckpointError::Missing {
                path: newest.join(SUMS),
                why: "a checkpoint has one from the start",
            }),
        }
    }

    /// Renames damaged checkpoints to `damaged-step-NNNNNNNN` (a second one of the step to
    /// `damaged-step-NNNNNNNN-2`) until the newest is sound, and says so. Every file of the newest
    /// is read.
    pub fn set_damaged_aside(&self) -> Result<(), CheckpointError> {
        // Of a misspelt directory nothing is made.
        if self.all_steps()?.is_empty() {
            return Err(CheckpointError::None { path: self.root.clone() });
        }
        let _lock = self.claim()?;
        let rename = |step: u64, error: &CheckpointError| {
            let aside = self.aside(step);
            tracing::warn!("{error}: set aside as {}", aside.display());
            Ok(publish_dir(&self.checkpoint(step), &aside)?)
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

    /// The checkpoint that `path` names and where it is: itself, or the best one of a run
    /// directory. Where that is damaged, the error names a sound one.
    pub fn open(path: &Path, parts: Parts) -> Result<(PathBuf, Checkpoint), CheckpointError> {
        if !path.exists() {
            return Err(CheckpointError::NotThere(path.to_owned()));
        }
        let read = |path: PathBuf| Checkpoint::load(&path, parts).map(|read| (path, read));
        if !path.join("checkpoints").is_dir() {
            return read(path.to_owned());
        }
        let run = Self::new(path);
        run.best().and_then(read).map_err(|cause| match cause.is_damage() {
            true => run.damaged_best(cause, parts),
            false => cause,
        })
    }

    fn damaged_best(&self, cause: CheckpointError, parts: Parts) -> CheckpointError {
        let steps = self.all_steps().unwrap_or_default();
        let mut newest_first = steps.iter().rev().map(|&step| self.checkpoint(step));
        let sound = newest_first.find(|path| Checkpoint::load(path, parts).is_ok());
        CheckpointError::Best { run: self.root.clone(), sound, cause: Box::new(cause) }
    }

    /// Renames a `metrics.jsonl` that belongs to no checkpoint to the first free one of
    /// `metrics-1.jsonl`, `metrics-2.jsonl` and on, and says so.
    pub fn set_metrics_aside(&self) -> Result<(), CheckpointError> {
        let path = self.metrics();
        let io = |source| CheckpointError::Io { path: path.clone(), source };
        match std::fs::metadata(&path) {
            Ok(found) if found.len() > 0 => {}
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(io(error)),
        }
        let mut names = (1..).map(|count| self.root.join(format!("metrics-{count}.jsonl")));
        let Some(aside) = names.find(|name| !name.exists()) else { return Ok(()) };
        tracing::warn!("{} is of no checkpoint here: kept as {}", path.display(), aside.display());
        let renamed = RealFiles.publish(&path, &aside);
        renamed.and_then(|()| RealFiles.sync_dir(&self.root)).map_err(io)
    }

    /// Removes all but the `keep` newest checkpoints, the best one, and those that a kept one names
    /// as its best: `--allow-older` may go back to it.
    pub fn prune(&self, keep: usize, best: Option<Best>) -> Result<(), CheckpointError> {
        self.prune_with(&RealFiles, keep, best)
    }

    fn prune_with(
        &self,
        files: &dyn Files,
        keep: usize,
        best: Option<Best>,
    ) -> Result<(), CheckpointError> {
        let steps = self.steps()?;
        let (old, newest) = steps.split_at(steps.len().saturating_sub(keep));
        let named = newest.iter().filter_map(|&step| {
            // A damaged one names nothing.
            Checkpoint::load_state(&self.checkpoint(step)).ok()?.best
        });
        let kept: Vec<u64> = named.chain(best).map(|best| best.step).collect();
        for &step in old.iter().filter(|step| !kept.contains(step)) {
            // One half removed is under a name that no checkpoint has, and that the next start
            // sweeps.
            let path = self.checkpoints_dir().join(format!(".pruned-{PREFIX}{step:08}.tmp"));
            publish_dir_with(files, &self.checkpoint(step), &path)?;
            let removed = files.remove_dir(&path);
            removed.map_err(|source| CheckpointError::Io { path, source })?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use std::ffi::OsString;
    use std::io;
    use std::sync::Mutex;

    use shared::files::ProductFile;

    use super::*;

    /// The real file system until `left` operations were made; the next one is half done and
    /// fails, as if the process had been killed in it, and so do all later ones.
    #[derive(Debug)]
    struct Stops {
        left: Mutex<u32>,
    }

    impl Stops {
        fn after(operations: u32) -> Self {
            Self { left: Mutex::new(operations) }
        }

        fn go_on(&self) -> io::Result<()> {
            let mut left = self.left.lock().unwrap();
            *left = left.checked_sub(1).ok_or_else(|| io::Error::other("stopped"))?;
            Ok(())
        }
    }

    impl Files for Stops {
        fn create_new(&self, path: &Path) -> io::Result<Box<dyn ProductFile>> {
            self.go_on().and_then(|()| RealFiles.create_new(path))
        }

        fn open_read(&self, path: &Path) -> io::Result<File> {
            self.go_on().and_then(|()| RealFiles.open_read(path))
        }

        fn publish(&self, from: &Path, to: &Path) -> io::Result<()> {
            self.go_on().and_then(|()| RealFiles.publish(from, to))
        }

        fn replace(&self, from: &Path, to: &Path) -> io::Result<()> {
            self.go_on().and_then(|()| RealFiles.replace(from, to))
        }

        fn sync_dir(&self, path: &Path) -> io::Result<()> {
            self.go_on().and_then(|()| RealFiles.sync_dir(path))
        }

        fn create_dir(&self, path: &Path) -> io::Result<()> {
            self.go_on().and_then(|()| RealFiles.create_dir(path))
        }

        fn remove_file(&self, path: &Path) -> io::Result<()> {
            self.go_on().and_then(|()| RealFiles.remove_file(path))
        }

        fn remove_dir(&self, path: &Path) -> io::Result<()> {
            let stopped = self.go_on();
            if stopped.is_err() {
                RealFiles.remove_file(&path.join(SUMS))?;
            }
            stopped.and_then(|()| RealFiles.remove_dir(path))
        }

        fn list(&self, path: &Path) -> io::Result<Vec<OsString>> {
            self.go_on().and_then(|()| RealFiles.list(path))
        }
    }

    fn four_checkpoints(root: &Path) -> RunDir {
        let run = RunDir::new(root);
        for step in 1..=4 {
            std::fs::create_dir_all(run.checkpoint(step)).unwrap();
            for name in [SUMS, "weights.safetensors"] {
                std::fs::write(run.checkpoint(step).join(name), "").unwrap();
            }
        }
        run
    }

    #[test]
    fn pruning_that_is_stopped_anywhere_leaves_nothing_for_good() {
        let (mut stops, mut swept) = (0, 0);
        loop {
            let dir = tempfile::tempdir().unwrap();
            let run = four_checkpoints(dir.path());
            let pruned = run.prune_with(&Stops::after(stops), 2, None);
            assert_eq!(run.all_steps().unwrap(), run.steps().unwrap(), "half of one, {stops}");
            assert!(run.steps().unwrap().ends_with(&[3, 4]));
            // A start, and the next pruning.
            let before = run.names().unwrap().len();
            run.claim().unwrap();
            swept += before - run.names().unwrap().len();
            run.prune(2, None).unwrap();
            assert_eq!(run.steps().unwrap(), [3, 4]);
            assert_eq!(run.names().unwrap().len(), 2, "{:?}", run.names());
            if pruned.is_ok() {
                break;
            }
            stops += 1;
        }
        // Both directories were caught under their other name: synced, and half removed.
        assert_eq!(swept, 4, "{stops} operations");
    }
}
