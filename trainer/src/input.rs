//! How stored states get to where a backend computes. Backends without memory of their own take
//! them from plain memory. Knows no files and no order.

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::Backend;
use burn::tensor::{FloatDType, Tensor};

use crate::collate::StoredStates;
use crate::ops::DeviceFault;

/// Host memory that batches are laid out in, ahead of the step that reads them.
pub trait Rooms: Clone + Send + 'static {
    /// Memory for one batch.
    type Room: AsRef<[u8]> + AsMut<[u8]> + Send + 'static;

    /// Memory of at least `bytes` bytes.
    fn take(&self, bytes: usize) -> Result<Self::Room, DeviceFault>;
}

/// Memory of a backend's kind.
pub type RoomOf<B> = <<B as InputOps>::Rooms as Rooms>::Room;

/// Input of a backend.
pub trait InputOps: Backend {
    /// Where its batches are laid out.
    type Rooms: Rooms;

    /// Memory for the batches of a device.
    fn rooms(device: &Self::Device) -> Result<Self::Rooms, DeviceFault>;

    /// Aux states side by side, `[T, aux * H]`, and the teacher's, `[T, H]`, as values of type
    /// `dtype`.
    fn unpack(
        states: StoredStates<RoomOf<Self>>,
        place: (&Self::Device, FloatDType),
    ) -> [Tensor<Self, 2>; 2];
}

/// Plain memory.
#[derive(Clone, Copy, Debug)]
pub struct Plain;

impl Rooms for Plain {
    type Room = Vec<u8>;

    fn take(&self, bytes: usize) -> Result<Vec<u8>, DeviceFault> {
        Ok(vec![0; bytes])
    }
}

impl InputOps for Flex {
    type Rooms = Plain;

    fn rooms(_device: &Self::Device) -> Result<Plain, DeviceFault> {
        Ok(Plain)
    }

    fn unpack(
        states: StoredStates<Vec<u8>>,
        place: (&Self::Device, FloatDType),
    ) -> [Tensor<Self, 2>; 2] {
        states.to_device(place)
    }
}

impl<B: InputOps> InputOps for Autodiff<B> {
    type Rooms = B::Rooms;

    fn rooms(device: &Self::Device) -> Result<Self::Rooms, DeviceFault> {
        B::rooms(device)
    }

    fn unpack(
        states: StoredStates<RoomOf<B>>,
        place: (&Self::Device, FloatDType),
    ) -> [Tensor<Self, 2>; 2] {
        B::unpack(states, place).map(Tensor::from_inner)
    }
}
