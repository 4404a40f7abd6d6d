//! Sums across GPUs of one process: one communicator a rank, streams of their own, and the end of
//! the whole group. Knows nothing of models.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use kernels::cuda::cudarc::driver::{CudaEvent, CudaStream};
use kernels::cuda::{Communicator, CudaError, DeviceMatrix, NcclId};

use super::buffer::CudaBuffer;
use super::device::driver;
use crate::target::collective::Collective;
use crate::target::error::TargetError;

/// What all ranks of a group share.
pub(super) struct NcclGroup {
    id: NcclId,
    /// The communicator of every rank, once it has one.
    comms: Vec<OnceLock<Communicator>>,
    ended: Mutex<Option<String>>,
}

/// One rank's end of a group.
pub(super) struct NcclRank {
    group: Arc<NcclGroup>,
    rank: usize,
    /// Where values are computed and read.
    compute: Arc<CudaStream>,
    /// Where they are summed.
    stream: Arc<CudaStream>,
    /// Of each half: the values are there; the sum is.
    computed: [CudaEvent; 2],
    summed: [CudaEvent; 2],
}

impl NcclGroup {
    /// A group of `world_size` ranks, not connected yet.
    pub(super) fn new(world_size: usize) -> Result<Arc<Self>, TargetError> {
        let id = NcclId::new().map_err(refused(0, "open NCCL"))?;
        let comms = (0..world_size).map(|_| OnceLock::new()).collect();
        Ok(Arc::new(Self { id, comms, ended: Mutex::new(None) }))
    }

    /// Connects `rank`, whose GPU is current on this thread; returns when all ranks are there.
    pub(super) fn connect(
        self: &Arc<Self>,
        rank: usize,
        compute: &Arc<CudaStream>,
    ) -> Result<NcclRank, TargetError> {
        let context = compute.context();
        let open = || {
            context.bind_to_thread().map_err(driver("make the context current"))?;
            let event = || context.new_event(None).map_err(driver("make an event"));
            let stream = context.new_stream().map_err(driver("make a stream"))?;
            Ok((stream, [event()?, event()?], [event()?, event()?]))
        };
        let wrong = || refused(rank, "connect to NCCL");
        let (stream, computed, summed) = open().map_err(wrong())?;
        let comm = Communicator::connect(self.id, [rank, self.comms.len()]).map_err(wrong())?;
        // Every rank connects once.
        let _ = self.comms[rank].set(comm);
        let (group, compute) = (Arc::clone(self), Arc::clone(compute));
        Ok(NcclRank { group, rank, compute, stream, computed, summed })
    }

    /// Ends the group: work under way is given up, later work is refused with `reason`; the first
    /// reason stays.
    pub(super) fn end(&self, reason: &str) {
        self.ended().get_or_insert_with(|| reason.to_owned());
        self.comms.iter().filter_map(OnceLock::get).for_each(Communicator::abort);
    }

    fn ended(&self) -> std::sync::MutexGuard<'_, Option<String>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NcclRank {
    /// Runs one operation of NCCL on this rank's communicator.
    fn call(
        &self,
        work: impl FnOnce(&Communicator) -> Result<(), CudaError>,
    ) -> Result<(), TargetError> {
        if let Some(reason) = self.group.ended().clone() {
            return Err(TargetError::CollectiveEnded { reason });
        }
        let comm = self.group.comms[self.rank].get();
        comm.map_or(Ok(()), work).map_err(refused(self.rank, "sum across ranks"))
    }

    /// Lets `to` wait for what `from` has been given.
    fn order(
        &self,
        event: &CudaEvent,
        from: Option<&CudaStream>,
        to: Option<&CudaStream>,
    ) -> Result<(), TargetError> {
        let recorded = from.map_or(Ok(()), |stream| event.record(stream));
        let ordered = recorded.and_then(|()| to.map_or(Ok(()), |stream| stream.wait(event)));
        let wrong = refused(self.rank, "sum across ranks");
        ordered.map_err(driver("order streams")).map_err(wrong)
    }
}

impl Collective<CudaBuffer> for NcclRank {
    fn world_size(&self) -> usize {
        self.group.comms.len()
    }

    fn all_reduce(&mut self, values: &mut CudaBuffer) -> Result<(), TargetError> {
        self.start(0, values)?;
        self.finish(0)
    }

    fn start(&mut self, half: usize, values: &mut CudaBuffer) -> Result<(), TargetError> {
        self.order(&self.computed[half], Some(&self.compute), Some(&self.stream))?;
        let row = DeviceMatrix::packed(values.address(), [1, values.len()], values.dtype());
        self.call(|comm| comm.all_reduce(&row, &self.stream))?;
        self.order(&self.summed[half], Some(&self.stream), None)
    }

    fn finish(&mut self, half: usize) -> Result<(), TargetError> {
        self.order(&self.summed[half], None, Some(&self.compute))
    }

    fn set_deadline(&mut self, _deadline: Instant) {
        // Nothing waits here: the device does, with its own deadline.
    }
}

fn refused(rank: usize, doing: &'static str) -> impl FnOnce(CudaError) -> TargetError {
    move |source| match source {
        CudaError::Nccl { operation, code, meaning } => {
            TargetError::Nccl { rank, operation, code, meaning }
        }
        source => TargetError::Cuda { rank, doing, source },
    }
}
