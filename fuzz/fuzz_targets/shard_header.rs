//! Any bytes as a shard's file: refused or read, and what is read tiles the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use shared::{HeaderLimits, ShardHeader};

fuzz_target!(|data: &[u8]| {
    let bytes = data.len() as u64;
    if let Ok(header) = ShardHeader::read(data, bytes, &HeaderLimits::SHARD) {
        let mut end = header.data_start;
        for tensor in &header.tensors {
            assert_eq!(tensor.start, end);
            end += tensor.bytes;
        }
        assert_eq!(end, bytes);
    }
});
