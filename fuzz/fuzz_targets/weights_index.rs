//! Any bytes as the index of a checkpoint: nothing outside its directory is opened.
#![no_main]

use extractor::target::weights::Checkpoint;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(dir) = tempfile::tempdir() else { return };
    if std::fs::write(dir.path().join("model.safetensors.index.json"), data).is_err() {
        return;
    }
    // There are no weights in the directory, so nothing can be opened.
    assert!(Checkpoint::open(dir.path()).is_err());
});
