//! Time of a forward by stage, measured by the GPU itself. Knows nothing of what a stage does.

use std::sync::Arc;
use std::time::Duration;

use kernels::cuda::CudaError;
use kernels::cuda::cudarc::driver::{CudaContext, CudaEvent, CudaStream, sys::CUevent_flags};

use super::device::driver;
use crate::target::model::{Stage, StageTimes};

/// Events between the stages of a forward, used again in the next.
pub(super) struct EventClock {
    context: Arc<CudaContext>,
    /// The start, then the end of each lap.
    events: Vec<CudaEvent>,
    laps: Vec<Stage>,
}

impl EventClock {
    pub(super) fn new(context: &Arc<CudaContext>) -> Self {
        Self { context: Arc::clone(context), events: Vec::new(), laps: Vec::new() }
    }

    /// Forgets earlier laps and records the start.
    pub(super) fn start(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        self.laps.clear();
        self.record(0, stream)
    }

    /// Charges what the stream does since the last lap to `stage`.
    pub(super) fn lap(&mut self, stage: Stage, stream: &CudaStream) -> Result<(), CudaError> {
        self.laps.push(stage);
        self.record(self.laps.len(), stream)
    }

    /// The end of the last lap.
    pub(super) fn last(&self) -> Option<&CudaEvent> {
        self.events.get(self.laps.len())
    }

    /// Sums of the laps; the GPU has passed the last one.
    pub(super) fn times(&self, rank: usize) -> Result<StageTimes, CudaError> {
        let mut times = StageTimes::default();
        for (stage, ends) in self.laps.iter().zip(self.events.windows(2)) {
            let milliseconds = ends[0].elapsed_ms(&ends[1]).map_err(driver("time a stage"))?;
            tracing::trace!(target: "aerie::laps", rank, ?stage, milliseconds);
            times.charge(*stage, Duration::from_secs_f64(f64::from(milliseconds) / 1e3));
        }
        Ok(times)
    }

    fn record(&mut self, index: usize, stream: &CudaStream) -> Result<(), CudaError> {
        while self.events.len() <= index {
            let event = self.context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
            self.events.push(event.map_err(driver("make an event"))?);
        }
        self.events[index].record(stream).map_err(driver("record an event"))
    }
}
