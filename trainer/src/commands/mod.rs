//! The subcommands, and which exit code an error of theirs means.

pub(crate) mod bench;
mod bench_cuda;
pub(crate) mod check;
pub(crate) mod config;
mod device;
pub(crate) mod evaluate;
pub(crate) mod export;
pub(crate) mod fit;
mod flags;
mod live;

use std::sync::mpsc::channel;
use std::time::Duration;

use extractor::output::OutputFault;
use extractor::shutdown::EXIT_STOPPED;
use extractor::target::exit_at_once;
use trainer::acceptance::EvaluateError;
use trainer::batch::BatchError;
use trainer::checkpoint::CheckpointError;
use trainer::config::ConfigError;
use trainer::dataset::DatasetError;
use trainer::draft::{DraftConfigError, VocabularyError};
use trainer::exchange::ExchangeError;
use trainer::export::ExportError;
use trainer::fit::FitError;
use trainer::golden::GoldenError;
use trainer::live::LiveError;
use trainer::optimizer::GradientError;
use trainer::target::TargetError as TargetHeadError;
use trainer::tensors::TensorFileError;
use trainer::trained::TrainedError;
use trainer::ttt::TttError;
use trainer::world::WorldError;

/// A signal ended the training, which has left a checkpoint.
#[derive(Debug, thiserror::Error)]
#[error("stopped by a signal after a checkpoint; `trainer fit --resume RUN` continues")]
pub(crate) struct Stopped;

/// Arguments that are each well formed but do not go together.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Usage(pub(crate) String);

impl Usage {
    /// 2, as of arguments that clap refuses.
    pub(crate) fn exit_code(&self) -> u8 {
        2
    }
}

/// Parses a number above 0.
pub(crate) fn at_least_one(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|&count| count > 0);
    count.ok_or_else(|| "a whole number of at least 1 is expected".to_owned())
}

/// Exit code of the outermost error that knows one; 70 otherwise.
pub(crate) fn exit_code(error: &anyhow::Error) -> u8 {
    error.chain().find_map(code).unwrap_or(70)
}

fn code(error: &(dyn std::error::Error + 'static)) -> Option<u8> {
    macro_rules! first_of {
        ($($kind:ty),*) => {
            None$(.or_else(|| error.downcast_ref::<$kind>().map(|known| known.exit_code())))*
        };
    }
    let io = error.downcast_ref::<std::io::Error>().map(|_| 74);
    let stopped = error.downcast_ref::<Stopped>().map(|_| EXIT_STOPPED);
    first_of!(
        OutputFault,
        Usage,
        FitError,
        CheckpointError,
        ConfigError,
        DatasetError,
        TargetHeadError,
        EvaluateError,
        ExportError,
        TensorFileError,
        TrainedError,
        LiveError,
        TttError,
        BatchError,
        DraftConfigError,
        VocabularyError,
        GradientError,
        GoldenError,
        ExchangeError,
        WorldError,
        kernels::cuda::CudaError,
        extractor::target::TargetError,
        extractor::encode::EncoderError
    )
    .or(stopped)
    .or(io)
}

/// Time for the last words of a process that ends at once.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Ends the process at once with an error in its log; a log that nobody reads does not keep it.
fn end_saying(words: String, code: u8) -> ! {
    let (said, heard) = channel();
    let say = move || {
        tracing::error!("{words}");
        // Nobody listens any more if this took too long.
        let _ = said.send(());
    };
    if std::thread::Builder::new().spawn(say).is_ok() {
        let _ = heard.recv_timeout(LAST_WORDS);
    }
    exit_at_once(code)
}

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind};

    use super::*;

    #[test]
    fn a_lost_process_is_no_reader_that_went_away() {
        let source = Error::from(ErrorKind::BrokenPipe);
        let lost = anyhow::Error::from(FitError::from(WorldError::Lost { rank: 0, source }));
        assert_eq!(exit_code(&lost), 75);
    }
}
