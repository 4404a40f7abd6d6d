//! The record of shapes that `--trace shapes` shows: every rank says what it holds.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use extractor::target::TargetModel;
use serde_json::Value;
use tracing_subscriber::EnvFilter;

use crate::{NANO_KIMI, batch, ids, layers, open};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// Fields of every line.
    fn fields(&self) -> Vec<Value> {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).collect()
    }
}

#[test]
fn every_rank_and_layer_is_recorded() {
    let log = Log::default();
    let writer = log.clone();
    // With a single subscriber `tracing` asks only the thread that comes to an event first, which
    // may be another test's without one, and takes its answer for all.
    let _second = tracing::Dispatch::new(tracing_subscriber::registry());
    let subscriber = tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_env_filter(EnvFilter::new("aerie::shapes=debug"))
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::with_default(subscriber, || {
        let mut target = open(NANO_KIMI, 4).unwrap();
        let batch = batch(&[ids(9, 512, 1), ids(3, 512, 2)]);
        target.prefill(&batch, &layers(&[2, 5])).unwrap();
        target.prefill(&batch, &layers(&[7])).unwrap();
    });
    let mut expected = BTreeSet::new();
    for (number, layers) in [(1, vec![2, 5]), (2, vec![7])] {
        for layer in layers {
            for rank in 0..4 {
                expected.insert(format!("batch {number} captured layer {layer} rank {rank}"));
            }
            expected.insert(format!("batch {number} gathered layer {layer} rank null"));
        }
    }
    let mut found = BTreeSet::new();
    for line in log.fields() {
        assert_eq!((&line["shape"], &line["dtype"]), (&"[12, 128]".into(), &"f32".into()));
        let (stage, layer, rank) = (&line["stage"], &line["layer"], &line["rank"]);
        let stage = stage.as_str().unwrap();
        found.insert(format!("batch {} {stage} layer {layer} rank {rank}", line["batch"]));
    }
    assert_eq!(found, expected);
}
