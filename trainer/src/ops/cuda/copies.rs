//! Parts of matrices that the copy engines carry between the GPUs of one host, while their
//! multiprocessors do something else. Every GPU has room for what the others send and words that
//! say what has come and what was taken. Knows no sums and no parameters.

use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::cuda::CudaDevice;
use kernels::cuda::cudarc::driver::{CudaContext, CudaStream};
use kernels::cuda::{
    CudaError, DeviceMatrix, DeviceVector, PEER_HANDLE_BYTES, PeerMemory, copy_on_device, download,
    upload,
};

use super::engine::{Transfer, Work, run_behind_transfers, transfer};
use super::exchange::refused;
use crate::exchange::{ExchangeError, TransferPlan, Transport};
use crate::ops::DeviceFault;
use crate::world::World;

/// Bytes of one copy: a few of them run beside an operation.
const PIECE: usize = 32 << 20;
/// Bytes of a part of what is gathered at once.
const PASSAGE: usize = 16 << 20;
/// Bytes of a word, and what places of rooms are multiples of.
const WORD: usize = 4;
const ALIGN: usize = 256;

/// The rooms of this process's GPU, and the way into those of the others.
#[derive(Debug)]
pub struct Copies {
    memory: Arc<PeerMemory>,
    rank: usize,
    ranks: usize,
    /// Where each parameter's room starts, `[ranks, part]`; behind them one of [`PASSAGE`] a rank.
    rooms: Vec<usize>,
    /// How often each has been used.
    turns: Mutex<Vec<u32>>,
}

/// One use of a room.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// Of which room.
    at: usize,
    number: u32,
}

/// What the words of a room tell.
#[derive(Clone, Copy)]
enum Told {
    /// A part has come.
    Arrived,
    /// It was taken, so that the next one may come.
    Taken,
}

impl Copies {
    /// Makes rooms and opens those of the others; `None` where one GPU can't reach another one, an
    /// error if nothing else was asked for. All processes get the same answer.
    pub(super) fn connect(
        world: &World,
        context: &Arc<CudaContext>,
        plan: &TransferPlan,
    ) -> Result<Option<Self>, ExchangeError> {
        // Tried with little memory first: what others have opened can't be freed.
        let Some(_) = reach(world, context, ALIGN.max(WORD * world.size()))? else {
            let message = "train.exchange = \"copies\": a GPU can't write into the memory of \
                           another process's one; all must be of one host, visible to every \
                           process and joined by NVLink or PCIe peer access; use auto or nccl"
                .to_owned();
            return match plan.transport {
                Transport::Copies => Err(DeviceFault { message, exit_code: 69 }.into()),
                Transport::Auto | Transport::Nccl => Ok(None),
            };
        };
        let words = 2 * WORD * (plan.bytes.len() + 1) * world.size();
        let mut end = words.next_multiple_of(ALIGN);
        let room = |bytes: usize| {
            let start = end;
            end += bytes.next_multiple_of(ALIGN);
            start
        };
        let sizes = plan.bytes.iter().copied().chain([PASSAGE * world.size()]);
        let rooms: Vec<usize> = sizes.map(room).collect();
        let Some(memory) = reach(world, context, end)? else {
            let message = "memory for what other GPUs send could not be shared".to_owned();
            return Err(DeviceFault { message, exit_code: 75 }.into());
        };
        let turns = Mutex::new(vec![0; rooms.len()]);
        let (rank, ranks) = (world.rank(), world.size());
        Ok(Some(Self { memory: Arc::new(memory), rank, ranks, rooms, turns }))
    }

    /// This process's number.
    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// How many there are.
    pub(super) fn ranks(&self) -> usize {
        self.ranks
    }

    /// Where parts are when they have arrived, by rank and without gaps; this rank's is missing.
    pub(super) fn received(&self, turn: Turn) -> u64 {
        self.memory.own(self.rooms[turn.at])
    }

    /// Puts the `own [n, columns]` of all ranks into `all [ranks * n, columns]`, by rank, piece by
    /// piece.
    pub(super) fn gather(&self, device: &CudaDevice, own: &DeviceMatrix, all: &DeviceMatrix) {
        let (at, size) = (self.rooms.len() - 1, own.bytes());
        for first in (0..size).step_by(PASSAGE) {
            let bytes = PASSAGE.min(size - first);
            let from = own.address + first as u64;
            let turn = self.start_bytes(device, at, (|_| from, bytes));
            self.finish(device, turn, |work| {
                for rank in 0..self.ranks {
                    let place = all.address + (rank * size + first) as u64;
                    let source = match rank == self.rank {
                        true => from,
                        false => self.received(turn) + (rank * bytes) as u64,
                    };
                    copy_on_device(work.launch.stream(), place, source, bytes)?;
                }
                Ok(())
            });
        }
    }

    /// Starts to send every other rank its part, all of the same size and without gaps. They must
    /// stay as they are until the end.
    pub(super) fn start(
        &self,
        device: &CudaDevice,
        at: usize,
        part: impl Fn(usize) -> DeviceMatrix,
    ) -> Turn {
        self.start_bytes(device, at, (|rank| part(rank).address, part(0).bytes()))
    }

    fn start_bytes(
        &self,
        device: &CudaDevice,
        at: usize,
        (from, bytes): (impl Fn(usize) -> u64, usize),
    ) -> Turn {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns[at] = turns[at].wrapping_add(1);
        let turn = Turn { at, number: turns[at] };
        // Each starts with another one, so that no GPU receives from all at the same time.
        for step in 1..self.ranks {
            let rank = (self.rank + step) % self.ranks;
            transfer(device, self.transfers(turn, rank, (from(rank), bytes)));
        }
        turn
    }

    fn transfers(&self, turn: Turn, rank: usize, (address, all): (u64, usize)) -> Vec<Transfer> {
        let into = self.rooms[turn.at] + self.rank * all;
        let taken = self.word(turn.at, Told::Taken, rank);
        let arrived = self.word(turn.at, Told::Arrived, self.rank);
        let piece = |first: usize| {
            let bytes = PIECE.min(all - first);
            let memory = self.memory.clone();
            let enqueue = move |stream: &CudaStream| {
                if first == 0 {
                    memory.wait(taken, turn.number.wrapping_sub(1), stream)?;
                }
                memory.push((rank, into + first), (address + first as u64, bytes), stream)?;
                match first + bytes == all {
                    true => memory.tell((rank, arrived), turn.number, stream),
                    false => Ok(()),
                }
            };
            Transfer { bytes, enqueue: Box::new(enqueue) }
        };
        (0..all).step_by(PIECE).map(piece).collect()
    }

    /// Runs an operation that reads what the others have sent, once all of it is there.
    pub(super) fn finish(
        &self,
        device: &CudaDevice,
        turn: Turn,
        operation: impl FnOnce(&mut Work<'_>) -> Result<(), CudaError>,
    ) {
        let others = || (0..self.ranks).filter(|&rank| rank != self.rank);
        run_behind_transfers(device, |work| {
            for rank in others() {
                let word = self.word(turn.at, Told::Arrived, rank);
                self.memory.wait(word, turn.number, work.launch.stream())?;
            }
            operation(work)?;
            for rank in others() {
                let word = self.word(turn.at, Told::Taken, self.rank);
                self.memory.tell((rank, word), turn.number, work.launch.stream())?;
            }
            Ok(())
        });
    }

    /// Place of the word in which `rank` tells something about a room.
    fn word(&self, at: usize, told: Told, rank: usize) -> usize {
        WORD * ((2 * at + told as usize) * self.ranks + rank)
    }
}

/// Memory that every process can write into and has done so; `None` on all where one can't.
fn reach(
    world: &World,
    context: &Arc<CudaContext>,
    bytes: usize,
) -> Result<Option<PeerMemory>, ExchangeError> {
    let host = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let hosts = world.exchange(host.clone().into_bytes())?;
    // A handle of another host could look like one of this host.
    if host.is_empty() || hosts.iter().any(|other| *other != host.as_bytes()) {
        return Ok(None);
    }
    let made = PeerMemory::new(context, bytes);
    let handle = made.as_ref().ok().and_then(|memory| memory.handle().ok());
    let handles = world.exchange(handle.map_or(Vec::new(), Vec::from))?;
    let handles: Vec<[u8; PEER_HANDLE_BYTES]> =
        handles.into_iter().filter_map(|handle| handle.try_into().ok()).collect();
    let memory = made.map_err(refused)?;
    let complete = handles.len() == world.size();
    let opened = complete.then(|| memory.open(world.rank(), &handles)).and_then(Result::ok);
    let written = opened.and_then(|memory| greet(&memory, world, context).ok().map(|()| memory));
    if world.any(written.is_none())? {
        return Ok(None);
    }
    let Some(memory) = written else { unreachable!("every process has written") };
    let greeted = greeted(&memory, world, context).map_err(refused)?;
    Ok((!world.any(!greeted)?).then_some(memory))
}

/// Writes this process's number into the first words of all others.
fn greet(memory: &PeerMemory, world: &World, context: &Arc<CudaContext>) -> Result<(), CudaError> {
    let stream = context.default_stream();
    for rank in 0..world.size() {
        memory.tell((rank, WORD * world.rank()), world.rank() as u32 + 1, &stream)?;
    }
    settled(&stream)
}

fn settled(stream: &CudaStream) -> Result<(), CudaError> {
    let operation = || "greet the GPUs of other processes".to_owned();
    stream.synchronize().map_err(|source| CudaError::Driver { operation: operation(), source })
}

/// Whether all others have written theirs; makes the words zero again.
fn greeted(
    memory: &PeerMemory,
    world: &World,
    context: &Arc<CudaContext>,
) -> Result<bool, CudaError> {
    let stream = context.default_stream();
    let words = DeviceVector::<u32>::new(memory.own(0), world.size());
    let found = download(&stream, words)?;
    upload(&stream, memory.own(0), &vec![0u32; world.size()])?;
    settled(&stream)?;
    Ok(found.into_iter().eq(1..=world.size() as u32))
}
