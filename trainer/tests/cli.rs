//! The binary: fit, resume, evaluate, export and config on a synthetic data set; exit codes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::disallowed_methods)]

#[path = "support/port.rs"]
mod port;
mod support;

use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use port::free_port;
use serde_json::Value;
use trainer::world::{Place, World};

fn trainer(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_trainer")).args(args).output().unwrap()
}

fn json(args: &[&str]) -> Value {
    let output = trainer(args);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {errors}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn from_a_data_set_to_an_export() {
    let dir = tempfile::tempdir().unwrap();
    let (data, run, out) =
        (dir.path().join("data"), dir.path().join("run"), dir.path().join("out"));
    support::dataset(&data, 40);
    let file = dir.path().join("fit.toml");
    let config = "[data]\nheld_out = 0.25\nmax_tokens = 96\n[draft]\ndraft_vocab_size = 44\n\
                  [train]\nlr = 5e-3\nttt_steps = 3\n[checkpoint]\ncheckpoint_every = 4\n";
    std::fs::write(&file, config).unwrap();
    let fit = ["fit", "--json", "--config", text(&file), "--dataset", text(&data)];
    let fitted = trainer(&[&fit[..], &["--run-dir", text(&run), "--max-steps", "6"]].concat());
    let said = String::from_utf8_lossy(&fitted.stderr);
    assert!(said.contains("train.warmup_steps = 20 of 6 steps"), "{said}");
    let report: Value = serde_json::from_slice(&fitted.stdout).unwrap();
    assert_eq!((&report["steps"], &report["new_steps"]), (&6.into(), &6.into()));

    // Without --config the stored settings are used; the finished run has nothing left to do.
    let report = json(&["fit", "--json", "--resume", text(&run)]);
    assert_eq!(report["new_steps"], 0);
    let changed = trainer(&["fit", "--resume", text(&run), "--lr", "0.5"]);
    assert_eq!(changed.status.code(), Some(78));
    let errors = String::from_utf8_lossy(&changed.stderr);
    assert!(errors.contains("train.lr") && errors.contains("0.005"), "{errors}");

    let length = |draft: &Path| {
        let evaluation = json(&[
            "evaluate",
            text(draft),
            "--dataset",
            text(&data),
            "--held-out-share",
            "0.25",
            "--ttt-steps",
            "3",
            "--json",
        ]);
        evaluation["all"]["acceptance_length"].as_f64().unwrap()
    };
    let shares = |draft: &Path, share: &str| {
        let flags = ["evaluate", text(draft), "--dataset", text(&data), "--held-out-share", share];
        trainer(&flags).status.code()
    };
    // Samples that the run was trained on are not held out.
    assert_eq!(shares(&run, "0.5"), Some(2));
    assert_eq!(shares(&run, "1.5"), Some(2));
    assert_eq!(shares(&run, "0.25"), Some(0));
    // A device that is asked for is used.
    let elsewhere = ["evaluate", text(&run), "--dataset", text(&data), "--device", "cuda:4711"];
    assert_eq!(trainer(&elsewhere).status.code(), Some(69));
    let best = report["acceptance_length"].as_f64().unwrap();
    assert!((length(&run) - best).abs() < 1e-9);
    let export = json(&["export", text(&run), text(&out), "--engine", "vllm", "--json"]);
    assert_eq!(export["layer_ids"]["top_level"], serde_json::json!([1, 2, 3]));
    let again = dir.path().join("again");
    let printed = trainer(&["export", text(&run), text(&again), "--engine", "vllm"]).stdout;
    let printed = String::from_utf8(printed).unwrap();
    let launch: Vec<&str> = printed.lines().filter(|line| line.contains("TARGET_MODEL")).collect();
    // SGLang would misread ids that were written for vLLM, so its line is not there.
    assert_eq!(launch.len(), 1, "{printed}");
    assert!(launch[0].contains("\"method\":\"eagle3\"") && launch[0].ends_with('\''));
    // bf16 weights, so nearly the same.
    assert!((length(&out) - best).abs() < 0.1, "{} {best}", length(&out));
}

#[test]
fn errors_have_their_exit_codes_and_say_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("none");
    for (args, code, words) in [
        (vec!["fit", "--run-dir", "r"], 78, "data.dataset"),
        (vec!["fit", "--clip", "often"], 78, "train.clip"),
        (vec!["fit", "--resume", text(&missing)], 65, "no complete checkpoint"),
        (vec!["fit", "--resume", text(&missing), "--allow-older"], 65, "no complete checkpoint"),
        (vec!["fit", "--run-dir", "r", "--dataset", ""], 78, "--dataset"),
        (vec!["export", text(&missing), "out"], 65, "does not exist: a run directory"),
        (vec!["export", text(dir.path()), "out"], 65, "BLAKE3SUMS"),
        (vec!["evaluate", text(&missing)], 2, "--dataset"),
        (vec!["bench", "--tokens", "0"], 2, "--tokens"),
        (vec!["bench", "--vocab", "0"], 78, "vocab_size"),
        (vec!["bench", "--intermediate", "9000000000000000000"], 78, "at most 16777216"),
        (vec!["evaluate"], 2, "DRAFT"),
        (vec!["export", "r", "out", "--layout", "speculators"], 2, "--target-name"),
        (vec!["evaluate", "r", "--dataset", "d", "--chain", "3", "--show"], 2, "--live"),
        (vec!["evaluate", "r", "--dataset", "d", "--tp", "2"], 2, "--live"),
        (vec!["evaluate", "r", "--dataset", "d", "--chain", "3", "--ttt-steps", "2"], 2, "--chain"),
        (vec!["evaluate", "r", "--live", "--chain", "3"], 2, "cannot be used with"),
        (vec!["evaluate", "r", "--live", "--all"], 2, "cannot be used with"),
        (vec!["evaluate", "r", "--live", "--max-new-tokens", "1"], 2, "at least 2"),
        (vec!["evaluate", "r", "--live", "--max-new-tokens", "18446744073709551615"], 2, "at most"),
        (vec!["evaluate", "r", "--live", "--limit", "0"], 2, "at least 1"),
    ] {
        let output = trainer(&args);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {errors}");
        assert!(errors.contains(words), "{args:?}: {errors}");
        assert!(output.stdout.is_empty());
    }
    assert!(!missing.exists(), "nothing is made of a misspelt run");
    let bad = dir.path().join("bad.toml");
    std::fs::write(&bad, "[train]\nlearning_rate = 1\n").unwrap();
    let output = trainer(&["config", "--config", text(&bad)]);
    assert_eq!(output.status.code(), Some(78));
    assert!(String::from_utf8_lossy(&output.stderr).contains("learning_rate"));
}

#[test]
fn the_printed_configuration_names_origins_and_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let output = trainer(&["config", "--lr", "0.125", "--fc-norm", "--norm-output", "false"]);
    let printed = String::from_utf8(output.stdout).unwrap();
    let line = |key: &str| printed.lines().find(|l| l.starts_with(key)).unwrap().to_owned();
    assert!(line("lr = 0.125").ends_with("(flag)"));
    assert!(line("fc_norm = true").ends_with("(flag)"));
    assert!(line("clip = 0.5").ends_with("(default)"));
    let file = dir.path().join("again.toml");
    std::fs::write(&file, &printed).unwrap();
    let again = json(&["config", "--json", "--config", text(&file)]);
    assert_eq!(again["train"]["lr"], 0.125);
}

#[test]
fn the_shipped_configurations_resolve() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if !text(&path).ends_with("-fit.toml") {
            continue; // the extractor's
        }
        let resolved = json(&["config", "--json", "--config", text(&path)]);
        let config: trainer::config::FitConfig = serde_json::from_value(resolved).unwrap();
        config.validate().unwrap();
        seen += 1;
    }
    assert!(seen >= 2);
}

/// Whether there is no driver or no such GPU, nobody is left with a panic.
#[test]
fn a_device_that_is_not_there_has_an_exit_code_of_its_own() {
    for command in [&["check", "--ops"][..], &["bench"]] {
        let output = trainer(&[command, &["--device", "cuda:4711"]].concat());
        assert_eq!(output.status.code(), Some(69), "{command:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("ERROR"), "{command:?}");
    }
    let output = trainer(&["bench", "--compute", "bf16"]);
    assert_eq!(output.status.code(), Some(78));
}

#[test]
fn a_half_set_environment_of_several_processes_is_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_trainer"))
        .args(["check", "--exchange"])
        .env_clear()
        .envs([("RANK", "0"), ("WORLD_SIZE", "2")])
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(78), "{errors}");
    assert!(errors.contains("MASTER_ADDR, MASTER_PORT"), "{errors}");
}

/// One of two processes, as torchrun starts them.
fn one_of_two(rank: usize, port: u16, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
    command.args(args).env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn start(rank: usize, port: u16, args: &[&str]) -> Child {
    start_in(Path::new("."), rank, (port, args))
}

fn start_in(dir: &Path, rank: usize, (port, args): (u16, &[&str])) -> Child {
    one_of_two(rank, port, args).current_dir(dir).spawn().unwrap()
}

/// Bytes that a pipe of Linux takes before somebody reads.
const PIPE: usize = 1 << 16;

/// Both processes take the same way around a damaged checkpoint; one of them moves it.
#[test]
fn several_processes_go_on_from_an_older_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let (data, run) = (dir.path().join("data"), dir.path().join("run"));
    support::dataset(&data, 40);
    let settings = [
        ["--dataset", text(&data)],
        ["--run-dir", text(&run)],
        ["--max-tokens", "64"],
        ["--ttt-steps", "2"],
        ["--draft-vocab-size", "44"],
        ["--accumulate", "2"],
        ["--max-steps", "4"],
        ["--checkpoint-every", "1"],
        ["--keep-last", "9"],
    ];
    json(&[&["fit", "--json"], &settings.concat()[..]].concat());
    let checkpoints = run.join("checkpoints");
    // One with bytes changed, and a newer one that lost its list.
    std::fs::write(checkpoints.join("step-00000003/weights.safetensors"), "damaged").unwrap();
    std::fs::remove_file(checkpoints.join("step-00000004/BLAKE3SUMS")).unwrap();
    let port = free_port();
    let args = ["fit", "--json", "--resume", text(&run), "--allow-older", "--keep-last", "9"];
    let processes = [0, 1].map(|rank| start(rank, port, &args));
    let [first, second] = processes.map(|process| process.wait_with_output().unwrap());
    for output in [&first, &second] {
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}");
    }
    let report: Value = serde_json::from_slice(&first.stdout).unwrap();
    assert_eq!(report["steps"], 4);
    let aside = ["damaged-step-00000003", "damaged-step-00000004"];
    assert!(aside.iter().all(|name| checkpoints.join(name).is_dir()));
}

/// Hosts whose run directory of the same name is another folder.
#[test]
fn processes_without_a_shared_run_directory_train_but_do_not_continue() {
    let dir = tempfile::tempdir().unwrap();
    let (data, hosts) = (dir.path().join("data"), ["one", "two"].map(|name| dir.path().join(name)));
    support::dataset(&data, 40);
    hosts.iter().for_each(|host| std::fs::create_dir(host).unwrap());
    let both = |args: &[&str]| {
        let port = free_port();
        let processes = [0, 1].map(|rank| start_in(&hosts[rank], rank, (port, args)));
        processes.map(|process| process.wait_with_output().unwrap())
    };
    let settings = "fit --json --run-dir run --ttt-steps 2 --draft-vocab-size 44 --accumulate 2 \
                    --max-steps 2 --checkpoint-every 1 --max-tokens 64 --dataset";
    let settings: Vec<&str> = settings.split_whitespace().chain([text(&data)]).collect();
    for output in both(&settings) {
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}");
    }
    assert!(!hosts[1].join("run").exists(), "the second process wrote nothing");
    let resume = ["fit", "--json", "--resume", "run"];
    let alone = start_in(&hosts[1], 1, (free_port(), &resume)).wait_with_output().unwrap();
    assert_eq!(alone.status.code(), Some(65));
    let errors = String::from_utf8_lossy(&alone.stderr);
    assert!(errors.contains("on a folder that all of them share"), "{errors}");
    // An old copy is no shared folder either.
    let checkpoint = |host: &Path| host.join("run/checkpoints/step-00000001");
    std::fs::create_dir_all(checkpoint(&hosts[1])).unwrap();
    for entry in std::fs::read_dir(checkpoint(&hosts[0])).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), checkpoint(&hosts[1]).join(entry.file_name())).unwrap();
    }
    let [_, second] = both(&resume);
    let errors = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(78), "{errors}");
    assert!(errors.contains("continues from step 2, this one found step 1"), "{errors}");
}

#[test]
fn who_loses_another_process_ends_with_75() {
    let port = free_port();
    let process = start(0, port, &["check", "--exchange"]);
    let place = Place { rank: 1, size: 2, local_rank: 1, master: ("127.0.0.1".into(), port) };
    // Gone without a word, while the other one waits for its part of a sum.
    drop(World::join(place, "f32 on cpu\ncheck", |_| ()).unwrap());
    let output = process.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(75), "{errors}");
    assert!(errors.contains("rank 1 is gone"), "{errors}");
}

/// As `auto` makes it of one process that was given a GPU and one that was not.
#[test]
fn processes_that_compute_in_different_types_do_not_begin() {
    let port = free_port();
    let process = start(0, port, &["check", "--exchange"]);
    let place = Place { rank: 1, size: 2, local_rank: 1, master: ("127.0.0.1".into(), port) };
    World::join(place, "bf16 on cuda\ncheck", |_| ()).unwrap_err();
    let output = process.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(78), "{errors}");
    assert!(errors.contains("rank 1 is bf16 on cuda, here f32 on cpu: start all"), "{errors}");
}

/// The other process lives and shows it, but does not take part in the first step.
#[test]
fn a_process_that_lives_and_does_not_go_on_ends_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let (data, file) = (dir.path().join("data"), dir.path().join("fit.toml"));
    support::dataset(&data, 20);
    let mut config = support::config(&data, &dir.path().join("run"));
    (config.train.accumulate, config.train.step_deadline) = (2, 1);
    // Nothing to warn of: the log of the second process below takes no word.
    config.train.warmup_steps = 0;
    std::fs::write(&file, config.to_toml()).unwrap();
    let ended = |stderr: Stdio| {
        let port = free_port();
        let mut process = one_of_two(0, port, &["fit", "--quiet", "--config", text(&file)]);
        let process = process.stderr(stderr).spawn().unwrap();
        let place = Place { rank: 1, size: 2, local_rank: 1, master: ("127.0.0.1".into(), port) };
        let alike = format!("f32 on cpu\n{}", config.to_toml());
        let world = World::join(place, &alike, |_| ()).unwrap();
        // Both are there, both begin at the same step, and neither was asked to stop.
        world.from_first(0.0).unwrap();
        assert_eq!(world.from_first(7.0).unwrap(), 0.0);
        assert!(!world.any(false).unwrap());
        let output = process.wait_with_output().unwrap();
        world.finish();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, errors) = ended(Stdio::piped());
    assert_eq!(code, Some(75), "{errors}");
    assert!(errors.contains("step 1 has not gone on for 1 s"), "{errors}");
    assert!(errors.contains("--step-deadline"), "{errors}");
    // Its last words are for a pipe that is full and that nobody reads.
    let (_reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(&[0; PIPE]).unwrap();
    assert_eq!(ended(writer.into()).0, Some(75));
}

#[test]
fn processes_of_torchruns_environment_find_one_another() {
    let port = free_port();
    let processes = [0, 1].map(|rank| start(rank, port, &["check", "--exchange"]));
    for (rank, process) in processes.into_iter().enumerate() {
        let output = process.wait_with_output().unwrap();
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{printed}");
        assert!(printed.contains(&format!("rank {rank} of 2")), "{printed}");
    }
}
