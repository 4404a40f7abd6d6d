//! A thread of its own for what a template does: the engine's filters walk through values without
//! fuel, and deep into them. Its stack is large enough for the deepest value that fuel can make,
//! and who waits for it gives up after some seconds. Knows nothing of templates.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::Builder;
use std::time::Duration;

/// Bytes of address space; memory is taken for what is used of it.
pub(super) const STACK: usize = 1 << 30;
/// Time is counted in ticks, so that a process that was stopped for a while is not late.
const TICK: Duration = Duration::from_millis(100);
const TICKS: u64 = 100;
/// How long an answer is waited for.
pub(super) const SECONDS: u64 = TICKS * TICK.as_millis() as u64 / 1000;

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoAnswer {
    /// It did not come in time, this time or before. The thread goes on; nobody waits for it.
    Late,
    /// The thread panicked or was not there.
    Gone,
}

/// A thread that answers questions one after the other.
#[derive(Debug)]
pub(super) struct Thread<Q, A> {
    questions: Sender<(Q, Sender<A>)>,
    is_late: AtomicBool,
}

impl<Q: Send + 'static, A: Send + 'static> Thread<Q, A> {
    /// Starts a thread that ends with `self`.
    pub(super) fn start(answer: impl Fn(Q) -> A + Send + 'static) -> std::io::Result<Self> {
        let (questions, asked) = channel::<(Q, Sender<A>)>();
        let work = move || {
            for (question, to) in asked {
                // Who asked may have given up.
                let _ = to.send(answer(question));
            }
        };
        Builder::new().name("chat-template".into()).stack_size(STACK).spawn(work)?;
        Ok(Self { questions, is_late: AtomicBool::new(false) })
    }

    /// The answer, or after a late one always that.
    pub(super) fn ask(&self, question: Q) -> Result<A, NoAnswer> {
        if self.is_late() {
            return Err(NoAnswer::Late);
        }
        let (to, answer) = channel();
        self.questions.send((question, to)).map_err(|_| NoAnswer::Gone)?;
        let waited = wait(&answer);
        if matches!(waited, Err(NoAnswer::Late)) {
            self.is_late.store(true, Ordering::Relaxed);
        }
        waited
    }

    /// An answer was late.
    pub(super) fn is_late(&self) -> bool {
        self.is_late.load(Ordering::Relaxed)
    }
}

fn wait<A>(answer: &Receiver<A>) -> Result<A, NoAnswer> {
    for _ in 0..TICKS {
        match answer.recv_timeout(TICK) {
            Ok(answer) => return Ok(answer),
            Err(RecvTimeoutError::Disconnected) => return Err(NoAnswer::Gone),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
    Err(NoAnswer::Late)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever asked a thread that does not answer is let go, and asks it no more.
    #[test]
    fn an_answer_that_does_not_come_is_given_up() {
        let (never, ends) = channel::<()>();
        let ends = std::sync::Mutex::new(ends);
        let thread = Thread::start(move |asked: u32| match asked {
            0 => ends.lock().unwrap().recv().map_or(0, |()| 0),
            1 => panic!("asked for"),
            more => more,
        });
        let thread = thread.unwrap();
        assert_eq!(thread.ask(7), Ok(7));
        assert_eq!((thread.ask(0), thread.is_late()), (Err(NoAnswer::Late), true));
        assert_eq!(thread.ask(7), Err(NoAnswer::Late));
        drop(never);
    }

    #[test]
    fn a_panic_is_an_answer() {
        let thread = Thread::start(|()| panic!("asked for"));
        let thread = thread.unwrap();
        assert_eq!(thread.ask(()), Err::<(), _>(NoAnswer::Gone));
        assert_eq!((thread.ask(()), thread.is_late()), (Err(NoAnswer::Gone), false));
    }
}
