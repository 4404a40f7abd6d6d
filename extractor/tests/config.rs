//! The configuration and the plan, through the real binary: files, environment and flags.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]
#![allow(clippy::disallowed_methods)] // test files need not be durable

mod support;

use std::collections::HashSet;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use support::{nano_kimi_dir, repository};

fn extractor(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_extractor"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("AERIE_")) {
        command.env_remove(name);
    }
    command.args(args);
    command
}

fn run(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (status.code().unwrap(), text(stdout), text(stderr))
}

fn json_of(command: &mut Command) -> Value {
    let (code, out, err) = run(command);
    assert!(code < 2, "{err}");
    serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{err}"))
}

fn write(dir: &Path, name: &str, text: &str) -> String {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn flags_beat_environment_beats_file_beats_defaults_and_each_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(
        dir.path(),
        "a.toml",
        "# comment\n[target]\ntp = 2\nrevision = \"r\"\n\n[data]\nmax_tokens = 100\n\
         last_turn_only = true\nchat_template_kwargs = { thinking = false }\n\
         [capture]\nlayers = [1, 7]\n[run]\nbatch_tokens = 5\n",
    );
    let answer = json_of(
        extractor(&["config", "--json", "--config", &file, "--max-tokens", "300"])
            .args(["--last-turn-only=false"])
            .env("AERIE_TP", "4")
            .env("AERIE_MAX_TOKENS", "200")
            .env("AERIE_PROMPTS", "a.jsonl,b.jsonl"),
    );
    let (config, origins) = (&answer["config"], &answer["origins"]);
    for (section, key, value, origin) in [
        ("target", "tp", json!(4), "environment AERIE_TP".to_owned()),
        ("target", "revision", json!("r"), format!("{file}:4")),
        ("target", "device", json!("cpu"), "default".into()),
        ("data", "max_tokens", json!(300), "flag --max-tokens".into()),
        ("data", "last_turn_only", json!(false), "flag --last-turn-only".into()),
        ("data", "prompts", json!(["a.jsonl", "b.jsonl"]), "environment AERIE_PROMPTS".into()),
        ("data", "chat_template_kwargs", json!({"thinking": false}), format!("{file}:9")),
        ("capture", "layers", json!([1, 7]), format!("{file}:11")),
        ("run", "batch_tokens", json!(5), format!("{file}:13")),
        ("run", "reject_limit", json!(0.1), "default".into()),
    ] {
        assert_eq!(config[section][key], value, "{key}");
        assert_eq!(origins[format!("{section}.{key}")], origin, "{key}");
    }
    let keys: usize =
        config.as_object().unwrap().values().map(|s| s.as_object().unwrap().len()).sum();
    assert_eq!(origins.as_object().unwrap().len(), keys);
}

#[test]
fn a_comma_in_the_name_of_a_prompts_file_is_a_comma() {
    let prompts = |args: &[&str]| {
        let mut command = extractor(&["config", "--json"]);
        json_of(command.args(args).env("AERIE_PROMPTS", "a,b"))["config"]["data"]["prompts"].clone()
    };
    assert_eq!(prompts(&["--prompts", "x,y.jsonl"]), json!(["x,y.jsonl"]));
    assert_eq!(prompts(&["--prompts", "x,y", "z", "--prompts", "v"]), json!(["x,y", "z", "v"]));
    assert_eq!(prompts(&[]), json!(["a", "b"]));
}

#[test]
fn the_printed_configuration_can_be_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let flags = ["--model", "m", "--layers", "2,4,7", "--answer-specials", "<think>", "</think>"];
    let kwargs = r#"--chat-template-kwargs={"thinking": true, "n": [1]}"#;
    let (code, printed, _) = run(extractor(&["config"]).args(flags).arg(kwargs));
    assert_eq!(code, 0);
    let file = write(dir.path(), "printed.toml", &printed);
    let direct = json_of(extractor(&["config", "--json"]).args(flags).arg(kwargs));
    let again = json_of(&mut extractor(&["config", "--json", "--config", &file]));
    assert_eq!(again["config"], direct["config"]);
    assert_eq!(direct["config"]["data"]["answer_specials"], json!(["<think>", "</think>"]));
}

#[test]
fn the_shipped_configurations_resolve() {
    for entry in std::fs::read_dir(repository().join("configs")).unwrap() {
        let path = entry.unwrap().path();
        if path.to_str().unwrap().ends_with("-fit.toml") {
            continue; // the trainer's
        }
        let answer = json_of(extractor(&["config", "--json", "--config"]).arg(&path));
        assert!(answer["config"]["target"]["model"].is_string(), "{}", path.display());
    }
}

#[test]
fn every_key_has_a_flag_of_its_name() {
    let answer = json_of(&mut extractor(&["config", "--json"]));
    let (_, help, _) = run(&mut extractor(&["config", "--help"]));
    for key in answer["origins"].as_object().unwrap().keys() {
        let (section, key) = key.split_once('.').unwrap();
        let flag = format!("--{}", key.replace('_', "-"));
        assert!(help.contains(&format!("{flag} ")) || help.contains(&format!("{flag}[")), "{flag}");
        assert!(help.contains(&format!("AERIE_{}=", key.to_uppercase())), "{key}");
        assert!(help.contains(&format!("[{section}] ")), "{section}");
    }
}

#[test]
fn mistakes_are_named_with_their_place() {
    let dir = tempfile::tempdir().unwrap();
    for (text, wanted) in [
        ("[data]\n\npromts = []\n", "a.toml:3: there is no key `data.promts`"),
        ("[dtaa]\n", "a.toml:1: there is no key `dtaa`; the sections are [target]"),
        ("tp = 4\n", "a.toml:1: there is no key `tp`"),
        ("[target]\ntp = \"two\"\n", "a.toml:2): invalid type"),
        ("[target]\ntp = 0\n", "a.toml:2): 1 to 256 ranks expected"),
        ("[run]\nreject_limit = 1.5\n", "a.toml:2): 0 to 1 expected"),
        ("[capture]\nlayers = \"eagle\"\n", "`default`, `eagle3` or numbers"),
        ("[capture]\ndtype = \"f64\"\n", "unknown variant `f64`, expected `bf16` or `fp8`"),
        ("[data\n", "is not TOML"),
    ] {
        let file = write(dir.path(), "a.toml", text);
        let (code, out, err) = run(&mut extractor(&["config", "--config", &file]));
        assert_eq!((code, out.as_str()), (78, ""), "{text}{err}");
        assert!(err.contains(wanted), "{text}{err}");
    }
    let (code, _, err) = run(&mut extractor(&["config", "--overlong", "keep"]));
    assert_eq!(code, 78, "{err}");
    assert!(err.contains("(flag --overlong): unknown variant `keep`"), "{err}");
    let huge = "--chat-template-kwargs={\"x\": 18446744073709551616}";
    let (code, _, err) = run(&mut extractor(&["config", huge]));
    assert_eq!(code, 2, "{err}");
    assert!(err.contains("64 bits hold"), "{err}");
    let missing = dir.path().join("none.toml");
    let (code, _, err) = run(extractor(&["config", "--config"]).arg(&missing));
    assert_eq!(code, 74);
    assert!(err.contains("none.toml"), "{err}");
}

const ROW: &str =
    r#"{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"Once more."}]}"#;

#[test]
fn the_plan_counts_samples_duplicates_and_rejects() {
    let dir = tempfile::tempdir().unwrap();
    // The same turns in another spelling are the same sample; ids do not matter.
    let same = json!({"id": 9, "conversations": [
        {"from": "human", "value": "q"}, {"from": "gpt", "value": "Once more."},
    ]})
    .to_string();
    let other = ROW.replace("more", "again");
    let tokens = r#"{"input_ids":[1,2,9999],"loss_mask":[0,1,1]}"#;
    let rows = [ROW, &same, &other, "{", tokens].join("\n");
    let prompts = write(dir.path(), "p.jsonl", &rows);
    let model = nano_kimi_dir();
    let plan = |more: &[&str]| {
        let mut command = extractor(&["plan", "--json", "--prompts", &prompts, "--model"]);
        let (code, out, err) = run(command.arg(&model).args(more));
        (code, serde_json::from_str::<Value>(&out).unwrap_or_else(|_| panic!("{err}")))
    };
    let (code, forecast) = plan(&["--tokens-per-second", "10", "--layers", "2,7"]);
    assert_eq!(code, 1, "2 of 5 lines are rejected");
    let wanted = json!({"bad_json": 1, "id_out_of_vocab": 1});
    assert_eq!(forecast["rejects"], wanted);
    for (key, count) in
        [("lines", 5), ("samples", 2), ("duplicates", 1), ("rejected", 2), ("batches", 1)]
    {
        assert_eq!(forecast[key], json!(count), "{key}");
    }
    let tokens = forecast["tokens"].as_u64().unwrap();
    assert_eq!(forecast["state_bytes"], json!(tokens * 2 * 2 * 128));
    assert_eq!(forecast["seconds"], json!(tokens as f64 / 10.0));
    assert!(forecast["examples"][0].as_str().unwrap().contains("p.jsonl:4: bad_json"));
    let (code, limited) = plan(&["--limit", "3", "--batch-tokens", "1", "--dtype", "fp8"]);
    assert_eq!(code, 0);
    assert_eq!((&limited["lines"], &limited["batches"]), (&json!(3), &json!(2)));
    assert_eq!(limited["state_bytes"], json!(tokens * 4 * (128 + 4)));
    assert_eq!(limited["rate_assumed"], json!(true));
    assert_eq!(plan(&["--reject-limit", "0.5"]).0, 0);
}

#[test]
fn a_plan_that_cannot_be_made_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let prompts = write(dir.path(), "p.jsonl", ROW);
    let empty = write(dir.path(), "empty.jsonl", "");
    let (model, bare) = (nano_kimi_dir(), dir.path());
    let broken = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(model.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["text_config"]["num_hidden_layers"] = 0.into();
    write(broken.path(), "config.json", &config.to_string());
    for (args, code, wanted) in [
        (vec!["--prompts", &prompts], 78, "`target.model` is not set: pass --model"),
        (vec!["--model", model.to_str().unwrap()], 78, "no prompt files are named"),
        (vec!["--model", model.to_str().unwrap(), "--prompts", &empty], 65, "empty.jsonl is empty"),
        (vec!["--model", bare.to_str().unwrap(), "--prompts", &prompts], 74, "config.json"),
        (
            vec!["--model", broken.path().to_str().unwrap(), "--prompts", &prompts],
            65,
            "num_hidden_layers",
        ),
        (
            vec!["--model", model.to_str().unwrap(), "--prompts", &prompts, "--layers", "2,9"],
            78,
            "layer 9 does not exist",
        ),
    ] {
        let (got, _, err) = run(extractor(&["plan"]).args(&args));
        assert_eq!(got, code, "{args:?}: {err}");
        assert!(err.contains(wanted), "{args:?}: {err}");
    }
}

#[test]
fn the_bundled_conversations_are_all_usable_short_and_held_out() {
    let data = repository().join("data");
    let mut seen = HashSet::new();
    for (name, rows) in [("prompts.jsonl", 400), ("held_out.jsonl", 40)] {
        let text = std::fs::read_to_string(data.join(name)).unwrap();
        for line in text.lines() {
            let row: Value = serde_json::from_str(line).unwrap();
            assert!(seen.insert(row["conversations"][0]["content"].clone()), "{}", row["id"]);
        }
        let plan = json_of(
            extractor(&["plan", "--json", "--max-tokens", "600", "--overlong", "reject"])
                .arg("--model")
                .arg(nano_kimi_dir())
                .arg("--prompts")
                .arg(data.join(name)),
        );
        assert_eq!(plan["samples"], json!(rows), "{name}: {plan}");
        assert_eq!(plan["lines"], json!(rows), "{name}");
    }
}
