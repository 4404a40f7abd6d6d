//! Stored states from page-locked memory to tensors: copied as they are stored, spread and decoded
//! on the device. Knows no data set.

use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::Cuda;
use burn::tensor::{DType, FloatDType, Tensor};
use kernels::cuda::cudarc::driver::result::DriverError;
use kernels::cuda::cudarc::driver::sys::CUevent_flags;
use kernels::cuda::cudarc::driver::{CudaContext, CudaEvent};
use kernels::cuda::{CudaError, DeviceMatrix, DeviceVector, Dtype, PinnedBuffer, context};
use shared::StateDtype;

use super::engine::{Part, run};
use super::views::{empty, matrix, vector};
use crate::collate::{StateLayout, StoredStates};
use crate::input::{InputOps, Rooms};
use crate::ops::DeviceFault;

/// Page-locked memory and when the device has read it.
#[derive(Debug)]
struct Slot {
    memory: PinnedBuffer,
    read: CudaEvent,
}

/// Page-locked memory for batches; what a batch gives back serves a later one.
#[derive(Clone, Debug)]
pub struct PinnedRooms {
    context: Arc<CudaContext>,
    idle: Arc<Mutex<Vec<Slot>>>,
}

/// Page-locked memory of one batch.
#[derive(Debug)]
pub struct PinnedRoom {
    slot: Option<Slot>,
    idle: Arc<Mutex<Vec<Slot>>>,
}

impl PinnedRooms {
    fn slot(&self, bytes: usize) -> Result<Slot, CudaError> {
        let large = {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            let found = idle.iter().position(|slot| slot.memory.as_slice().len() >= bytes);
            found.map(|at| idle.swap_remove(at))
        };
        if let Some(slot) = large {
            slot.read.synchronize().map_err(wrong("wait for a copy"))?;
            return Ok(slot);
        }
        let flags = Some(CUevent_flags::CU_EVENT_DISABLE_TIMING);
        // Batches differ a little in size, and page-locking takes long.
        let memory = PinnedBuffer::new(&self.context, bytes.next_power_of_two())?;
        let read = self.context.new_event(flags).map_err(wrong("create an event"))?;
        Ok(Slot { memory, read })
    }
}

impl Rooms for PinnedRooms {
    type Room = PinnedRoom;

    fn take(&self, bytes: usize) -> Result<PinnedRoom, DeviceFault> {
        let slot = self.slot(bytes).map_err(fault)?;
        Ok(PinnedRoom { slot: Some(slot), idle: self.idle.clone() })
    }
}

fn wrong(operation: &'static str) -> impl FnOnce(DriverError) -> CudaError {
    move |source| CudaError::Driver { operation: operation.to_owned(), source }
}

fn fault(error: CudaError) -> DeviceFault {
    DeviceFault { exit_code: error.exit_code(), message: error.to_string() }
}

impl AsRef<[u8]> for PinnedRoom {
    fn as_ref(&self) -> &[u8] {
        self.slot.as_ref().map_or(&[], |slot| slot.memory.as_slice())
    }
}

impl AsMut<[u8]> for PinnedRoom {
    fn as_mut(&mut self) -> &mut [u8] {
        self.slot.as_mut().map_or(&mut [], |slot| slot.memory.as_mut_slice())
    }
}

impl Drop for PinnedRoom {
    fn drop(&mut self) {
        let slot = self.slot.take();
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).extend(slot);
    }
}

impl InputOps for Cuda {
    type Rooms = PinnedRooms;

    fn rooms(device: &Self::Device) -> Result<PinnedRooms, DeviceFault> {
        let context = context(device.index).map_err(fault)?;
        Ok(PinnedRooms { context, idle: Arc::default() })
    }

    fn unpack(
        states: StoredStates<PinnedRoom>,
        (device, dtype): (&Self::Device, FloatDType),
    ) -> [Tensor<Self, 2>; 2] {
        let StateLayout { layers, rows, width, .. } = states.layout;
        let place = (device, DType::from(dtype));
        let aux = empty([rows, layers.saturating_sub(1) * width], place);
        let last = empty([rows, width], place);
        let bytes = states.layout.bytes();
        // Of f32 only because tensors of the backend have to be of some type.
        let raw = empty([bytes.div_ceil(4)], (device, DType::F32));
        let target = Planes { aux: matrix(&aux), last: matrix(&last), raw: vector(&raw).address };
        run(device, Part::Rows, |work| {
            let Some(slot) = &states.memory.slot else { return Ok(()) };
            slot.memory.start_upload(work.launch.stream(), target.raw, bytes)?;
            slot.read.record(work.launch.stream()).map_err(wrong("record an event"))?;
            for layer in 0..layers {
                let into = target.plane(layer, &states.layout);
                let first = target.raw + states.layout.values(layer) as u64;
                match states.layout.dtype {
                    StateDtype::Bf16 => {
                        let from = DeviceMatrix::packed(first, [rows, width], Dtype::Bf16);
                        work.launch.copy(&into, &from)?;
                    }
                    StateDtype::Fp8 => {
                        let scales = target.raw + states.layout.scales(layer) as u64;
                        let codes = DeviceVector::<u8>::new(first, rows * width);
                        let scales = DeviceVector::<f32>::new(scales, rows);
                        work.launch.dequant_fp8_rows(&into, (codes, width), scales)?;
                    }
                }
            }
            Ok(())
        });
        [aux, last]
    }
}

/// Where planes come from and go to.
struct Planes {
    aux: DeviceMatrix,
    last: DeviceMatrix,
    raw: u64,
}

impl Planes {
    fn plane(&self, layer: usize, layout: &StateLayout) -> DeviceMatrix {
        match layer + 1 == layout.layers {
            true => self.last,
            false => self.aux.columns(layer * layout.width..(layer + 1) * layout.width),
        }
    }
}
