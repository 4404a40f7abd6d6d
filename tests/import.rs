//! States in other tools' files on the real binaries: what is imported is what was written, and
//! trains as if it had been extracted here; what can't be used is named.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a failed test may panic")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use aerie_tests::{Finished, extractor, extractor_within, small, trainer};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use shared::{CapturedSample, SampleId};

/// The layers that the small extraction records, as vLLM counts them.
const IDS: [&str; 2] = ["--vllm-layer-ids", "3,5,6,8"];
/// Some of the samples are cut here.
const MAX_TOKENS: &str = "160";
const SAMPLES: usize = 7;
const HIDDEN: usize = 128;
const LAYERS: usize = 4;

/// A sample as vLLM's connector writes it, free to be changed.
#[derive(Clone)]
struct Foreign {
    ids: Vec<i64>,
    /// Beside `token_ids`, if not empty.
    input_ids: Vec<i64>,
    mask: Option<Vec<u8>>,
    /// What the tensor of the states is called.
    name: &'static str,
    /// [tokens, layers, hidden] as bits of f32, of which bf16 keeps the upper half.
    states: Vec<u32>,
    shape: Vec<usize>,
    dtype: Dtype,
}

impl Foreign {
    fn of(sample: &CapturedSample) -> Self {
        let tokens = sample.sample().tokens();
        let layers: Vec<Vec<f32>> = sample.states().iter().map(|it| it.rows.to_f32()).collect();
        assert_eq!(layers.len(), LAYERS);
        let states = (0..tokens).flat_map(|token| {
            let row = token * HIDDEN..(token + 1) * HIDDEN;
            layers.iter().flat_map(move |layer| layer[row.clone()].iter().map(|v| v.to_bits()))
        });
        Self {
            ids: sample.sample().input_ids().iter().map(|&id| i64::from(id)).collect(),
            input_ids: Vec::new(),
            mask: None,
            name: "hidden_states",
            states: states.collect(),
            shape: vec![tokens, LAYERS, HIDDEN],
            dtype: Dtype::BF16,
        }
    }

    fn write(&self, path: &Path) {
        let bytes = |ids: &[i64]| ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>();
        let (ids, input_ids) = (bytes(&self.ids), bytes(&self.input_ids));
        let states: Vec<u8> = match self.dtype {
            Dtype::BF16 => {
                self.states.iter().flat_map(|bits| ((bits >> 16) as u16).to_le_bytes()).collect()
            }
            Dtype::F32 => self.states.iter().flat_map(|bits| bits.to_le_bytes()).collect(),
            _ => self.states.iter().map(|bits| (bits >> 24) as u8).collect(),
        };
        let view =
            |dtype, shape: &[usize], data| TensorView::new(dtype, shape.to_vec(), data).unwrap();
        let mut tensors = vec![
            (self.name, view(self.dtype, &self.shape, &states)),
            ("token_ids", view(Dtype::I64, &[self.ids.len()], &ids)),
        ];
        if !input_ids.is_empty() {
            tensors.push(("input_ids", view(Dtype::I64, &[self.input_ids.len()], &input_ids)));
        }
        if let Some(mask) = &self.mask {
            tensors.push(("loss_mask", view(Dtype::U8, &[mask.len()], mask)));
        }
        fs::write(path, safetensors::serialize(tensors, None).unwrap()).unwrap();
    }
}

/// Extracts a few samples into `dir/ds`, and writes each into `dir/hs` as another tool would.
fn extracted(dir: &Path) -> BTreeMap<SampleId, CapturedSample> {
    small::write_prompts(dir, 8);
    let args = small::run_args_with("ds", &["--max-tokens", MAX_TOKENS]);
    extractor(dir, &args).expect_code(0);
    let samples = small::contents(&dir.join("ds"));
    assert_eq!(samples.len(), SAMPLES);
    fs::create_dir(dir.join("hs")).unwrap();
    for (at, sample) in samples.values().enumerate() {
        Foreign::of(sample).write(&hs(dir, at));
    }
    samples
}

fn hs(dir: &Path, at: usize) -> PathBuf {
    dir.join(format!("hs/hs_{at}.safetensors"))
}

fn import(dir: &Path, more: &[&str]) -> Finished {
    let model = small::model();
    let mut args = vec!["import", "--from", "hs", "--json"];
    args.extend(["--model", model.to_str().unwrap(), "--shard-bytes", "400000"]);
    for default in [["--max-tokens", MAX_TOKENS], ["--dataset", "imported"]] {
        if !more.contains(&default[0]) {
            args.extend(default);
        }
    }
    let finished = extractor(dir, &[&args, more].concat());
    assert!(!finished.stderr.contains("panicked"), "{finished:?}");
    finished
}

fn report(finished: Finished) -> Value {
    serde_json::from_str(&finished.expect_code(0).stdout).unwrap()
}

fn rejects(dir: &Path) -> String {
    extractor(dir, &["query", "imported", "rejects", "--csv"]).expect_code(0).stdout
}

/// Values of the target's final norm, [hidden].
fn norm_weight(dir: &Path) -> Vec<f32> {
    let bytes = fs::read(dir.join("ds/target/head.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let norm = tensors.tensor("norm.weight").unwrap();
    match norm.dtype() {
        Dtype::BF16 => {
            let bits = norm.data().chunks(2).map(|b| u32::from(u16::from_le_bytes([b[0], b[1]])));
            bits.map(|bits| f32::from_bits(bits << 16)).collect()
        }
        _ => norm.data().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
    }
}

fn losses(dir: &Path, dataset: &str, run: &str) -> Vec<f64> {
    let fit = ["fit", "--dataset", dataset, "--run-dir", run, "--held-out", "0.2", "--json"];
    let short = ["--max-steps", "3", "--ttt-steps", "2", "--lr", "0.003", "--max-tokens", "256"];
    trainer(dir, &[&fit[..], &short].concat()).expect_code(0);
    let metrics = fs::read_to_string(dir.join(run).join("metrics.jsonl")).unwrap();
    let records = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let losses: Vec<f64> = records.filter_map(|it| it["train/loss"].as_f64()).collect();
    assert_eq!(losses.len(), 3, "{metrics}");
    losses
}

#[test]
fn imported_states_are_the_extracted_ones_bit_for_bit_and_train_the_same() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let samples = extracted(dir);
    let report = report(import(dir, &[&IDS[..], &["--prompts", "prompts.jsonl"]].concat()));
    assert_eq!(report["written"]["samples"], SAMPLES);
    assert_eq!(report["conservation"]["committed"], SAMPLES);
    assert!(report["written"]["shards"].as_u64().unwrap() > 1, "{report}");
    assert!(small::contents(&dir.join("imported")) == samples, "other samples than were written");
    small::assert_clean(dir, "imported");
    assert_eq!(losses(dir, "imported", "run-imported"), losses(dir, "ds", "run"));
    // The data set does not claim that this engine computed it.
    let settings = fs::read_to_string(dir.join("imported/settings.json")).unwrap();
    let settings: Value = serde_json::from_str(&settings).unwrap();
    assert_eq!(settings["fingerprint"]["states"], "imported");
    assert_eq!(settings["fingerprint"]["numerics"], Value::Null);
}

#[test]
fn the_files_own_mask_needs_no_prompts_and_f32_is_rounded_as_an_extraction_rounds() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let samples = extracted(dir);
    for (at, sample) in samples.values().enumerate() {
        let mask = Some(sample.sample().loss_mask().to_vec());
        let mut foreign = Foreign { mask, dtype: Dtype::F32, ..Foreign::of(sample) };
        // Less than half of a step of bf16.
        foreign.states.iter_mut().for_each(|bits| *bits |= 0x7000);
        foreign.write(&hs(dir, at));
    }
    report(import(dir, &["--layers", "2,4,5,7", "--made-by", "vLLM 0.20.2, INT4"]));
    assert!(small::contents(&dir.join("imported")) == samples, "other samples than were written");
    let settings = fs::read_to_string(dir.join("imported/settings.json")).unwrap();
    assert!(settings.contains("vLLM 0.20.2, INT4"), "{settings}");

    let layers = ["--layers", "2,4,5,7", "--reject-limit", "1"];
    report(import(dir, &[&layers[..], &["--max-tokens", "100", "--dataset", "cut"]].concat()));
    let cut = small::contents(&dir.join("cut"));
    assert!(!cut.is_empty());
    for sample in cut.values() {
        let is_start = |whole: &&CapturedSample| {
            whole.sample().input_ids().starts_with(sample.sample().input_ids())
        };
        let whole = samples.values().find(is_start).unwrap();
        for (part, whole) in sample.states().iter().zip(whole.states()) {
            assert!(whole.rows.to_f32().starts_with(&part.rows.to_f32()), "other rows");
        }
    }
}

#[test]
fn a_rerun_takes_what_is_new_and_what_was_mended() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let samples = extracted(dir);
    let whole = fs::read(hs(dir, 1)).unwrap();
    fs::write(hs(dir, 1), &whole[..whole.len() - 1]).unwrap();
    let again = |more: &[&str]| {
        let prompts = ["--prompts", "prompts.jsonl", "--reject-limit", "1"];
        import(dir, &[&IDS[..], &prompts, more].concat())
    };
    let first = report(again(&["--limit", "3"]));
    assert_eq!(
        (&first["conservation"]["committed"], &first["conservation"]["rejected"]),
        (&2.into(), &1.into())
    );
    assert!(
        rejects(dir).contains("bad_file: truncated: 165280 bytes are needed, the file has 165279"),
        "{}",
        rejects(dir)
    );

    fs::write(hs(dir, 1), whole).unwrap();
    fs::copy(hs(dir, 0), hs(dir, 99)).unwrap();
    let second = report(again(&[]));
    assert_eq!(second["written"]["samples"], SAMPLES - 2);
    let lines = &second["conservation"];
    assert_eq!((&lines["lines"], &lines["committed"]), (&(SAMPLES + 1).into(), &SAMPLES.into()));
    assert_eq!((&lines["duplicate"], &lines["rejected"]), (&1.into(), &0.into()));
    assert_eq!(report(again(&[]))["written"]["samples"], 0);
    assert!(small::contents(&dir.join("imported")) == samples, "other samples than were written");
    small::assert_clean(dir, "imported");

    // Another file of that name and of the same size.
    let mut other = fs::read(hs(dir, 0)).unwrap();
    *other.last_mut().unwrap() ^= 1;
    fs::write(hs(dir, 0), other).unwrap();
    let refused = again(&[]).expect_code(65);
    assert!(refused.stderr.contains("hs_0.safetensors was imported, and has other"), "{refused:?}");
    small::assert_clean(dir, "imported");
}

/// Equal tokens one after another give equal states where everything before is equal too, and
/// tokens that were never trained may share their embedding.
#[test]
fn short_runs_of_equal_states_are_taken() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let samples = extracted(dir);
    for (at, sample) in samples.values().enumerate() {
        let mut foreign = Foreign::of(sample);
        foreign.input_ids = foreign.ids.clone();
        foreign.mask = Some(sample.sample().loss_mask().to_vec());
        copy_row(&mut foreign, 0, 1..4);
        let end = foreign.ids.len();
        foreign.ids[6..end - 2].fill(7);
        foreign.input_ids.clone_from(&foreign.ids);
        copy_row(&mut foreign, 6, 7..end - 2);
        foreign.write(&hs(dir, at));
    }
    let report = report(import(dir, &["--layers", "2,4,5,7"]));
    assert_eq!(report["conservation"]["committed"], SAMPLES);
}

/// Puts the states of one token, of all layers, in the place of others'.
fn copy_row(foreign: &mut Foreign, from: usize, to: std::ops::Range<usize>) {
    let width = LAYERS * HIDDEN;
    for row in to {
        foreign.states.copy_within(from * width..(from + 1) * width, row * width);
    }
}

#[test]
fn a_file_that_is_still_being_written_waits_for_the_next_import() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    extracted(dir);
    let more = [&IDS[..], &["--prompts", "prompts.jsonl", "--reject-limit", "1"]].concat();
    let lock = fs::File::create(dir.join("hs/hs_2.safetensors.lock")).unwrap();
    lock.lock().unwrap();
    let first = report(import(dir, &more));
    assert_eq!(first["conservation"]["rejected"], 1);
    assert!(rejects(dir).contains("hs_2.safetensors,1,bad_file: its writer"), "{}", rejects(dir));
    // vLLM leaves the file there when it has finished.
    lock.unlock().unwrap();
    let second = report(import(dir, &more));
    assert_eq!(second["conservation"]["committed"], SAMPLES);
}

#[test]
fn a_disk_that_is_full_ends_the_import_and_the_next_one_completes_it() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let samples = extracted(dir);
    let more = [&IDS[..], &["--prompts", "prompts.jsonl"]].concat();
    // So that the limit is met by a shard and not by the target's files.
    report(import(dir, &[&more[..], &["--limit", "1"]].concat()));
    let model = small::model();
    let places = ["import", "--from", "hs", "--dataset", "imported", "--max-tokens", MAX_TOKENS];
    let args = [&places[..], &["--model", model.to_str().unwrap()], &more].concat();
    let refused = extractor_within("trap '' XFSZ; ulimit -f 300", dir, &args).expect_code(74);
    assert!(refused.stderr.contains("imported/shards/.shard-"), "{refused:?}");
    small::assert_clean(dir, "imported");
    assert_eq!(report(import(dir, &more))["conservation"]["committed"], SAMPLES);
    assert!(small::contents(&dir.join("imported")) == samples, "other samples than were written");
}

#[test]
fn two_prompts_of_the_same_ids_do_not_decide_what_is_trained() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let samples = extracted(dir);
    let rows = samples.values().enumerate().flat_map(|(at, sample)| {
        let (ids, mask) = (sample.sample().input_ids(), sample.sample().loss_mask());
        let row = |mask: &[u8]| serde_json::json!({ "input_ids": ids, "loss_mask": mask });
        let mut other = mask.to_vec();
        other[1] ^= u8::from(at == 3);
        // Equal rows are no contradiction.
        [row(mask).to_string(), row(&other).to_string()]
    });
    fs::write(dir.join("rows.jsonl"), rows.collect::<Vec<_>>().join("\n")).unwrap();
    let more = [&IDS[..], &["--prompts", "rows.jsonl", "--reject-limit", "1"]].concat();
    let report = report(import(dir, &more));
    assert_eq!(report["conservation"]["committed"], SAMPLES - 1);
    let said = "rows.jsonl:7 and rows.jsonl:8 have these token ids, but different loss masks";
    assert!(rejects(dir).contains(said), "{}", rejects(dir));
}

/// A name, what is done to a sound file, and what is said of it.
type Fault = (&'static str, fn(&mut Foreign), &'static str);

const FAULTS: &[Fault] = &[
    ("tokens_for_layers", |f| reshape(f, [f.ids.len() + 5, f.ids.len()]), "rows were taken for"),
    ("layers_first", |f| reshape(f, [LAYERS, f.ids.len(), HIDDEN]), "layers come first"),
    ("batch_axis", |f| f.shape.insert(0, 1), "a leading batch dimension of 1"),
    ("layer_missing", |f| reshape(f, [f.ids.len(), 3, HIDDEN]), "1 of 4 layers were not captured"),
    ("half_hidden", |f| reshape(f, [f.ids.len(), LAYERS, 64]), "one of 2 ranks' columns"),
    ("prefix_cache", |f| reshape(f, [f.ids.len() - 16, LAYERS, HIDDEN]), "prefix cache"),
    ("shifted", |f| reshape(f, [f.ids.len() - 1, LAYERS, HIDDEN]), "shifted by one"),
    ("other_name", |f| f.name = "states", "in its place 1 tensor ["),
    (
        "no_states",
        |f| reshape(f, [f.ids.len() * LAYERS * HIDDEN]),
        "all layers in one flattened list",
    ),
    ("fp8", |f| f.dtype = Dtype::F8_E4M3, "hidden_states is F8_E4M3"),
    ("nan", |f| f.states[700] = f32::NAN.to_bits(), "non_finite"),
    ("zero_row", |f| f.states[1024..1152].fill(0), "layer 2: row 2 is all zeros"),
    ("negative_zeros", |f| f.states[1024..1152].fill(1 << 31), "layer 2: row 2 is all zeros"),
    ("one_state", |f| copy_row(f, 9, 0..f.ids.len()), "have the state of another token before"),
    ("one_state_but_first", |f| copy_row(f, 1, 1..f.ids.len()), "for others; extract again"),
    ("one_state_signed_zeros", signed_zeros, "layer 2: "),
    ("two_ids", |f| f.input_ids = vec![f.ids[0], 0], "token_ids and input_ids part at [1]"),
    ("twins", twins, "layer 5 equals layer 4"),
    ("id_high", |f| f.ids[3] = 5000, "id_out_of_vocab: token_ids[3] is 5000"),
    ("id_negative", |f| f.ids[3] = -1, "bad_tokens: token_ids[3] is -1"),
    ("other_text", |f| f.ids[20] ^= 1, "has the first 20"),
    ("mask_short", |f| f.mask = Some(vec![1; f.ids.len() - 1]), "bad_tokens"),
    ("mask_2", |f| f.mask = Some(vec![2; f.ids.len()]), "bad_tokens"),
    ("mask_0", |f| f.mask = Some(vec![0; f.ids.len()]), "nothing_trainable"),
];

/// Claims another shape for as many of the values as it takes.
fn reshape<const N: usize>(foreign: &mut Foreign, shape: [usize; N]) {
    foreign.states.resize(shape.iter().product(), 0x3f80_0000);
    foreign.shape = shape.to_vec();
}

/// The third layer's rows are those of the second.
fn twins(foreign: &mut Foreign) {
    for row in foreign.states.chunks_mut(LAYERS * HIDDEN) {
        row.copy_within(HIDDEN..2 * HIDDEN, 2 * HIDDEN);
    }
}

/// Every row of the first layer is the first but for the signs of its zeros.
fn signed_zeros(foreign: &mut Foreign) {
    let first = foreign.states[..HIDDEN].to_vec();
    for (at, row) in foreign.states.chunks_mut(LAYERS * HIDDEN).enumerate() {
        row[..HIDDEN].copy_from_slice(&first);
        row[..HIDDEN / 2].fill((at as u32 % 2) << 31);
    }
}

/// The last layer's rows as they are after the final norm.
fn normed(foreign: &mut Foreign, weight: &[f32]) {
    for row in foreign.states.chunks_mut(LAYERS * HIDDEN) {
        let row = &mut row[3 * HIDDEN..];
        let squares: f32 = row.iter().map(|&bits| f32::from_bits(bits).powi(2)).sum();
        let rms = (squares / HIDDEN as f32 + 1e-6).sqrt();
        let values = row.iter_mut().zip(weight);
        values.for_each(|(bits, w)| *bits = (f32::from_bits(*bits) / rms * w).to_bits());
    }
}

#[test]
fn every_fault_is_a_reject_with_its_file_and_the_others_are_committed() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let samples = extracted(dir);
    let sound = Foreign::of(samples.values().max_by_key(|it| it.sample().tokens()).unwrap());
    let spoiled = |name: &str| dir.join(format!("hs/bad_{name}.safetensors"));
    for (name, spoil, _) in FAULTS {
        let mut foreign = sound.clone();
        spoil(&mut foreign);
        foreign.write(&spoiled(name));
    }
    let mut after_norm = sound;
    normed(&mut after_norm, &norm_weight(dir));
    after_norm.write(&spoiled("after_norm"));
    fs::create_dir(spoiled("folder")).unwrap();
    std::os::unix::fs::symlink(dir.join("prompts.jsonl"), spoiled("link")).unwrap();
    let more = [
        ("after_norm", "after the final norm"),
        ("folder", "bad_file: not a regular file"),
        ("link", "a link is not followed"),
    ];

    let args = [&IDS[..], &["--prompts", "prompts.jsonl", "--reject-limit", "1"]].concat();
    // One sample with a NaN among so few is more than a run may have.
    let ended = import(dir, &args).expect_code(65);
    assert!(ended.stderr.contains("NaN or infinite states"), "{ended:?}");
    let rejects = rejects(dir);
    for (name, said) in FAULTS.iter().map(|(name, _, said)| (*name, *said)).chain(more) {
        let row = rejects.lines().find(|row| row.contains(&format!("/bad_{name}.safetensors,1,")));
        assert!(row.is_some_and(|row| row.contains(said)), "{name}: {said}\n{rejects}");
    }
    let audit = small::assert_clean(dir, "imported").stdout;
    let total = FAULTS.len() + more.len();
    assert!(
        audit.contains(&format!("{SAMPLES} committed + 0 duplicate + {total} rejected")),
        "{audit}"
    );
    assert!(small::contents(&dir.join("imported")) == samples, "other samples than were written");
}

#[test]
fn what_the_files_do_not_say_is_asked_for_and_never_guessed() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    extracted(dir);
    let refused = |more: &[&str], code: i32, said: &str| {
        let refused = import(dir, more).expect_code(code);
        assert!(refused.stderr.contains(said), "{more:?}: {said}\n{refused:?}");
    };
    let prompts = ["--prompts", "prompts.jsonl"];
    let with = |more: &[&'static str]| [&prompts[..], more].concat();
    refused(&prompts, 2, "which layers they hold");
    refused(&with(&["--layers", "2,4,5,7", IDS[0], IDS[1]]), 2, "cannot be used with");
    refused(&with(&[IDS[0], "0,3,8"]), 2, "id 0 is the embeddings");
    // The numbers of the layers given as engine ids: the teacher would be the last layer but one.
    refused(&with(&[IDS[0], "2,4,5,7"]), 78, "has to end with the model's last layer, 7");
    refused(&IDS, 78, "no `loss_mask`: pass the conversations");
    assert_eq!(small::committed(&dir.join("imported")), 0);

    // Neither kind of states goes into a data set of the other.
    refused(
        &with(&[IDS[0], IDS[1], "--dataset", "ds"]),
        78,
        "states: stored absent, now `imported`",
    );
    report(import(dir, &with(&IDS)));
    let args = small::run_args_with("imported", &["--max-tokens", MAX_TOKENS]);
    let other = extractor(dir, &args).expect_code(78);
    assert!(other.stderr.contains("states: stored `imported`, now absent"), "{other:?}");

    for (name, said) in [
        ("data_0.ckpt", "runs code"),
        ("data_0.ckpt.gz", "runs code"),
        ("data_0.pt", "torch.load(FILE, weights_only=True)"),
        ("r.safetensors.zst", "unpack it first"),
    ] {
        fs::write(dir.join("hs").join(name), b"\x80\x02").unwrap();
        refused(&with(&IDS), 65, said);
        fs::remove_file(dir.join("hs").join(name)).unwrap();
    }
    fs::remove_dir_all(dir.join("hs")).unwrap();
    refused(&with(&IDS), 74, "hs");
    fs::create_dir(dir.join("hs")).unwrap();
    refused(&with(&IDS), 65, "holds no .safetensors files");
}
