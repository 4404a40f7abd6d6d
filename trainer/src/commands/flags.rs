//! One flag for every key of the configuration, from the table in `trainer::config::keys`.

use std::path::PathBuf;
use std::sync::LazyLock;

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use trainer::config::keys::{KEYS, Kind};
use trainer::config::{ConfigError, Override, Resolved};

/// Flag, heading and help of each key: clap keeps references for the whole run.
static TEXTS: LazyLock<Vec<[String; 3]>> = LazyLock::new(|| {
    let texts = KEYS.iter().map(|key| {
        let default = Resolved::default_of(key).map(|text| format!(" [default: {text}]"));
        let help = format!("{}{}", key.help, default.unwrap_or_default());
        [key.name.replace('_', "-"), format!("[{}]", key.section), help]
    });
    texts.collect()
});

/// The configuration file and the flags given beside it.
#[derive(Clone, Debug, Default)]
pub(crate) struct ConfigFlags {
    pub(crate) file: Option<PathBuf>,
    pub(crate) overrides: Vec<Override>,
}

impl ConfigFlags {
    /// Defaults, the file (or `fallback` when none is given), then the flags.
    pub(crate) fn resolve(&self, fallback: Option<PathBuf>) -> Result<Resolved, ConfigError> {
        let file = self.file.clone().or(fallback);
        Resolved::load(file.as_deref(), &self.overrides)
    }
}

impl FromArgMatches for ConfigFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.file = matches.get_one::<PathBuf>("config").cloned();
        let given =
            |key| Some(Override { key, text: matches.get_one::<String>(key.name)?.clone() });
        self.overrides = KEYS.iter().filter_map(given).collect();
        Ok(())
    }
}

impl Args for ConfigFlags {
    fn augment_args(command: Command) -> Command {
        let file = Arg::new("config")
            .long("config")
            .value_name("FILE")
            .value_parser(clap::value_parser!(PathBuf))
            .help("TOML file with the keys below; flags win over it");
        KEYS.iter().zip(TEXTS.iter()).fold(command.arg(file), |command, (key, text)| {
            let [flag, heading, help] = text;
            let arg = Arg::new(key.name)
                .long(flag.as_str())
                .help(help.as_str())
                .help_heading(heading.as_str());
            command.arg(match key.kind {
                // `--fc-norm` alone means true, `--fc-norm false` turns it off again.
                Kind::Bool => arg.value_name("BOOL").num_args(0..=1).default_missing_value("true"),
                Kind::Number => arg.value_name("N").allow_negative_numbers(true),
                Kind::List => arg.value_name("N,N"),
                Kind::Text => arg.value_name("TEXT"),
                Kind::Dir => arg.value_name("DIR"),
            })
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}
