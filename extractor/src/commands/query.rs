//! `extractor query`: the manifest as tables, for people (aligned) and programs (JSON, CSV).

use std::collections::HashSet;
use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Context;
use serde_json::{Map, Value};
use shared::Manifest;
use shared::manifest::{Cell, Listing, Table};

use super::Usage;

/// Arguments of `extractor query`.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["listing", "sql"]))]
#[command(group = clap::ArgGroup::new("format").args(["json", "csv"]))]
pub(crate) struct QueryArgs {
    /// Directory of the data set.
    dataset: PathBuf,
    /// What to list.
    #[arg(value_enum)]
    listing: Option<ListingName>,
    /// A reading query of your own over the tables and views.
    #[arg(long)]
    sql: Option<String>,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
    /// Comma-separated values with a header line.
    #[arg(long)]
    csv: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum ListingName {
    Samples,
    Shards,
    Rejects,
    Tokens,
    Runs,
}

/// Prints the rows.
pub(crate) fn run(args: &QueryArgs, out: &mut dyn Write) -> anyhow::Result<bool> {
    let manifest = Manifest::open_read(&args.dataset)
        .with_context(|| format!("opening {}", args.dataset.display()))?;
    let listing = args.listing.map(|name| match name {
        ListingName::Samples => Listing::Samples,
        ListingName::Shards => Listing::Shards,
        ListingName::Rejects => Listing::Rejects,
        ListingName::Tokens => Listing::Tokens,
        ListingName::Runs => Listing::Runs,
    });
    let table = match (listing, &args.sql) {
        (Some(listing), _) => manifest.list(listing)?,
        (None, Some(sql)) => manifest.query(sql)?,
        (None, None) => anyhow::bail!(Usage("name a listing or give --sql".into())),
    };
    if args.json {
        print_json(&table, out)?;
    } else if args.csv {
        print_csv(&table, out)?;
    } else {
        print_aligned(&table, out)?;
    }
    Ok(true)
}

fn print_json(table: &Table, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut seen = HashSet::new();
    if let Some(twice) = table.columns.iter().find(|name| !seen.insert(*name)) {
        // An object has one value a name: the others would be lost.
        anyhow::bail!(Usage(format!(
            "two columns are called `{twice}`: name them apart with AS, or print them with --csv"
        )));
    }
    for row in &table.rows {
        let mut object = Map::new();
        for (name, cell) in table.columns.iter().zip(row) {
            object.insert(name.clone(), serde_json::to_value(cell)?);
        }
        writeln!(out, "{}", Value::Object(object))?;
    }
    Ok(())
}

fn print_csv(table: &Table, out: &mut dyn Write) -> io::Result<()> {
    let quoted = |text: &str| match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    };
    let names: Vec<String> = table.columns.iter().map(|name| quoted(name)).collect();
    writeln!(out, "{}", names.join(","))?;
    for row in &table.rows {
        let cells: Vec<String> = row.iter().map(|cell| quoted(&cell.to_string())).collect();
        writeln!(out, "{}", cells.join(","))?;
    }
    Ok(())
}

/// Columns as wide as their widest cell, numbers to the right.
pub(super) fn print_aligned(table: &Table, out: &mut dyn Write) -> io::Result<()> {
    // Control characters of a reject's reason must not reach a terminal.
    let shown = |cell: &Cell| -> String {
        cell.to_string().chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
    };
    let rows: Vec<Vec<String>> =
        table.rows.iter().map(|row| row.iter().map(shown).collect()).collect();
    let width = |column: usize, name: &str| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([name.chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> =
        table.columns.iter().enumerate().map(|(column, name)| width(column, name)).collect();
    let numeric: Vec<bool> = (0..widths.len())
        .map(|column| {
            let cells = table.rows.iter().filter_map(|row| row.get(column));
            cells.clone().any(|cell| matches!(cell, Cell::Integer(_) | Cell::Real(_)))
                && cells.clone().all(|cell| !matches!(cell, Cell::Text(_) | Cell::Blob(_)))
        })
        .collect();
    for row in std::iter::once(&table.columns).chain(&rows) {
        let mut line = String::new();
        for ((cell, width), numeric) in row.iter().zip(&widths).zip(&numeric) {
            let fill = " ".repeat(width.saturating_sub(cell.chars().count()));
            let (before, after) = if *numeric { (fill.as_str(), "") } else { ("", fill.as_str()) };
            line.push_str(&format!("{before}{cell}{after}  "));
        }
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let text = |text: &str| Cell::Text(text.to_owned());
        Table {
            columns: vec!["file".to_owned(), "line".to_owned()],
            rows: vec![
                vec![text("a, \"b\"\u{1b}[2J"), Cell::Integer(7)],
                vec![Cell::Blob(vec![0, 255]), Cell::Null],
            ],
        }
    }

    fn printed(print: impl Fn(&Table, &mut dyn Write)) -> String {
        let mut out = Vec::new();
        print(&table(), &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn people_get_aligned_columns_without_control_characters() {
        let text = printed(|table, out| print_aligned(table, out).unwrap());
        assert_eq!(text, "file        line\na, \"b\" [2J     7\n00ff\n");
    }

    #[test]
    fn programs_get_quoted_csv_and_one_object_a_line() {
        let csv = printed(|table, out| print_csv(table, out).unwrap());
        assert_eq!(csv, "file,line\n\"a, \"\"b\"\"\u{1b}[2J\",7\n00ff,\n");
        let json = printed(|table, out| print_json(table, out).unwrap());
        assert_eq!(json.lines().nth(1).unwrap(), r#"{"file":"00ff","line":null}"#);
    }

    #[test]
    fn an_object_with_one_name_twice_is_refused_and_csv_is_not() {
        let twice = Table { columns: vec!["id".to_owned(), "id".to_owned()], ..table() };
        let error = print_json(&twice, &mut Vec::new()).unwrap_err();
        assert_eq!(error.downcast::<Usage>().unwrap().exit_code(), 2);
        print_csv(&twice, &mut Vec::new()).unwrap();
    }
}
