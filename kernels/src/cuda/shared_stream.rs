//! A stream that takes turns with another user of the same context, whose streams it can't see.
//! Knows nothing of what either of them runs.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result, sys};

use super::CudaError;

/// A stream of our own in a context that somebody else uses too, and a second one for work beside
/// it.
#[derive(Debug)]
pub struct SharedStream {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    beside: Arc<CudaStream>,
    before: CudaEvent,
    after: CudaEvent,
    aside: CudaEvent,
}

fn wrong(operation: &'static str) -> impl FnOnce(result::DriverError) -> CudaError {
    CudaError::driver(operation)
}

impl SharedStream {
    /// A new stream in `context`.
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let flags = Some(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let event = || context.new_event(flags).map_err(wrong("create an event"));
        let stream = || context.new_stream().map_err(wrong("create a stream"));
        Ok(Self {
            context: context.clone(),
            stream: stream()?,
            beside: stream()?,
            before: event()?,
            after: event()?,
            aside: event()?,
        })
    }

    /// The stream.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// What this stream is given from here on runs after everything the context was given before.
    pub fn begin(&self) -> Result<(), CudaError> {
        self.context.bind_to_thread().map_err(wrong("make the context current"))?;
        // SAFETY: context and event are live; both calls only enqueue.
        unsafe { sys::cuCtxRecordEvent(self.context.cu_ctx(), self.before.cu_event()).result() }
            .map_err(wrong("record an event of the context (needs a driver for CUDA 12.5)"))?;
        self.stream.wait(&self.before).map_err(wrong("wait for the context"))
    }

    /// The second stream. What it is given between [`Self::begin`] and [`Self::end`] runs after
    /// what was there at the beginning, beside what the first is given meanwhile; the next
    /// beginning waits for both.
    pub fn beside(&self) -> Result<&CudaStream, CudaError> {
        self.beside.wait(&self.before).map_err(wrong("wait for the context"))?;
        Ok(&self.beside)
    }

    /// What the first stream is given from here on runs after everything the second was given.
    pub fn join(&self) -> Result<(), CudaError> {
        self.aside.record(&self.beside).map_err(wrong("record an event"))?;
        self.stream.wait(&self.aside).map_err(wrong("wait for the second stream"))
    }

    /// What the context is given from here on runs after everything this stream was given before.
    pub fn end(&self) -> Result<(), CudaError> {
        self.after.record(&self.stream).map_err(wrong("record an event"))?;
        // SAFETY: context and event are live; the call only enqueues.
        unsafe { sys::cuCtxWaitEvent(self.context.cu_ctx(), self.after.cu_event()).result() }
            .map_err(wrong("make the context wait (needs a driver for CUDA 12.5)"))
    }

    /// An error when work that the context was given has gone wrong: nothing runs in it any more.
    /// Does not wait.
    pub fn health(&self) -> Result<(), CudaError> {
        // SAFETY: context and stream are live; neither call waits.
        let answer = unsafe {
            match sys::cuCtxSetCurrent(self.context.cu_ctx()) {
                sys::CUresult::CUDA_SUCCESS => sys::cuStreamQuery(self.stream.cu_stream()),
                refused => refused,
            }
        };
        match works(answer) {
            true => Ok(()),
            false => answer.result().map_err(wrong("the context does not work any more")),
        }
    }

    /// Waits for all work of the context, and gives free and all bytes of the device's memory.
    pub fn settle(&self) -> Result<[usize; 2], CudaError> {
        self.context.synchronize().map_err(wrong("wait for the context"))?;
        let (free, all) = result::mem_get_info().map_err(wrong("size of the memory"))?;
        Ok([free, all])
    }
}

/// Whether a context that gives this answer to a question about one of its streams works: it is
/// done, it is busy, or the process is at its end.
fn works(answer: sys::CUresult) -> bool {
    use sys::CUresult::{CUDA_ERROR_DEINITIALIZED, CUDA_ERROR_NOT_READY, CUDA_SUCCESS};
    matches!(answer, CUDA_SUCCESS | CUDA_ERROR_NOT_READY | CUDA_ERROR_DEINITIALIZED)
}

/// Measures parts of a stream's work by events.
#[derive(Debug)]
pub struct PartTimer {
    context: Arc<CudaContext>,
    /// Part, start and end.
    spans: Vec<(usize, CudaEvent, CudaEvent)>,
    open: Option<(usize, CudaEvent)>,
}

impl PartTimer {
    /// A timer without measurements.
    pub fn new(context: &Arc<CudaContext>) -> Self {
        Self { context: context.clone(), spans: Vec::new(), open: None }
    }

    fn event(&self, stream: &CudaStream) -> Result<CudaEvent, CudaError> {
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let event = self.context.new_event(flags).map_err(wrong("create an event"))?;
        event.record(stream).map_err(wrong("record an event"))?;
        Ok(event)
    }

    /// The stream's work from here on belongs to `part`.
    pub fn start(&mut self, stream: &CudaStream, part: usize) -> Result<(), CudaError> {
        self.stop(stream)?;
        self.open = Some((part, self.event(stream)?));
        Ok(())
    }

    /// Ends the part that was started, if any.
    pub fn stop(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        if let Some((part, start)) = self.open.take() {
            let end = self.event(stream)?;
            self.spans.push((part, start, end));
        }
        Ok(())
    }

    /// Milliseconds of each of `parts` parts so far, which are then forgotten. Waits for the work.
    pub fn take(&mut self, parts: usize) -> Result<Vec<f64>, CudaError> {
        let mut sums = vec![0.0; parts];
        for (part, start, end) in std::mem::take(&mut self.spans) {
            end.synchronize().map_err(wrong("wait for an event"))?;
            let elapsed = start.elapsed_ms(&end).map_err(wrong("time between events"))?;
            if let Some(sum) = sums.get_mut(part) {
                *sum += f64::from(elapsed);
            }
        }
        Ok(sums)
    }
}

#[cfg(test)]
mod tests {
    use sys::CUresult;

    use super::*;

    #[test]
    fn a_busy_context_works_and_a_broken_one_does_not() {
        assert!(works(CUresult::CUDA_SUCCESS) && works(CUresult::CUDA_ERROR_NOT_READY));
        for broken in [
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            CUresult::CUDA_ERROR_LAUNCH_FAILED,
            CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
            CUresult::CUDA_ERROR_UNKNOWN,
        ] {
            assert!(!works(broken), "{broken:?}");
        }
    }
}
