//! What the lock file brings in: known licences, one registry, few versions of one crate. Needs no
//! network (docs/adr/0005); advisories are `.ci/deny`'s.

#![allow(clippy::unwrap_used, reason = "a failed test may panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use aerie_tests::root;
use serde_json::Value;

/// Any of these is enough; the last two are used unchanged and bind nothing of ours.
const LICENCES: [&str; 16] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "NCSA",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
    "MPL-2.0",
    "CDLA-Permissive-2.0",
];

/// Crates with several versions in the lock file. A new one is a choice, so this number is one too.
const MAX_DUPLICATED: usize = 45;

/// Direct dependencies that others still use in an older version.
const DUPLICATED_DIRECT: [&str; 3] = ["safetensors", "thiserror", "tokenizers"];

/// Packages that are compiled for this machine, tests apart.
fn packages() -> (Vec<Value>, BTreeSet<String>) {
    let host = Command::new("rustc").args(["--print", "host-tuple"]).output().unwrap();
    let host = String::from_utf8(host.stdout).unwrap();
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked", "--offline"])
        .args(["--filter-platform", host.trim()])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let by_id = |list: &Value| -> BTreeMap<String, Value> {
        let items = list.as_array().unwrap().iter();
        items.map(|item| (item["id"].as_str().unwrap().to_owned(), item.clone())).collect()
    };
    let (nodes, all) = (by_id(&metadata["resolve"]["nodes"]), by_id(&metadata["packages"]));
    let members = metadata["workspace_members"].as_array().unwrap();
    let members: Vec<&str> = members.iter().map(|id| id.as_str().unwrap()).collect();
    let (mut waiting, mut seen, mut direct) = (members.clone(), BTreeSet::new(), BTreeSet::new());
    while let Some(id) = waiting.pop() {
        if !seen.insert(id) {
            continue;
        }
        for dependency in nodes[id]["deps"].as_array().unwrap() {
            let kinds = dependency["dep_kinds"].as_array().unwrap();
            if kinds.iter().any(|kind| kind["kind"] != "dev") {
                let used = dependency["pkg"].as_str().unwrap();
                waiting.push(used);
                if members.contains(&id) {
                    direct.insert(all[used]["name"].as_str().unwrap().to_owned());
                }
            }
        }
    }
    (seen.into_iter().map(|id| all[id].clone()).collect(), direct)
}

/// Whether an SPDX expression of `AND`, `OR` and brackets can be met by [`LICENCES`].
fn allowed(expression: &str) -> bool {
    let expression = expression.trim();
    let halves = |word: &str| {
        let mut depth = 0;
        expression.char_indices().find_map(|(at, letter)| {
            depth += i32::from(letter == '(') - i32::from(letter == ')');
            let here = depth == 0 && expression[at..].starts_with(word);
            here.then(|| (&expression[..at], &expression[at + word.len()..]))
        })
    };
    if let Some((one, other)) = halves(" OR ").or_else(|| halves("/")) {
        return allowed(one) || allowed(other);
    }
    if let Some((one, other)) = halves(" AND ") {
        return allowed(one) && allowed(other);
    }
    match expression.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')) {
        Some(inner) => allowed(inner),
        None => LICENCES.contains(&expression),
    }
}

#[test]
fn expressions_of_licences_are_understood() {
    for (expression, expected) in [
        ("MIT", true),
        ("GPL-3.0-only", false),
        ("GPL-3.0-only OR MIT", true),
        ("MIT AND GPL-3.0-only", false),
        ("(MIT OR GPL-3.0-only) AND Unicode-3.0", true),
        ("MIT / Apache-2.0", true),
        ("", false),
    ] {
        assert_eq!(allowed(expression), expected, "{expression}");
    }
}

#[test]
fn every_dependency_has_a_licence_that_we_can_live_with_and_comes_from_the_registry() {
    let (packages, _) = packages();
    assert!(packages.len() > 100, "only {} packages", packages.len());
    let mut offences = Vec::new();
    for package in packages.iter().filter(|package| !package["source"].is_null()) {
        let (name, source) = (&package["name"], package["source"].as_str().unwrap());
        if source != "registry+https://github.com/rust-lang/crates.io-index" {
            offences.push(format!("{name} comes from {source}"));
        }
        let licence = package["license"].as_str().unwrap_or("none");
        if !allowed(licence) {
            offences.push(format!("{name} is under {licence}"));
        }
    }
    assert!(offences.is_empty(), "{}", offences.join("\n"));
}

#[test]
fn few_crates_are_there_in_several_versions() {
    let (packages, direct) = packages();
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for package in &packages {
        let (name, version) = (package["name"].as_str(), package["version"].as_str());
        versions.entry(name.unwrap()).or_default().insert(version.unwrap());
    }
    versions.retain(|_, versions| versions.len() > 1);
    assert!(versions.len() <= MAX_DUPLICATED, "{}: {versions:?}", versions.len());
    let ours: Vec<_> = versions.keys().filter(|name| direct.contains(**name)).collect();
    assert!(ours.iter().all(|name| DUPLICATED_DIRECT.contains(name)), "{ours:?}");
}
