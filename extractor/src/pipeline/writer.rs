//! The sink on a thread of its own, behind a short queue: the target goes on while a batch is
//! written, and waits only where the disk is a whole batch behind. Knows no model.

use std::io;
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, Scope, ScopedJoinHandle};

use shared::manifest::SourceRecord;

use super::attempts::Part;
use crate::reject::RejectReason;
use crate::sink::{ShardSink, SinkError, Written};

/// Batches that wait for the disk while another is written.
const WAITING: usize = 1;

/// What the sink is given, in the order of the input.
pub(super) enum Work {
    /// Outcomes of lines.
    Notes(Vec<SourceRecord>),
    /// A batch, in parts.
    Batch(Vec<Part>),
    /// Nothing more comes: what is left is committed.
    End,
}

/// The sink's thread.
pub(super) struct Writer<'scope> {
    queue: SyncSender<Work>,
    thread: ScopedJoinHandle<'scope, Result<Written, SinkError>>,
}

impl<'scope> Writer<'scope> {
    /// Starts the thread. An error is the system's, which has no room for another one.
    pub(super) fn start(
        scope: &'scope Scope<'scope, '_>,
        sink: ShardSink<'scope>,
    ) -> io::Result<Self> {
        let (queue, work) = sync_channel(WAITING);
        // A subscriber that was set for this thread only hears the sink too.
        let subscriber = tracing::dispatcher::get_default(tracing::Dispatch::clone);
        let body = move || {
            let _guard = tracing::dispatcher::set_default(&subscriber);
            write(sink, &work)
        };
        let thread = Builder::new().name("writer".into()).spawn_scoped(scope, body)?;
        Ok(Self { queue, thread })
    }

    /// Hands work over; waits while the queue is full. `false`: the sink has ended, and
    /// [`Self::finish`] says why.
    pub(super) fn give(&self, work: Work) -> bool {
        self.queue.send(work).is_ok()
    }

    /// Waits until everything is committed.
    pub(super) fn finish(self) -> Result<Written, SinkError> {
        // Refused only where the sink has ended with an error, which is returned.
        let _ = self.queue.send(Work::End);
        self.thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    }
}

fn write(mut sink: ShardSink<'_>, work: &Receiver<Work>) -> Result<Written, SinkError> {
    for work in work {
        match work {
            Work::Notes(records) => sink.note(records),
            Work::Batch(parts) => {
                for part in parts {
                    match part {
                        Part::Captured(batch, capture) => {
                            sink.write(&batch, &capture)?;
                            capture.recycle();
                        }
                        Part::TooLarge(batch, words) => {
                            let reason = RejectReason::OutOfMemory;
                            sink.reject(&batch, &format!("{reason}: {words}"));
                        }
                    }
                }
                sink.end_batch()?;
            }
            Work::End => return sink.finish(),
        }
    }
    // The run panicked: what is not committed yet is done again by the next.
    Ok(Written::default())
}
