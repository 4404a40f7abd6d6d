//! Asks a run to stop: the first SIGINT or SIGTERM lets the batch in flight be committed, the
//! second ends the process at once. Knows nothing of what is being stopped.

use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use tokio::signal::unix::{SignalKind, signal};

/// Exit code of a run that a signal stopped, as shells count SIGTERM.
pub const EXIT_STOPPED: u8 = 143;

/// Shared flag that a run polls between batches: when the stop was asked for.
#[derive(Clone, Debug, Default)]
pub struct Shutdown(Arc<OnceLock<Instant>>);

impl Shutdown {
    /// Listens for SIGINT and SIGTERM on a thread of its own.
    pub fn on_signals() -> std::io::Result<Self> {
        let shutdown = Self::default();
        let flag = shutdown.clone();
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        let (mut interrupt, mut terminate) = {
            let _entered = runtime.enter();
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
        };
        thread::Builder::new().name("signals".into()).spawn(move || {
            runtime.block_on(async {
                loop {
                    tokio::select! {
                        _ = interrupt.recv() => {}
                        _ = terminate.recv() => {}
                    }
                    if flag.requested() {
                        std::process::exit(i32::from(EXIT_STOPPED));
                    }
                    flag.request();
                    // On a thread of its own: a log that nobody reads must not keep the second
                    // signal from being heard.
                    let said = || {
                        tracing::warn!("stopping after this batch; a second signal stops at once");
                    };
                    let _ = thread::Builder::new().name("said".into()).spawn(said);
                }
            });
        })?;
        Ok(shutdown)
    }

    /// Asks for the stop.
    pub fn request(&self) {
        // The first request counts.
        let _ = self.0.set(Instant::now());
    }

    /// Whether a stop was asked for.
    pub fn requested(&self) -> bool {
        self.0.get().is_some()
    }

    /// Time since the stop was asked for.
    pub fn since(&self) -> Option<Duration> {
        self.0.get().map(Instant::elapsed)
    }
}
