//! Ends the program when one step takes too long: a kernel that waits for ever would hold the
//! device until somebody notices.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Longest time of one step, under a sanitizer too.
const LIMIT: Duration = Duration::from_secs(150);

static STEP: Mutex<Option<(String, Instant)>> = Mutex::new(None);

/// Starts to watch.
pub(crate) fn start() {
    std::thread::spawn(|| {
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let Ok(step) = STEP.lock() else { return };
            if let Some((name, since)) = &*step
                && since.elapsed() > LIMIT
            {
                println!("FAIL {name:28} no end after {} s: a kernel that waits", LIMIT.as_secs());
                std::process::exit(1);
            }
        }
    });
}

/// A new step begins.
pub(crate) fn step(name: &str) {
    if let Ok(mut step) = STEP.lock() {
        *step = Some((name.to_owned(), Instant::now()));
    }
}
