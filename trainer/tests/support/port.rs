//! Ports for the processes of a test.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};

/// Outside the range from which the system serves those who ask for none.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 20_000 + (std::process::id() % 100) as u16 * 100;
    loop {
        let port = first + NEXT.fetch_add(1, Ordering::Relaxed) % 100;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
