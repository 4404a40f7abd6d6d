//! Any bytes as a prompt file: every line is a conversation or a reject.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(dir) = tempfile::tempdir() else { return };
    let path = dir.path().join("prompts.jsonl");
    if std::fs::write(&path, data).is_err() {
        return;
    }
    let Ok(prompts) = extractor::prompts::Prompts::open(&[path]) else { return };
    let mut last = 0;
    for line in prompts.flatten() {
        assert!(line.source.line > last);
        last = line.source.line;
    }
});
