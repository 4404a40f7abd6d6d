//! A group of ranks as one target: a thread a rank, one deadline a batch, the first error wins.
//! Knows nothing of what a rank computes.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use shared::Digest;

use super::CacheId;
use super::error::TargetError;
use super::model::{ForwardOutput, ForwardRequest};

/// What the group asks of every rank.
#[derive(Clone, Debug)]
pub(super) enum RankCommand {
    /// Run a batch before the deadline.
    Forward { request: Arc<ForwardRequest>, batch: u64, deadline: Instant },
    /// Forget a cache.
    DropCache(CacheId),
}

/// What a rank answers. There is one kind of answer, whatever was asked for.
#[derive(Debug)]
pub(super) struct RankReply {
    rank: usize,
    /// What the rank was given, by its own reckoning.
    received: Option<Digest>,
    outcome: Result<ForwardOutput, TargetError>,
}

/// The work of one rank, on its own thread.
pub(super) trait RankWorker {
    /// Runs one batch.
    fn forward(
        &mut self,
        request: &ForwardRequest,
        batch: u64,
        deadline: Instant,
    ) -> Result<ForwardOutput, TargetError>;

    /// Forgets a cache.
    fn drop_cache(&mut self, id: CacheId);

    /// Does something to the device, in tests on one.
    #[cfg(test)]
    fn spoil(&mut self, _how: super::fault::Spoil) {}

    /// Digest of the batch as this rank has it.
    fn received(&self, request: &ForwardRequest) -> Digest {
        request.digest()
    }
}

/// What the group waits for.
struct Awaited {
    deadline: Instant,
    batch: Digest,
}

/// Ends the group's collective with a reason.
pub(super) type EndGroup = Arc<dyn Fn(&str) + Send + Sync>;

/// The threads of a group.
pub(super) struct Ranks {
    commands: Vec<Sender<RankCommand>>,
    replies: Receiver<RankReply>,
    threads: Vec<JoinHandle<()>>,
    end: EndGroup,
    limit: Duration,
    batch: u64,
    ended: bool,
    /// A rank has not answered in time.
    hangs: bool,
}

/// How long ranks that were ended may take to give their memory back.
const PATIENCE: Duration = Duration::from_secs(10);

impl Ranks {
    /// Starts a thread a rank. Each calls `make` with its rank and answers when it is ready.
    pub(super) fn start<W: RankWorker>(
        world_size: usize,
        limit: Duration,
        end: EndGroup,
        make: impl Fn(usize) -> Result<W, TargetError> + Send + Sync + 'static,
    ) -> Result<Self, TargetError> {
        let make = Arc::new(make);
        let (reply, replies) = channel();
        // A subscriber that was set for this thread only hears the ranks too.
        let subscriber = tracing::dispatcher::get_default(tracing::Dispatch::clone);
        let mut ranks = Self {
            commands: Vec::new(),
            replies,
            threads: Vec::new(),
            end,
            limit,
            batch: 0,
            ended: false,
            hangs: false,
        };
        for rank in 0..world_size {
            let (command, commands) = channel();
            let (make, reply, end) = (Arc::clone(&make), reply.clone(), Arc::clone(&ranks.end));
            let subscriber = subscriber.clone();
            let body = move || {
                let _guard = tracing::dispatcher::set_default(&subscriber);
                serve(rank, &*make, &commands, (&reply, &end));
            };
            let thread = std::thread::Builder::new().name(format!("rank-{rank}")).spawn(body);
            let thread = thread.map_err(|source| {
                // Those that did start may wait for this one: they are not joined.
                ranks.ended = true;
                TargetError::RankThread { rank, source }
            })?;
            ranks.commands.push(command);
            ranks.threads.push(thread);
        }
        // Loading is bounded by the disk, not by the deadline of a batch.
        ranks.collect(None)?;
        Ok(ranks)
    }

    /// Runs one batch on every rank. Outputs are in rank order. Any error ends the group.
    pub(super) fn forward(
        &mut self,
        request: ForwardRequest,
    ) -> Result<Vec<ForwardOutput>, TargetError> {
        if self.ended {
            return Err(TargetError::GroupEnded);
        }
        self.batch += 1;
        let deadline = Instant::now() + self.limit;
        let awaited = Awaited { deadline, batch: request.digest() };
        let request = Arc::new(request);
        for command in &self.commands {
            let request = Arc::clone(&request);
            let forward = RankCommand::Forward { request, batch: self.batch, deadline };
            if command.send(forward).is_err() {
                self.ended = true;
                return Err(TargetError::GroupEnded);
            }
        }
        self.collect(Some(awaited))
    }

    /// Number of the last batch, from 1.
    pub(super) fn batch(&self) -> u64 {
        self.batch
    }

    /// Tells every rank to forget a cache.
    pub(super) fn drop_cache(&self, id: CacheId) {
        for command in &self.commands {
            // A rank that is gone holds no cache.
            let _ = command.send(RankCommand::DropCache(id));
        }
    }

    /// Waits for every rank's answer; the first error that is not another's consequence wins.
    fn collect(&mut self, awaited: Option<Awaited>) -> Result<Vec<ForwardOutput>, TargetError> {
        let collected = self.answers(awaited.as_ref());
        if let Err(error) = &collected {
            self.ended = true;
            self.hangs = matches!(error, TargetError::Deadline { .. });
            self.end_aside(error.to_string());
        }
        collected
    }

    /// Ends the collective on a thread of its own: with a device that does not answer it hangs.
    fn end_aside(&self, reason: String) {
        let end = Arc::clone(&self.end);
        let ending = move || end(&reason);
        if let Err(error) = std::thread::Builder::new().name("end".into()).spawn(ending) {
            tracing::warn!(%error, "no thread to end the other ranks");
        }
    }

    fn answers(&self, awaited: Option<&Awaited>) -> Result<Vec<ForwardOutput>, TargetError> {
        let mut outputs: Vec<Option<ForwardOutput>> = Vec::new();
        outputs.resize_with(self.commands.len(), || None);
        let mut consequence = None;
        let mut answered = vec![false; outputs.len()];
        while answered.contains(&false) {
            let reply = match awaited {
                None => self.replies.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(Awaited { deadline, .. }) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    self.replies.recv_timeout(left)
                }
            };
            let waiting = || (0..answered.len()).filter(|&rank| !answered[rank]).collect();
            let RankReply { rank, received, outcome } = match reply {
                Ok(reply) => reply,
                Err(RecvTimeoutError::Timeout) => {
                    return Err(TargetError::Deadline { waiting: waiting(), limit: self.limit });
                }
                Err(RecvTimeoutError::Disconnected) => return Err(TargetError::GroupEnded),
            };
            answered[rank] = true;
            match outcome {
                Ok(output) => outputs[rank] = Some(output),
                Err(error) if error.is_consequence() => consequence = Some(error),
                Err(error) if awaited.is_some() => return Err(error.of_forward(rank)),
                Err(error) => return Err(error),
            }
            if let (Some(Awaited { batch: expected, .. }), Some(found)) = (awaited, received)
                && found != *expected
            {
                return Err(TargetError::Desync { rank, expected: *expected, found });
            }
        }
        match consequence {
            Some(error) => Err(error),
            None => Ok(outputs.into_iter().flatten().collect()),
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.commands.clear();
        if !self.ended {
            (self.end)("the target was closed");
            for thread in self.threads.drain(..) {
                // Panics were already reported as replies.
                let _ = thread.join();
            }
        } else if !self.hangs {
            // Their memory is wanted again by the next target. One that hangs is left behind.
            let patience = Instant::now() + PATIENCE;
            while self.threads.iter().any(|thread| !thread.is_finished())
                && Instant::now() < patience
            {
                std::thread::sleep(PATIENCE / 1000);
            }
        }
    }
}

/// Body of a rank's thread: makes the worker, says so, then answers commands until they end.
fn serve<W: RankWorker>(
    rank: usize,
    make: &dyn Fn(usize) -> Result<W, TargetError>,
    commands: &Receiver<RankCommand>,
    (replies, end): (&Sender<RankReply>, &EndGroup),
) {
    let send = |received: Option<Digest>, outcome: Result<ForwardOutput, TargetError>| {
        let failed = outcome.as_ref().err().map(ToString::to_string);
        let unheard = replies.send(RankReply { rank, received, outcome }).is_err();
        // After the answer: ending a collective may hang with the device that failed.
        if let Some(error) = &failed {
            tracing::debug!(target: "aerie::ranks", rank, %error, "a rank ended");
            end(error);
        }
        unheard || failed.is_some()
    };
    let mut worker = match guarded(rank, || make(rank)) {
        Ok(worker) => worker,
        Err(error) => {
            send(None, Err(error));
            return;
        }
    };
    if send(None, Ok(ForwardOutput::default())) {
        return;
    }
    for command in commands {
        match command {
            RankCommand::DropCache(id) => worker.drop_cache(id),
            RankCommand::Forward { request, batch, deadline } => {
                let outcome = guarded(rank, || worker.forward(&request, batch, deadline));
                if send(Some(worker.received(&request)), outcome) {
                    return;
                }
            }
        }
    }
}

/// Runs `work`; a panic becomes an error.
fn guarded<T>(
    rank: usize,
    work: impl FnOnce() -> Result<T, TargetError>,
) -> Result<T, TargetError> {
    // The worker is dropped after a panic, so broken invariants are never seen.
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        Err(TargetError::RankPanicked { rank, message: panic_text(&*panic) })
    })
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (None, Some(text)) => text.clone(),
        (None, None) => "no message".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::collective::{Collective, Threads};
    use super::*;

    /// Exchanges rows with the other ranks, or misbehaves.
    struct Worker {
        rank: usize,
        collective: Threads,
        fault: Fault,
    }

    #[derive(Clone, Copy, PartialEq)]
    enum Fault {
        None,
        Panic,
        Error,
        Hang,
    }

    impl RankWorker for Worker {
        fn forward(
            &mut self,
            request: &ForwardRequest,
            _batch: u64,
            deadline: Instant,
        ) -> Result<ForwardOutput, TargetError> {
            Collective::<Vec<f32>>::set_deadline(&mut self.collective, deadline);
            // Only the second batch meets the fault of rank 1.
            if self.rank == 1 && request.ids.len() == 2 {
                match self.fault {
                    Fault::None => {}
                    Fault::Panic => panic!("out of luck"),
                    Fault::Error => return Err(TargetError::EmptyBatch),
                    Fault::Hang => std::thread::park(),
                }
            }
            let rows = request.ids.len();
            let mut received = Vec::new();
            self.collective.scatter(&vec![1.0; rows], &mut received, [rows, 1])?;
            let normed = vec![self.collective.world_size() as f32; rows];
            Ok(ForwardOutput { normed, ..ForwardOutput::default() })
        }

        fn drop_cache(&mut self, _id: CacheId) {}
    }

    fn group(fault: Fault, limit: Duration) -> Ranks {
        let (collectives, ender) = Threads::group(3);
        let collectives = Mutex::new(collectives.into_iter().map(Some).collect::<Vec<_>>());
        let end: EndGroup = Arc::new(move |reason| ender.end(reason));
        Ranks::start(3, limit, end, move |rank| {
            let collective = collectives.lock().unwrap()[rank].take().unwrap();
            Ok(Worker { rank, collective, fault })
        })
        .unwrap()
    }

    fn batch(tokens: usize) -> ForwardRequest {
        ForwardRequest { ids: vec![0; tokens], ..ForwardRequest::default() }
    }

    #[test]
    fn every_rank_answers_every_batch() {
        let mut ranks = group(Fault::None, Duration::from_secs(60));
        for tokens in [1, 2, 5] {
            let outputs = ranks.forward(batch(tokens)).unwrap();
            assert_eq!(outputs.len(), 3);
            assert!(outputs.iter().all(|output| output.normed == vec![3.0; tokens]));
        }
        assert_eq!(ranks.batch(), 3);
    }

    #[test]
    fn a_panic_of_one_rank_is_the_groups_error() {
        let mut ranks = group(Fault::Panic, Duration::from_secs(60));
        ranks.forward(batch(1)).unwrap();
        let error = ranks.forward(batch(2)).unwrap_err();
        let TargetError::RankPanicked { rank: 1, message } = &error else { panic!("{error}") };
        assert_eq!(message, "out of luck");
        assert_eq!(error.exit_code(), 75);
        assert!(matches!(ranks.forward(batch(1)), Err(TargetError::GroupEnded)));
    }

    /// The other ranks only say that they were ended; the cause is what comes back.
    #[test]
    fn the_cause_wins_over_its_consequences() {
        let mut ranks = group(Fault::Error, Duration::from_secs(60));
        let error = ranks.forward(batch(2)).unwrap_err();
        assert!(matches!(error, TargetError::EmptyBatch), "{error}");
    }

    #[test]
    fn a_rank_that_hangs_ends_the_batch_at_its_deadline() {
        let limit = Duration::from_millis(50);
        let mut ranks = group(Fault::Hang, limit);
        let start = Instant::now();
        let error = ranks.forward(batch(2)).unwrap_err();
        assert!(start.elapsed() >= limit);
        match &error {
            TargetError::Deadline { waiting, .. } => assert!(waiting.contains(&1), "{waiting:?}"),
            other => panic!("{other}"),
        }
        assert_eq!(error.exit_code(), 75);
    }

    #[test]
    fn a_rank_that_cannot_start_is_an_error() {
        let end: EndGroup = Arc::new(|_| {});
        let limit = Duration::from_secs(60);
        let started = Ranks::start(2, limit, end, |rank| match rank {
            0 => Err::<Worker, _>(TargetError::EmptyBatch),
            _ => Err(TargetError::CollectiveEnded { reason: "rank 0".to_owned() }),
        });
        assert!(matches!(started, Err(TargetError::EmptyBatch)));
    }
}
