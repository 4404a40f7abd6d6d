//! The end of the process without C's exit handlers, CUDA's among them: they wait for a driver that
//! may never answer. Knows no device.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

unsafe extern "C" {
    fn _exit(status: i32) -> !;
}

/// Ends the process now. Nothing is flushed, no destructor and no exit handler runs.
pub fn exit_at_once(code: u8) -> ! {
    // SAFETY: takes a number by value and does not return.
    unsafe { _exit(i32::from(code)) }
}

/// Ends the process when what is left to do after a rank's death does not end by itself. Dropped,
/// it does nothing.
#[derive(Debug, Default)]
pub(crate) struct LastResort(Option<Sender<()>>);

impl LastResort {
    /// From now on there are `grace` seconds left, then the process ends with `code`.
    pub(crate) fn arm(&mut self, grace: Duration, code: u8) {
        let (disarm, disarmed) = channel();
        let wait = move || {
            if disarmed.recv_timeout(grace) == Err(RecvTimeoutError::Timeout) {
                tracing::error!("clearing up hangs too: the process ends without it");
                exit_at_once(code);
            }
        };
        match std::thread::Builder::new().name("last-resort".into()).spawn(wait) {
            Ok(_) => self.0 = Some(disarm),
            Err(error) => tracing::warn!(%error, "no thread to watch over the end of the run"),
        }
    }
}

/// Makes the orderly end of the process hang, as CUDA's exit handlers do with a driver that does
/// not answer.
#[cfg(test)]
pub(crate) fn hang_at_exit() {
    unsafe extern "C" {
        fn atexit(handler: extern "C" fn()) -> i32;
    }
    extern "C" fn for_ever() {
        loop {
            std::thread::park();
        }
    }
    // SAFETY: the handler lives as long as the program and takes nothing.
    assert_eq!(unsafe { atexit(for_ever) }, 0);
}
