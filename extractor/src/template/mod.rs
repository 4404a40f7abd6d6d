//! Chat templates as Hugging Face renders them: Jinja with Python's methods, under limits of fuel,
//! depth, output and time; no files, no clock. Knows no tokens.

mod thread;
mod values;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use fancy_regex::Regex;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind, State};
use thiserror::Error;

use crate::conversation::Message;
use crate::tokenizer::{TokenizerConfig, TokenizerError, read_limited};
use thread::{NoAnswer, SECONDS, Thread};
use values::{from_json, to_json, write_message};

/// Longest rendered text in bytes.
pub const MAX_RENDERED_BYTES: usize = 4 << 20;
/// Longest template source in bytes.
pub const MAX_TEMPLATE_BYTES: u64 = 1 << 20;
/// Address space that rendering takes, in bytes.
pub const ADDRESS_SPACE: usize = thread::STACK;
/// Instructions of one rendering, and 64-byte units of data it makes: 256 MB at most.
const FUEL: u64 = 4_000_000;
const RECURSION_LIMIT: usize = 100;

/// Why a chat template gives no text.
#[derive(Debug, Error)]
pub enum TemplateError {
    /// The file cannot be read.
    #[error("reading the chat template")]
    Read(#[source] TokenizerError),
    /// The file is not text.
    #[error("{} is not UTF-8", .0.display())]
    NotText(PathBuf),
    /// The template does not parse.
    #[error("the chat template does not parse: {0}")]
    Syntax(String),
    /// The template called `raise_exception`, or met something it cannot handle.
    #[error("the chat template refused the conversation: {0}")]
    Refused(String),
    /// The template used up its instructions or its memory.
    #[error("the chat template ran out of fuel: it loops, or makes too much data")]
    OutOfFuel,
    /// Rendering does not end: filters pay no fuel for what they walk through, so a list nested in
    /// itself often enough keeps one busy. All renderings after it get this at once.
    #[error(
        "the chat template did not end within {SECONDS} s: it walks through values that grow \
         without end; use the chat template that the model was published with"
    )]
    Endless,
    /// The template engine panicked, or there was no thread for it.
    #[error("the template engine stopped at the chat template; use another template")]
    Stopped,
    /// The rendered text is too long.
    #[error("the chat template wrote more than {MAX_RENDERED_BYTES} bytes")]
    TooLong,
}

/// A parsed chat template with the names of the model's special tokens.
#[derive(Debug)]
pub struct ChatTemplate {
    engine: Thread<Value, Result<String, TemplateError>>,
    source: String,
    variables: BTreeMap<String, Value>,
}

impl ChatTemplate {
    /// Reads `chat_template.jinja`, or else the `chat_template` of `tokenizer_config.json`.
    /// `None` when the model has neither.
    pub fn load(dir: &Path) -> Result<Option<Self>, TemplateError> {
        let config = TokenizerConfig::load(dir).map_err(TemplateError::Read)?;
        let path = dir.join("chat_template.jinja");
        let source = if path.exists() {
            let bytes = read_limited(&path, MAX_TEMPLATE_BYTES).map_err(TemplateError::Read)?;
            Some(String::from_utf8(bytes).map_err(|_| TemplateError::NotText(path))?)
        } else {
            config.chat_template()
        };
        source.map(|source| Self::new(source, &config.named_tokens())).transpose()
    }

    /// Parses a template; `tokens` are `bos_token` and the like.
    pub fn new(source: String, tokens: &BTreeMap<String, String>) -> Result<Self, TemplateError> {
        let syntax = |error: Error| TemplateError::Syntax(describe(&error));
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(RECURSION_LIMIT);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        let mut whitespace = SyntaxConfig::builder();
        whitespace.trim_blocks(true).lstrip_blocks(true);
        environment.set_syntax(whitespace.build().map_err(syntax)?);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", values::strftime_fixed);
        environment.add_filter("tojson", |state: &State, value: Value, options: Kwargs| {
            to_json(state, &value, &options)
        });
        environment.add_template_owned("chat", without_generation_tags(&source)).map_err(syntax)?;
        let variables =
            tokens.iter().map(|(name, text)| (name.clone(), Value::from(text.clone()))).collect();
        let engine = Thread::start(move |context| render(&environment, context));
        let engine = engine.map_err(|_| TemplateError::Stopped)?;
        Ok(Self { engine, source, variables })
    }

    /// Adds variables for every rendering, such as `thinking` or `enable_thinking`.
    pub fn set_variables(&mut self, variables: &serde_json::Map<String, serde_json::Value>) {
        let added = variables.iter().map(|(name, value)| (name.clone(), from_json(value)));
        self.variables.extend(added);
    }

    /// The template's text, for the fingerprint.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Lays the turns out as text; with `add_generation_prompt` it ends where the assistant's
    /// next turn begins.
    pub fn render(
        &self,
        messages: &[Message],
        tools: Option<&serde_json::Value>,
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        let messages: Vec<Value> = messages.iter().map(write_message).collect();
        let mut context = self.variables.clone();
        context.insert("messages".into(), Value::from(messages));
        context.insert("tools".into(), tools.map_or(Value::from(()), from_json));
        context.insert("add_generation_prompt".into(), Value::from(add_generation_prompt));
        match self.engine.ask(Value::from(context)) {
            Ok(text) => text,
            Err(NoAnswer::Late) => Err(TemplateError::Endless),
            Err(NoAnswer::Gone) => Err(TemplateError::Stopped),
        }
    }

    /// A rendering did not end, this time or before; nothing more can be rendered.
    pub fn is_endless(&self) -> bool {
        self.engine.is_late()
    }
}

fn render(environment: &Environment<'_>, context: Value) -> Result<String, TemplateError> {
    let template = environment.get_template("chat");
    let template = template.map_err(|error| TemplateError::Syntax(describe(&error)))?;
    let mut text = Limited { bytes: Vec::new(), full: false };
    match template.render_captured_to(context, &mut text) {
        Ok(_) => {}
        Err(_) if text.full => return Err(TemplateError::TooLong),
        Err(error) if error.kind() == ErrorKind::OutOfFuel => {
            return Err(TemplateError::OutOfFuel);
        }
        Err(error) => return Err(TemplateError::Refused(describe(&error))),
    }
    // The engine writes whole strings, so the bytes are UTF-8.
    String::from_utf8(text.bytes).map_err(|error| TemplateError::Refused(error.to_string()))
}

fn describe(error: &Error) -> String {
    let mut text = error.detail().map_or_else(|| error.to_string(), str::to_owned);
    if let Some(line) = error.line() {
        text += &format!(" (template line {line})");
    }
    text.chars().take(400).collect()
}

/// `{% generation %}` marks the assistant's text for other tools; here it means nothing, because
/// the loss mask comes from the boundaries of the rendering.
fn without_generation_tags(source: &str) -> String {
    let replace = |source: &str, pattern: &str, by: &str| match Regex::new(pattern) {
        Ok(tag) => tag.replace_all(source, by).into_owned(),
        Err(_) => source.to_owned(),
    };
    let opened = replace(source, r"\{%([-+]?)\s*generation\s*([-+]?)%\}", "{%$1 if true $2%}");
    replace(&opened, r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}", "{%$1 endif $2%}")
}

struct Limited {
    bytes: Vec<u8>,
    full: bool,
}

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_RENDERED_BYTES {
            self.full = true;
            return Err(io::Error::other("too much text"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
