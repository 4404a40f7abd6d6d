//! The processes that train one draft together: who they are, sums over all of them, and the end of
//! all when one is lost. Knows no tensors and no devices.

mod channel;
mod error;
mod place;

use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

pub use self::error::WorldError;
pub use self::place::Place;
use channel::{BEAT, Channel, SILENCE};

/// All processes of a run, seen from one of them.
///
/// Small values cross over TCP through the first rank; what is summed is summed in the order of
/// ranks, so every rank has the same bits.
#[derive(Clone, Debug, Default)]
pub struct World {
    joined: Option<Arc<Joined>>,
}

#[derive(Debug)]
struct Joined {
    place: Place,
    channel: Mutex<Channel>,
    /// Connections that carry signs of life: their end, or silence, says that a process is gone.
    watched: Vec<TcpStream>,
    /// Dropped, it ends this process's signs of life.
    _beating: Sender<()>,
    /// This process ends, so that closed connections are no loss.
    leaving: Arc<AtomicBool>,
}

/// What happens when another process is gone before the run has ended.
pub type OnLost = fn(&WorldError);

impl World {
    /// A run of one process.
    pub fn alone() -> Self {
        Self::default()
    }

    /// Waits until all processes of `place` are there. `digest` is the same text in all of them, or
    /// they do not belong together. `on_lost` is called, on a thread of its own, when one of them
    /// ends without [`World::finish`], or gives no sign of life for two minutes.
    pub fn join(place: Place, digest: &str, on_lost: OnLost) -> Result<Self, WorldError> {
        if place.size == 1 {
            return Ok(Self::alone());
        }
        let (channel, watched) = channel::connect(&place, digest)?;
        let leaving = Arc::new(AtomicBool::new(false));
        let mut shown = Vec::new();
        for (rank, stream) in &watched {
            let clone = || stream.try_clone().map_err(WorldError::lost(*rank));
            shown.push(clone()?);
            let (peer, leaving) = ((*rank, clone()?), leaving.clone());
            std::thread::spawn(move || match channel::wait_for_end(peer, SILENCE) {
                Err(error) if !leaving.load(Ordering::SeqCst) => on_lost(&error),
                _ => (),
            });
        }
        let (beating, stop) = std::sync::mpsc::channel();
        std::thread::spawn(move || channel::beat(&shown, BEAT, &stop));
        let watched = watched.into_iter().map(|(_, stream)| stream).collect();
        let channel = Mutex::new(channel);
        let joined = Joined { place, channel, watched, _beating: beating, leaving };
        Ok(Self { joined: Some(Arc::new(joined)) })
    }

    /// Number of this process, from 0.
    pub fn rank(&self) -> usize {
        self.joined.as_ref().map_or(0, |joined| joined.place.rank)
    }

    /// Processes of the run.
    pub fn size(&self) -> usize {
        self.joined.as_ref().map_or(1, |joined| joined.place.size)
    }

    /// Whether this process writes files and reports.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Every process's bytes, by rank.
    pub fn exchange(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>, WorldError> {
        match &self.joined {
            None => Ok(vec![own]),
            Some(joined) => {
                let mut channel = joined.channel.lock().unwrap_or_else(PoisonError::into_inner);
                channel.exchange(own)
            }
        }
    }

    /// Sums values over all processes, in place.
    pub fn sum(&self, values: &mut [f64]) -> Result<(), WorldError> {
        if self.size() == 1 {
            return Ok(());
        }
        let own = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let all = self.exchange(own)?;
        values.fill(0.0);
        for (rank, bytes) in all.iter().enumerate() {
            let (parts, rest) = bytes.as_chunks::<8>();
            if parts.len() != values.len() || !rest.is_empty() {
                let (expected, found) = (8 * values.len(), bytes.len());
                return Err(WorldError::OutOfStep { rank, expected, found });
            }
            let parts = parts.iter().map(|part| f64::from_le_bytes(*part));
            values.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
        }
        Ok(())
    }

    /// Whether something is so in any process.
    pub fn any(&self, own: bool) -> Result<bool, WorldError> {
        let mut values = [f64::from(u8::from(own))];
        self.sum(&mut values)?;
        Ok(values > [0.0])
    }

    /// The first rank's value, on all.
    pub fn from_first(&self, value: f64) -> Result<f64, WorldError> {
        let mut values = [if self.is_first() { value } else { 0.0 }];
        self.sum(&mut values)?;
        let [value] = values;
        Ok(value)
    }

    /// Says that this process ends as it should; without it the others are told of a loss.
    pub fn finish(&self) {
        if let Some(joined) = &self.joined {
            joined.leaving.store(true, Ordering::SeqCst);
            joined.watched.iter().for_each(channel::say_finished);
        }
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        self.leaving.store(true, Ordering::SeqCst);
        // The threads that watch hold copies of these connections.
        for stream in &self.watched {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

#[cfg(test)]
mod tests;
