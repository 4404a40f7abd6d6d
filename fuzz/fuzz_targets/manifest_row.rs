//! Any text in the columns of a manifest that are parsed: a shard's name, a sample's id, settings.
#![no_main]

use libfuzzer_sys::fuzz_target;
use shared::{CaptureSpec, Digest, Fingerprint, SampleId, ShardId};

fuzz_target!(|text: &str| {
    if let Ok(id) = text.parse::<ShardId>() {
        assert_eq!(id.file_name(), text);
    }
    if let Ok(id) = text.parse::<SampleId>() {
        assert_eq!(id.to_string(), text.to_lowercase());
    }
    let _ = text.parse::<Digest>();
    let _ = serde_json::from_str::<CaptureSpec>(text);
    if let Ok(fingerprint) = serde_json::from_str::<Fingerprint>(text) {
        assert_eq!(fingerprint.diff(&fingerprint), []);
    }
});
