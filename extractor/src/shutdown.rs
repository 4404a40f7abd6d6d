//! Asks a run to stop: the first SIGINT or SIGTERM lets the batch in flight be committed, the
//! second ends the process at once. Knows nothing of what is being stopped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tokio::signal::unix::{SignalKind, signal};

/// Exit code of a run that a signal stopped, as shells count SIGTERM.
pub const EXIT_STOPPED: u8 = 143;

/// Shared flag that a run polls between batches.
#[derive(Clone, Debug, Default)]
pub struct Shutdown(Arc<AtomicBool>);

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
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether a stop was asked for.
    pub fn requested(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
