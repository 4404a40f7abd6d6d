//! What the documents tell a reader to type or to open exists: commands, flags, files. Knows
//! Markdown no further than backticks, indented lines and links.

#![allow(clippy::expect_used, reason = "a failed test may panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use aerie_tests::{command, root};

/// Every document for readers, with its text.
fn documents() -> Vec<(PathBuf, String)> {
    let mut folders = vec![root().to_path_buf(), root().join("docs")];
    folders.extend([
        root().join("docs/adr"),
        root().join("tests/fixtures"),
        root().join("configs"),
    ]);
    let in_folder = |folder: PathBuf| fs::read_dir(folder).expect("the folder is there");
    let paths = folders.into_iter().flat_map(in_folder).map(|entry| entry.expect("listed").path());
    let kept =
        paths.filter(|path| path.extension().is_some_and(|end| end == "md" || end == "toml"));
    kept.map(|path| (path.clone(), fs::read_to_string(path).expect("documents are UTF-8")))
        .collect()
}

/// Pieces of a document that are meant literally: between backticks, and indented lines.
fn literal(text: &str) -> Vec<&str> {
    let indented = text.lines().filter(|line| line.starts_with("    "));
    let quoted = text.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    indented.chain(quoted).map(|piece| piece.split(" # ").next().unwrap_or(piece)).collect()
}

/// The command lines of both programs in a piece, as words from the program's name on.
fn commands(piece: &str) -> Vec<Vec<&str>> {
    let words: Vec<&str> = piece.split_whitespace().collect();
    let starts = |word: &&str| matches!(*word, "extractor" | "trainer");
    let named = words.iter().enumerate().filter(|(_, word)| starts(word)).map(|(at, _)| at);
    named
        .map(|at| {
            let ends = |word: &&str| !matches!(*word, "|" | "&&" | ";") && !starts(word);
            let rest = words[at + 1..].iter().copied().take_while(|word| ends(word));
            std::iter::once(words[at]).chain(rest).collect()
        })
        .collect()
}

/// Long flags that a subcommand's help names; `None` where there is no such subcommand.
fn flags(program: &str, subcommand: &str) -> Option<BTreeSet<String>> {
    let ran = command(program, root(), &[subcommand, "--help"]).output().expect("it starts");
    let text = String::from_utf8(ran.stdout).expect("help is UTF-8");
    let word = |c: char| !(c.is_ascii_alphanumeric() || c == '-');
    let named = text.split(word).filter(|name| name.starts_with("--"));
    ran.status.success().then(|| named.map(str::to_owned).collect())
}

#[test]
fn every_command_in_the_documents_is_one_the_programs_take() {
    let mut known: BTreeMap<String, Option<BTreeSet<String>>> = BTreeMap::new();
    let (mut offences, mut seen) = (Vec::new(), 0);
    for (path, text) in documents() {
        for line in literal(&text).into_iter().flat_map(commands) {
            let subcommand = line.get(1).copied().unwrap_or_default();
            if subcommand.is_empty() || !subcommand.chars().all(|c| c.is_ascii_lowercase()) {
                continue;
            }
            seen += 1;
            let said = line.join(" ");
            let key = format!("{} {subcommand}", line[0]);
            let Some(known) = known.entry(key).or_insert_with(|| flags(line[0], subcommand)) else {
                offences.push(format!("{}: no such command: {said}", path.display()));
                continue;
            };
            for flag in
                line.iter().flat_map(|word| flag(word)).filter(|&flag| !known.contains(flag))
            {
                offences.push(format!("{}: no {flag}: {said}", path.display()));
            }
        }
    }
    assert!(offences.is_empty(), "\n{}\n", offences.join("\n"));
    assert!(seen > 60, "found only {seen} commands: the search is wrong");
}

/// The name of a long flag, without its value and what a sentence puts around it.
fn flag(word: &str) -> Option<&str> {
    let word = word.trim_start_matches(['[', '(']);
    let end = word.find(|c: char| !(c.is_ascii_alphanumeric() || c == '-')).unwrap_or(word.len());
    Some(&word[..end]).filter(|name| name.starts_with("--") && name.len() > 2)
}

/// Whether a literal word is meant as a file of this repository.
fn names_a_file(word: &str) -> bool {
    let folder = word.split('/').next().unwrap_or_default();
    let ours =
        ["extractor", "trainer", "shared", "kernels", "migrations", "docs", "runs", "configs"];
    let others = ["tests", "models", "data", "fuzz", "attacks"];
    let plain = word.chars().all(|c| c.is_ascii_alphanumeric() || "/._-{,}".contains(c));
    word.contains('/') && plain && (ours.contains(&folder) || others.contains(&folder))
}

/// The words that a shell makes of one with braces.
fn expanded(word: &str) -> Vec<String> {
    let parts = word.split_once('{').and_then(|(head, rest)| Some((head, rest.split_once('}')?)));
    match parts {
        None => vec![word.to_owned()],
        Some((head, (list, tail))) => {
            list.split(',').flat_map(|one| expanded(&format!("{head}{one}{tail}"))).collect()
        }
    }
}

#[test]
fn every_file_in_the_documents_exists() {
    let (mut offences, mut seen) = (Vec::new(), 0);
    let mut check = |path: &Path, word: &str, from: &Path| {
        seen += 1;
        if !from.join(word).exists() {
            offences.push(format!("{}: {word}", path.display()));
        }
    };
    for (path, text) in documents() {
        let folder = path.parent().expect("documents lie in folders").to_path_buf();
        let links = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
        for link in links.filter(|link| !link.is_empty() && !link.contains("://")) {
            check(&path, link, &folder);
        }
        for word in literal(&text).into_iter().flat_map(str::split_whitespace) {
            let word = word.trim_end_matches([',', ';', ':', ')']);
            if names_a_file(word) {
                expanded(word).iter().for_each(|word| check(&path, word, root()));
            }
        }
    }
    assert!(offences.is_empty(), "\n{}\n", offences.join("\n"));
    assert!(seen > 60, "found only {seen} files: the search is wrong");
}
