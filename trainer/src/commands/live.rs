//! `trainer evaluate --live`: speculative decoding with the target engine.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail};
use burn::backend::Flex;
use burn::tensor::{Tensor, TensorData};
use extractor::encode::{EncodeOptions, Encoder};
use extractor::target::weights::Checkpoint;
use extractor::target::{self, Compute, Device, EngineOptions, TargetModel, TargetSpec};
use serde::Serialize;
use trainer::decode::DraftDecoder;
use trainer::live::{
    LiveCounts, LiveError, LiveOptions, Prompt, greedy, read_prompts, require_equal, speculate,
};
use trainer::trained::TrainedDraft;

use super::{Usage, at_least_one};

/// Settings of live decoding.
#[derive(clap::Args)]
pub(crate) struct LiveArgs {
    /// Decode for real: draft chains judged by the target engine, compared with plain decoding.
    #[arg(long, requires = "model", requires = "prompts")]
    pub(crate) live: bool,
    /// Directory of the target model (with --live).
    #[arg(long, value_name = "DIR", requires = "live")]
    model: Option<PathBuf>,
    /// JSONL file of prompts: `messages`, `conversations`, `turns`, or `input_ids` with
    /// `loss_mask` (with --live).
    #[arg(long, value_name = "FILE", requires = "live")]
    prompts: Option<PathBuf>,
    /// Most prompts to decode (with --live).
    #[arg(long, requires = "live", default_value_t = usize::MAX, hide_default_value = true,
        value_name = "N", value_parser = at_least_one)]
    limit: usize,
    /// Most tokens of an answer, at least 2 (with --live).
    #[arg(long, requires = "live", default_value_t = 128, value_name = "N",
        value_parser = answer_tokens)]
    max_new_tokens: usize,
    /// Drafted tokens a round (with --live).
    #[arg(long, requires = "live", default_value_t = 3, value_name = "N",
        value_parser = at_least_one)]
    draft_tokens: usize,
    /// Print the text of every answer (with --live).
    #[arg(long, requires = "live")]
    show: bool,
    /// Ranks of tensor parallelism of the target (with --live).
    #[arg(long, requires = "live", default_value_t = 1, value_name = "N",
        value_parser = at_least_one)]
    tp: usize,
}

#[derive(Serialize)]
struct LiveReport {
    prompts: usize,
    generated_tokens: usize,
    lossless: bool,
    /// Bonus token included; nothing where no round was needed.
    acceptance_length: Option<f64>,
    acceptance_rate: Vec<f64>,
    #[serde(flatten)]
    counts: LiveCounts,
    seconds_speculative: f64,
    seconds_greedy: f64,
    /// With --show.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    answers: Vec<Answer>,
}

#[derive(Serialize)]
struct Answer {
    /// File and line of the prompt.
    prompt: String,
    #[serde(skip)]
    tokens: Vec<u32>,
    /// Special tokens included.
    text: String,
}

/// Decodes every prompt twice and prints the counts.
pub(crate) fn run(
    args: &LiveArgs,
    trained: &TrainedDraft,
    (device, json): (Device, bool),
    out: &mut dyn Write,
) -> anyhow::Result<bool> {
    let (Some(model), Some(path)) = (&args.model, &args.prompts) else {
        bail!(Usage("--live needs --model DIR and --prompts FILE".into()));
    };
    let encoder = Encoder::load(model, EncodeOptions::default())?;
    let prompts = read_prompts(path, &encoder, args.limit)?;
    if prompts.is_empty() {
        bail!(Usage(format!(
            "{} holds no prompt: one JSON object a line is expected",
            path.display()
        )));
    }
    let mut target = target::open(&EngineOptions {
        tp: args.tp,
        device,
        compute: Compute::F32,
        ..EngineOptions::new(model)
    })?;
    let options = LiveOptions {
        max_new_tokens: args.max_new_tokens,
        draft_tokens: args.draft_tokens,
        stop: encoder.stop_ids().iter().copied().collect(),
        aux_layers: trained.aux_layers.clone(),
    };
    let mut report = decode(target.as_mut(), trained, &prompts, (model, &options))?;
    match args.show {
        false => report.answers.clear(),
        true => {
            for answer in &mut report.answers {
                answer.text = encoder.tokenizer().decode_lossy(&answer.tokens)?;
            }
        }
    }
    if json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        writeln!(out, "draft    {}", trained.path.display())?;
        print(&report, args.draft_tokens, out)?;
    }
    Ok(true)
}

fn decode(
    target: &mut dyn TargetModel,
    trained: &TrainedDraft,
    prompts: &[Prompt],
    (model, options): (&Path, &LiveOptions),
) -> anyhow::Result<LiveReport> {
    let longest = prompts.iter().map(|prompt| prompt.input_ids.len()).max().unwrap_or(0);
    let room = longest + options.max_new_tokens + options.draft_tokens + 1;
    let embeddings = embeddings(model, target.spec())?;
    let draft = trained.draft::<Flex>(&Default::default())?;
    let vocabulary = trained.vocab.vocabulary().clone();
    let mut decoder = DraftDecoder::new(draft, embeddings, vocabulary, room);
    let mut counts = LiveCounts::default();
    let (mut answers, mut fast, mut plain) = (Vec::new(), 0.0, 0.0);
    for (done, prompt) in prompts.iter().enumerate() {
        let ids = &prompt.input_ids;
        let clock = Instant::now();
        let answer =
            speculate(target, &mut decoder, ids, options).with_context(|| prompt.name.clone())?;
        fast += clock.elapsed().as_secs_f64();
        let clock = Instant::now();
        let expected = greedy(target, ids, options).with_context(|| prompt.name.clone())?;
        plain += clock.elapsed().as_secs_f64();
        require_equal(&prompt.name, &expected, &answer.tokens)?;
        counts.add(&answer.counts);
        tracing::debug!(
            "{} of {}: {} tokens in {} rounds",
            done + 1,
            prompts.len(),
            answer.tokens.len(),
            answer.counts.rounds
        );
        let (prompt, tokens) = (prompt.name.clone(), answer.tokens);
        answers.push(Answer { prompt, tokens, text: String::new() });
    }
    Ok(LiveReport {
        prompts: prompts.len(),
        generated_tokens: answers.iter().map(|answer| answer.tokens.len()).sum(),
        lossless: true,
        acceptance_length: counts.acceptance_length(),
        acceptance_rate: counts.acceptance_rate(),
        counts,
        seconds_speculative: fast,
        seconds_greedy: plain,
        answers,
    })
}

fn embeddings(model: &Path, spec: &TargetSpec) -> anyhow::Result<Tensor<Flex, 2>> {
    let shape = [spec.vocab_size, spec.hidden_size];
    let rows = Checkpoint::open(model)
        .and_then(|checkpoint| checkpoint.rows("model.embed_tokens", shape, 0..shape[0]))
        .map_err(LiveError::from)?;
    Ok(Tensor::from_data(TensorData::new(rows, shape), &Default::default()))
}

/// Tokens of an answer. The first one comes from the prompt's forward and is never drafted; more
/// than any model has positions would only overflow.
fn answer_tokens(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| (2..=1 << 24).contains(count));
    count.ok_or_else(|| {
        "at least 2 tokens (the first is never drafted) and at most 16777216 are expected"
            .to_owned()
    })
}

fn print(report: &LiveReport, draft_tokens: usize, out: &mut dyn Write) -> std::io::Result<()> {
    for Answer { prompt, text, .. } in &report.answers {
        writeln!(out, "{prompt}: {text}")?;
    }
    let LiveReport { prompts, generated_tokens: tokens, counts, .. } = report;
    writeln!(out, "prompts  {prompts}, {tokens} tokens generated, {} rounds", counts.rounds)?;
    match report.acceptance_length {
        Some(length) => writeln!(
            out,
            "live acceptance length: {length:.3} tokens a target forward, bonus token included \
                ({draft_tokens} drafted a round)"
        )?,
        None => writeln!(
            out,
            "live acceptance length: not measured, every answer ended with its first token"
        )?,
    }
    for (position, rate) in report.acceptance_rate.iter().enumerate() {
        writeln!(out, "  position {position} accepted in {:.1} % of the rounds", 100.0 * rate)?;
    }
    writeln!(out, "lossless: all {prompts} texts equal plain greedy decoding token for token")
}
