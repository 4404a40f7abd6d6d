//! Captured rows on their way to the host: a snapshot on the GPU, a copy to pinned memory on a
//! stream of its own, and from there by a thread of its own, while the model goes on.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use half::bf16;
use kernels::cuda::cudarc::driver::CudaEvent;
use kernels::cuda::{CudaError, DeviceBuffer, Dtype, PinnedBuffer, copy_on_device};

use super::device::{Device, driver};
use crate::capture::LayerRows;
use crate::target::error::TargetError;

/// Pieces on their way at once.
pub(super) const SLOTS: usize = 4;

/// Bytes of a piece of a layer of `bytes`: half of it, so that two halves of a batch and two whole
/// layers have room alike.
pub(super) fn piece(bytes: usize) -> usize {
    (bytes / 2).next_multiple_of(PIECE_ALIGN)
}

/// Pieces are cut here: a multiple of every number format's size.
const PIECE_ALIGN: usize = 256;

/// The way of captured rows.
pub(super) struct CaptureLane {
    slots: Vec<Slot>,
    next: usize,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

struct Slot {
    snapshot: DeviceBuffer,
    pinned: Arc<Mutex<PinnedBuffer>>,
    /// The snapshot is taken.
    taken: CudaEvent,
    /// The snapshot has left the GPU; shared with the thread.
    copied: Arc<CudaEvent>,
    /// Says that the pinned memory may be written again; absent before the first use.
    free: Option<Receiver<()>>,
}

/// A copy that the thread completes.
struct Job {
    pinned: Arc<Mutex<PinnedBuffer>>,
    copied: Arc<CudaEvent>,
    bytes: usize,
    dtype: Dtype,
    free: Sender<()>,
    rows: Sender<Result<LayerRows, CudaError>>,
}

/// Rows that will arrive, in one piece or more.
#[derive(Debug)]
pub(in crate::target) struct CudaCaptured(Vec<Receiver<Result<LayerRows, CudaError>>>);

impl CaptureLane {
    /// A lane for layers of at most `bytes` on this rank.
    pub(super) fn new(device: &Device, bytes: usize) -> Result<Self, TargetError> {
        let bytes = piece(bytes);
        let slot = || {
            Ok(Slot {
                snapshot: DeviceBuffer::new(&device.context, bytes)?,
                pinned: Arc::new(Mutex::new(PinnedBuffer::new(&device.context, bytes)?)),
                taken: device.event()?,
                copied: Arc::new(device.event()?),
                free: None,
            })
        };
        let slots = (0..SLOTS).map(|_| slot()).collect::<Result<_, CudaError>>();
        let slots = device.doing("take memory for captured rows", slots)?;
        let (jobs, received) = channel::<Job>();
        let rank = device.rank;
        let thread = std::thread::Builder::new()
            .name(format!("capture-{rank}"))
            .spawn(move || received.into_iter().for_each(Job::finish))
            .map_err(|source| TargetError::RankThread { rank, source })?;
        Ok(Self { slots, next: 0, jobs: Some(jobs), thread: Some(thread) })
    }

    /// Starts to copy `bytes` from a device address, in the order of the current stream.
    pub(super) fn start(
        &mut self,
        device: &Device,
        address: u64,
        bytes: usize,
    ) -> Result<CudaCaptured, CudaError> {
        let most = self.slots.first().map_or(0, |slot| slot.snapshot.bytes()).max(PIECE_ALIGN);
        let starts = (0..bytes).step_by(most);
        let piece = |start| {
            let length = most.min(bytes - start);
            self.start_piece(device, address + start as u64, length)
        };
        Ok(CudaCaptured(starts.map(piece).collect::<Result<_, _>>()?))
    }

    fn start_piece(
        &mut self,
        device: &Device,
        address: u64,
        bytes: usize,
    ) -> Result<Receiver<Result<LayerRows, CudaError>>, CudaError> {
        let slot = &mut self.slots[self.next];
        self.next = (self.next + 1) % SLOTS;
        if let Some(free) = slot.free.take() {
            // Ends at once where the thread has gone: the job below says so.
            let _ = free.recv();
        }
        if bytes > slot.snapshot.bytes() {
            let room = slot.snapshot.bytes();
            return Err(CudaError::Shape(format!("{bytes} bytes captured, {room} are planned")));
        }
        let snapshot = slot.snapshot.address();
        copy_on_device(device.stream(), snapshot, address, bytes)?;
        slot.taken.record(device.stream()).map_err(driver("record an event"))?;
        device.copy.wait(&slot.taken).map_err(driver("order streams"))?;
        let mut pinned = slot.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        pinned.start_download(&device.copy, 0, (snapshot, bytes))?;
        drop(pinned);
        slot.copied.record(&device.copy).map_err(driver("record an event"))?;
        let (free, freed) = channel();
        let (rows, received) = channel();
        slot.free = Some(freed);
        let job = Job {
            pinned: Arc::clone(&slot.pinned),
            copied: Arc::clone(&slot.copied),
            bytes,
            dtype: device.dtype,
            free,
            rows,
        };
        match self.jobs.as_ref().map(|jobs| jobs.send(job)) {
            Some(Ok(())) => Ok(received),
            _ => Err(CudaError::Shape("the thread that takes captured rows has gone".to_owned())),
        }
    }
}

impl Drop for CaptureLane {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // Its work cannot panic, and nobody waits for rows any more.
            let _ = thread.join();
        }
    }
}

impl CudaCaptured {
    /// Waits for the rows.
    pub(super) fn wait(self) -> Result<LayerRows, CudaError> {
        let gone = || CudaError::Shape("the thread that takes captured rows has gone".to_owned());
        let pieces = self.0.into_iter().map(|piece| piece.recv().map_err(|_| gone())?);
        let mut pieces = pieces.collect::<Result<Vec<_>, CudaError>>()?;
        Ok(if pieces.len() == 1 { pieces.remove(0) } else { LayerRows::Pieces(pieces) })
    }
}

impl Job {
    fn finish(self) {
        let copied = self.copied.synchronize().map_err(driver("wait for captured rows"));
        let rows = copied.map(|()| {
            let pinned = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
            let bytes = &pinned.as_slice()[..self.bytes];
            match self.dtype {
                Dtype::Bf16 => LayerRows::copy_bf16(bytemuck::cast_slice::<u8, bf16>(bytes)),
                Dtype::F32 => LayerRows::copy_f32(bytemuck::cast_slice(bytes)),
            }
        });
        // Nobody listens after an error elsewhere.
        let _ = self.free.send(());
        let _ = self.rows.send(rows);
    }
}
