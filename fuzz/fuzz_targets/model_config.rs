//! Any JSON as a model's configuration: refused or within the stated ranges.
#![no_main]

use extractor::target::TargetSpec;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(config) = serde_json::from_slice(data) else { return };
    if let Ok(spec) = TargetSpec::from_json(&config) {
        assert!(spec.num_layers > 0 && spec.hidden_size > 0 && spec.vocab_size > 0);
        assert!(spec.hidden_size.checked_mul(spec.vocab_size).is_some());
    }
});
