//! Digests of the files of `DATASET/target/`, in a file beside them. Knows nothing of what the
//! files hold.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::Path;

use crate::digest::Digest;
use crate::durable::{DatasetDir, DurableError, at, read_small, write_file_with};
use crate::sums::{self, SUMS};

/// The list of a few files is never as long.
const MOST_BYTES: u64 = 1 << 16;

/// What is wrong with the listed files, one sentence each. Nothing where there is no list, as in
/// data sets that were begun before there was one.
pub fn faults(target: &Path) -> io::Result<Vec<String>> {
    let text = match read_small(&target.join(SUMS), MOST_BYTES) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            return Ok(vec![format!("{SUMS} is no regular file")]);
        }
        Err(error) => return Err(error),
    };
    let mut faults = Vec::new();
    let is_bare = |name: &str| !name.is_empty() && !name.starts_with('.') && !name.contains('/');
    for entry in sums::entries(&text) {
        let Some((name, digest)) = entry.filter(|(name, _)| is_bare(name)) else {
            faults.push(format!("{SUMS} is damaged"));
            continue;
        };
        match fs::symlink_metadata(target.join(name)) {
            Ok(found) if !found.is_file() => faults.push(format!("{name} is no regular file")),
            Ok(_) if digest_of(&target.join(name))? == digest => {}
            Ok(_) => faults.push(format!("{name} is not as it was written")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                faults.push(format!("{name} is missing"));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(faults)
}

/// Files that the list does not name, where there is one.
pub fn unlisted(target: &Path) -> io::Result<Vec<String>> {
    // What else it may be, faults says.
    let Ok(list) = read_small(&target.join(SUMS), MOST_BYTES) else { return Ok(Vec::new()) };
    let listed: Vec<&str> = sums::entries(&list).flatten().map(|(name, _)| name).collect();
    Ok(files(target)?.into_iter().filter(|name| !listed.contains(&name.as_str())).collect())
}

/// Names of the files that are to be listed.
fn files(target: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(target)? {
        let entry = entry?;
        let Some(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
        if name != SUMS && !name.starts_with('.') && entry.path().is_file() {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Bytes of a file's line in the list.
pub fn line_bytes(name: &str) -> usize {
    sums::line(name, &Digest::of(b"")).len()
}

fn digest_of(path: &Path) -> io::Result<Digest> {
    Ok(Digest::of_reader(File::open(path)?)?.0)
}

/// Lists the files as they are, if other ones are listed so far. [`faults`] were looked at before.
pub fn record(dir: &DatasetDir) -> Result<(), DurableError> {
    let (target, path) = (dir.target(), dir.target().join(SUMS));
    let mut digests = BTreeMap::new();
    for name in files(&target).map_err(at("listing", &target))? {
        let path = target.join(&name);
        digests.insert(name, digest_of(&path).map_err(at("reading", &path))?);
    }
    let list: String = digests.iter().map(|(name, digest)| sums::line(name, digest)).collect();
    match read_small(&path, MOST_BYTES) {
        Ok(old) if old == list => Ok(()),
        _ => write_file_with(dir.files().as_ref(), &path, list.as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_cut_and_missing_files_are_named_and_new_ones_are_listed() {
        let root = tempfile::tempdir().unwrap();
        let dir = DatasetDir::new(root.path());
        dir.create().unwrap();
        let target = dir.target();
        let write = |name: &str, text: &str| {
            crate::durable::write_file(&target.join(name), text.as_bytes()).unwrap();
        };
        write("a.json", "one");
        assert_eq!(faults(&target).unwrap(), [""; 0], "nothing is listed");
        record(&dir).unwrap();
        write("b.json", "two");
        assert_eq!(unlisted(&target).unwrap(), ["b.json"]);
        record(&dir).unwrap();
        assert_eq!(faults(&target).unwrap(), [""; 0]);
        assert_eq!(unlisted(&target).unwrap(), [""; 0]);
        for text in ["onE", "on"] {
            write("a.json", text);
            assert_eq!(faults(&target).unwrap(), ["a.json is not as it was written"]);
        }
        write("a.json", "one");
        fs::remove_file(target.join("b.json")).unwrap();
        assert_eq!(faults(&target).unwrap(), ["b.json is missing"]);
        write(SUMS, &format!("{}  ../settings.json\n", Digest::of(b"")));
        assert_eq!(faults(&target).unwrap(), ["BLAKE3SUMS is damaged"]);
    }
}
