//! `kill -9` at random moments on the real binaries: whatever the moments, running again completes
//! the work, and the result equals that of a run that nobody disturbed.
//!
//! `AERIE_CRASH_ROUNDS` sets the rounds (25), `AERIE_CRASH_SEED` the first seed. A seed that fails
//! belongs into tests/seeds.txt.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a failed test may panic")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use aerie_tests::interrupt::{Random, Watched};
use aerie_tests::{command, root, small, trainer};

const ROUNDS: u64 = 25;

/// Seeds kept for `kind`, then as many new ones as asked for.
fn seeds(kind: &str, rounds: u64) -> Vec<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let first = number("AERIE_CRASH_SEED").unwrap_or_else(|| u64::from(std::process::id()) << 20);
    let rounds = number("AERIE_CRASH_ROUNDS").unwrap_or(rounds);
    let kept = fs::read_to_string(root().join("tests/seeds.txt")).unwrap();
    let kept = kept.lines().filter_map(|line| line.strip_prefix(kind)?.trim().parse().ok());
    kept.chain(first..first + rounds).collect()
}

/// Starts the command, and kills it after a random number of log lines below `lines`.
fn killed(mut command: std::process::Command, random: &mut Random, lines: u64) -> bool {
    command.env("RUST_LOG", "info,aerie::shapes=trace,aerie::steps=trace");
    let mut child = Watched::start(command).unwrap();
    child.wait_lines(random.below(lines));
    child.linger(random.below(20_000));
    child.kill()
}

#[test]
fn an_extraction_killed_at_random_moments_ends_as_if_nothing_had_happened() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 24);
    let start = |dataset: &str| command("extractor", dir, &small::run_args(dataset));
    let mut undisturbed = start("straight");
    undisturbed.env("RUST_LOG", "info,aerie::shapes=trace");
    let (code, log) = Watched::start(undisturbed).unwrap().finish();
    assert_eq!(code, 0, "{log}");
    let lines = log.lines().count() as u64;
    let expected = small::contents(&dir.join("straight"));
    assert!(expected.len() > 10 && lines > 100, "{} samples, {lines} lines", expected.len());

    let (mut kills, mut resumed) = (0, 0);
    for seed in seeds("extract", ROUNDS) {
        let (mut random, dataset) = (Random(seed), format!("ds-{seed}"));
        let path = dir.join(&dataset);
        let mut committed = 0;
        for _ in 0..=random.below(3) {
            kills += u64::from(killed(start(&dataset), &mut random, lines));
            let now = small::committed(&path);
            assert!(now >= committed, "seed {seed}: {committed} samples became {now}");
            committed = now;
        }
        resumed += u64::from(committed > 0 && committed < expected.len());
        small::run(dir, &dataset).expect_code(0);
        let audit = small::assert_clean(dir, &dataset);
        assert!(audit.stdout.contains(" + 0 pending"), "seed {seed}: {audit:?}");
        assert!(small::contents(&path) == expected, "seed {seed}: other samples or other bytes");
        fs::remove_dir_all(path).unwrap();
    }
    println!("{kills} kills, {resumed} rounds resumed in the middle");
    // Otherwise the moments would all be before the first shard, or after the end.
    assert!(kills > ROUNDS / 2 && resumed > 0, "{kills} kills, {resumed} resumed in the middle");
}

/// Every file of the newest checkpoint but the configuration, which names the run's directory.
fn newest(run: &Path) -> BTreeMap<String, Vec<u8>> {
    let checkpoints = run.join("checkpoints");
    let mut names: Vec<_> =
        fs::read_dir(&checkpoints).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    let dir = checkpoints.join(names.last().unwrap());
    ["weights.safetensors", "optimizer.safetensors", "state.json", "vocab.safetensors"]
        .map(|name| (name.to_owned(), fs::read(dir.join(name)).unwrap()))
        .into()
}

#[test]
fn training_killed_at_random_moments_ends_with_the_same_bits() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    small::write_prompts(dir, 24);
    small::run(dir, "ds").expect_code(0);
    let settings = "[data]\ndataset = \"ds\"\nheld_out = 0.2\nmax_tokens = 128\n\
        [draft]\ndraft_vocab_size = 256\nintermediate_size = 32\nnum_attention_heads = 2\n\
        num_key_value_heads = 1\nhead_dim = 16\n\
        [train]\nepochs = 100\nmax_steps = 50\nttt_steps = 2\nwarmup_steps = 5\n\
        [checkpoint]\ncheckpoint_every = 4\neval_every = 20\nrun_dir = \"straight\"\n";
    fs::write(dir.join("fit.toml"), settings).unwrap();
    let fit = |run: &str| {
        let begun = fs::read_dir(dir.join(run).join("checkpoints")).is_ok_and(|entries| {
            // A folder that was not renamed yet has another name, and is no checkpoint.
            let names = entries.flatten().map(|entry| entry.file_name());
            names.into_iter().any(|name| name.to_string_lossy().starts_with("step-"))
        });
        let place = if begun { "--resume" } else { "--run-dir" };
        command("trainer", dir, &["fit", "--config", "fit.toml", place, run])
    };
    let mut undisturbed = fit("straight");
    undisturbed.env("RUST_LOG", "info,aerie::steps=trace");
    let (code, log) = Watched::start(undisturbed).unwrap().finish();
    assert_eq!(code, 0, "{log}");
    let (lines, expected) = (log.lines().count() as u64, newest(&dir.join("straight")));

    let mut kills = 0;
    for seed in seeds("fit", 6) {
        let (mut random, run) = (Random(seed), format!("run-{seed}"));
        for _ in 0..=random.below(3) {
            kills += u64::from(killed(fit(&run), &mut random, lines));
        }
        let (code, log) = Watched::start(fit(&run)).unwrap().finish();
        assert_eq!(code, 0, "seed {seed}: {log}");
        let checkpoints = fs::read_dir(dir.join(&run).join("checkpoints")).unwrap();
        let mut names = checkpoints.map(|entry| entry.unwrap().path());
        let half = names.find(|path| !path.join("BLAKE3SUMS").is_file());
        assert_eq!(half, None, "seed {seed}: left behind");
        let found = newest(&dir.join(&run));
        for (name, bytes) in &expected {
            assert!(found[name] == *bytes, "seed {seed}: {name} differs");
        }
        fs::remove_dir_all(dir.join(run)).unwrap();
    }
    println!("{kills} kills of the trainer");
    assert!(kills > 2, "{kills} kills");
    // A finished run has nothing left to do.
    trainer(dir, &["fit", "--config", "fit.toml", "--resume", "straight"]).expect_code(0);
}
