//! Captured rows on their way to the host: a snapshot on the GPU, quantised if they are stored so,
//! a copy to pinned memory on a stream of its own, and from there by a thread of its own, while the
//! model goes on.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use half::bf16;
use kernels::cuda::cudarc::driver::CudaEvent;
use kernels::cuda::{
    CudaError, DeviceBuffer, DeviceMatrix, DeviceVector, Dtype, PinnedBuffer, copy_on_device,
};
use shared::StateDtype;

use super::device::{Device, driver};
use crate::capture::LayerRows;
use crate::target::error::TargetError;

/// Pieces on their way at once.
pub(super) const SLOTS: usize = 4;

/// How rows travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    /// Number format that they are computed in.
    dtype: Dtype,
    /// Values of a row.
    width: usize,
    /// As e4m3 codes with a scale a row, and the sums that tell the error.
    fp8: bool,
}

/// Where scales begin, in an fp8 piece: they are read eight bytes at a time.
const PART_ALIGN: usize = 16;

impl Form {
    pub(super) fn new(dtype: Dtype, width: usize, states: StateDtype) -> Self {
        Self { dtype, width, fp8: states == StateDtype::Fp8 }
    }

    /// Rows of a piece of a layer with `rows` on this rank: half of them, so that two halves of a
    /// batch and two whole layers have room alike.
    fn piece(rows: usize) -> usize {
        rows.div_ceil(2).max(1)
    }

    /// Bytes of a piece.
    fn bytes(&self, rows: usize) -> usize {
        match self.fp8 {
            true => {
                let [_, errors] = self.parts(rows);
                errors + rows * size_of::<[f32; 2]>()
            }
            false => rows * self.width * self.dtype.size(),
        }
    }

    /// Bytes of all pieces that may be on their way, of layers with `rows` on this rank.
    pub(super) fn all_bytes(&self, rows: usize) -> usize {
        SLOTS * self.bytes(Self::piece(rows))
    }

    /// Where scales and errors of an fp8 piece begin.
    fn parts(&self, rows: usize) -> [usize; 2] {
        let scales = (rows * self.width).next_multiple_of(PART_ALIGN);
        [scales, (scales + rows * size_of::<f32>()).next_multiple_of(PART_ALIGN)]
    }

    /// Puts the rows at `address` into the snapshot, in the order of the current stream.
    fn take(
        &self,
        device: &Device,
        snapshot: &DeviceBuffer,
        (address, rows): (u64, usize),
    ) -> Result<(), CudaError> {
        let to = snapshot.address();
        if !self.fp8 {
            return copy_on_device(device.stream(), to, address, self.bytes(rows));
        }
        let [scales, errors] = self.parts(rows);
        let x = DeviceMatrix::packed(address, [rows, self.width], self.dtype);
        device.launch().quantise_fp8_rows(
            (DeviceVector::new(to, rows * self.width), self.width),
            DeviceVector::new(to + scales as u64, rows),
            DeviceVector::new(to + errors as u64, rows),
            &x,
        )
    }

    /// The rows of a piece that has arrived.
    fn read(&self, bytes: &[u8], rows: usize) -> LayerRows {
        let all = bytes.get(..self.bytes(rows)).unwrap_or_default();
        if self.fp8 {
            let [scales, errors] = self.parts(rows);
            return LayerRows::copy_fp8(
                &all[..rows * self.width],
                bytemuck::cast_slice(&all[scales..scales + rows * 4]),
                bytemuck::cast_slice(&all[errors..]),
            );
        }
        match self.dtype {
            Dtype::Bf16 => LayerRows::copy_bf16(bytemuck::cast_slice::<u8, bf16>(all)),
            Dtype::F32 => LayerRows::copy_f32(bytemuck::cast_slice(all)),
        }
    }
}

/// The way of captured rows.
pub(super) struct CaptureLane {
    form: Form,
    /// Rows that a slot takes.
    piece: usize,
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
    rows_in_it: usize,
    form: Form,
    free: Sender<()>,
    rows: Sender<Result<LayerRows, CudaError>>,
}

/// Rows that will arrive, in one piece or more.
#[derive(Debug)]
pub(in crate::target) struct CudaCaptured(Vec<Receiver<Result<LayerRows, CudaError>>>);

impl CaptureLane {
    /// A lane for layers of at most `rows` on this rank.
    pub(super) fn new(device: &Device, form: Form, rows: usize) -> Result<Self, TargetError> {
        let piece = Form::piece(rows);
        let bytes = form.bytes(piece);
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
        Ok(Self { form, piece, slots, next: 0, jobs: Some(jobs), thread: Some(thread) })
    }

    /// Starts to copy `rows` rows of `width` values from a device address, in the order of the
    /// current stream.
    pub(super) fn start(
        &mut self,
        device: &Device,
        address: u64,
        [rows, width]: [usize; 2],
    ) -> Result<CudaCaptured, CudaError> {
        let Self { form, piece: most, .. } = *self;
        if width != form.width {
            let planned = form.width;
            return Err(CudaError::Shape(format!("rows of {width}, {planned} are planned")));
        }
        let row = (width * form.dtype.size()) as u64;
        let piece = |start| {
            let length = most.min(rows - start);
            self.start_piece(device, address + start as u64 * row, length)
        };
        let starts = (0..rows).step_by(most);
        Ok(CudaCaptured(starts.map(piece).collect::<Result<_, _>>()?))
    }

    fn start_piece(
        &mut self,
        device: &Device,
        address: u64,
        rows: usize,
    ) -> Result<Receiver<Result<LayerRows, CudaError>>, CudaError> {
        let form = self.form;
        let bytes = form.bytes(rows);
        let slot = &mut self.slots[self.next];
        self.next = (self.next + 1) % SLOTS;
        if let Some(free) = slot.free.take() {
            // Ends at once where the thread has gone: the job below says so.
            let _ = free.recv();
        }
        form.take(device, &slot.snapshot, (address, rows))?;
        slot.taken.record(device.stream()).map_err(driver("record an event"))?;
        device.copy.wait(&slot.taken).map_err(driver("order streams"))?;
        let mut pinned = slot.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        pinned.start_download(&device.copy, 0, (slot.snapshot.address(), bytes))?;
        drop(pinned);
        slot.copied.record(&device.copy).map_err(driver("record an event"))?;
        let (free, freed) = channel();
        let (arrived, received) = channel();
        slot.free = Some(freed);
        let job = Job {
            pinned: Arc::clone(&slot.pinned),
            copied: Arc::clone(&slot.copied),
            rows_in_it: rows,
            form,
            free,
            rows: arrived,
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
            self.form.read(pinned.as_slice(), self.rows_in_it)
        });
        // Nobody listens after an error elsewhere.
        let _ = self.free.send(());
        let _ = self.rows.send(rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_has_room_for_its_parts_and_is_read_back() {
        let form = Form::new(Dtype::F32, 5, StateDtype::Fp8);
        for rows in [1, 2, 3, 7] {
            let [scales, errors] = form.parts(rows);
            assert!(scales >= rows * 5 && errors >= scales + rows * 4);
            let mut bytes = vec![0u8; form.bytes(rows) + 3];
            bytes[..rows * 5].copy_from_slice(&vec![0x38; rows * 5]);
            for row in 0..rows {
                let value = |v: f32| v.to_le_bytes();
                bytes[scales + 4 * row..][..4].copy_from_slice(&value(row as f32));
                bytes[errors + 8 * row..][..4].copy_from_slice(&value(row as f32 + 0.5));
                bytes[errors + 8 * row + 4..][..4].copy_from_slice(&value(9.0));
            }
            let LayerRows::Fp8 { codes, scales, errors } = form.read(&bytes, rows) else {
                panic!("other rows")
            };
            assert_eq!(codes, vec![0x38; rows * 5]);
            assert_eq!(scales, (0..rows).map(|row| row as f32).collect::<Vec<_>>());
            let expected = (0..rows).map(|row| [row as f32 + 0.5, 9.0]).collect::<Vec<_>>();
            assert_eq!(errors, expected);
        }
        let plain = Form::new(Dtype::Bf16, 5, StateDtype::Bf16);
        assert_eq!(plain.bytes(3), 30);
        assert_eq!(plain.all_bytes(7), SLOTS * 40);
    }
}
