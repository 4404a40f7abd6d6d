//! What a bench measured, as text: rates, shares of the ceiling, and a whole node by arithmetic.

use std::io::Write;
use std::time::Duration;

use extractor::target::{LayerFlops, RankGroup, Stage, StageTimes, TargetModel};

use super::BenchArgs;

/// Times and sizes of a batch.
pub(super) struct Measured {
    pub(super) tokens: usize,
    /// TFLOP/s that products reach on this machine.
    pub(super) ceiling: f64,
    pub(super) best: Duration,
    pub(super) median: Duration,
    /// By stage on the first rank, in the median run.
    pub(super) times: StageTimes,
    /// Bytes of captured rows.
    pub(super) captured: usize,
}

impl Measured {
    pub(super) fn print(
        &self,
        target: &RankGroup,
        args: &BenchArgs,
        out: &mut dyn Write,
    ) -> anyhow::Result<()> {
        let (spec, plan) = (target.spec(), &target.plans()[0]);
        let layers = spec.num_layers;
        // A token sees half its sequence on average.
        let context = args.seq_len as f64 / 2.0;
        let each = (0..layers).map(|layer| plan.layer_flops(spec, layer, context));
        let zero = LayerFlops { projections: 0.0, attention: 0.0, mlp: 0.0, experts: 0.0 };
        let flops = each.fold(zero, |sum, layer| LayerFlops {
            projections: sum.projections + layer.projections,
            attention: sum.attention + layer.attention,
            mlp: sum.mlp + layer.mlp,
            experts: sum.experts + layer.experts,
        });
        let tokens = self.tokens as f64;
        let rate = tokens / self.median.as_secs_f64();
        writeln!(
            out,
            "share      rank {} of {}, {layers} layers, {} heads, {} experts",
            plan.rank,
            plan.world_size,
            plan.heads.len(),
            plan.experts.len()
        )?;
        writeln!(out, "batch      {} tokens in sequences of {}", self.tokens, args.seq_len)?;
        writeln!(
            out,
            "ceiling    {:10.2}  TFLOP/s of products, measured in this run",
            self.ceiling
        )?;
        writeln!(
            out,
            "time       {:10.3}  ms a batch (median of {}, best {:.3})",
            millis(self.median),
            args.repeats,
            millis(self.best)
        )?;
        writeln!(out, "tokens/s   {rate:10.1}")?;
        self.print_stages(&flops, out)?;
        self.print_whole(&flops, out)?;
        let captured = self.captured as f64 / self.median.as_secs_f64() / 1e9;
        writeln!(out, "captured   {captured:10.3}  GB/s, {} bytes a batch", self.captured)?;
        self.print_node(layers, args, out)
    }

    fn print_stages(&self, flops: &LayerFlops, out: &mut dyn Write) -> std::io::Result<()> {
        writeln!(out, "stage              ms  us/token   TFLOP/s  of ceiling  (first rank)")?;
        for stage in Stage::ALL {
            let time = self.times.get(stage);
            let name = format!("{stage:?}").to_lowercase();
            let micros = time.as_secs_f64() * 1e6 / self.tokens as f64;
            write!(out, "{name:11} {:9.3} {micros:9.3}", millis(time))?;
            let work = match stage {
                Stage::Projections => flops.projections,
                Stage::Attention => flops.attention,
                Stage::Mlp => flops.mlp,
                Stage::Experts => flops.experts,
                _ => 0.0,
            };
            if work > 0.0 && time > Duration::ZERO {
                let rate = self.tokens as f64 * work / time.as_secs_f64() / 1e12;
                write!(out, " {rate:9.3} {:11.3}", rate / self.ceiling)?;
            }
            writeln!(out)?;
        }
        Ok(())
    }

    fn print_whole(&self, flops: &LayerFlops, out: &mut dyn Write) -> std::io::Result<()> {
        let outside = [Stage::Rest, Stage::Capture];
        let time: Duration = Stage::ALL
            .into_iter()
            .filter(|stage| !outside.contains(stage))
            .map(|stage| self.times.get(stage))
            .sum();
        let work = self.tokens as f64 * flops.total() / 1e12;
        let rate = work / time.as_secs_f64();
        writeln!(
            out,
            "layers      {:9.3} {:9} {rate:9.2} {:11.3}  ({work:.3} TFLOP)",
            millis(time),
            "",
            rate / self.ceiling
        )
    }

    /// A node's rate: its ranks work on the same tokens at the same time.
    fn print_node(
        &self,
        layers: usize,
        args: &BenchArgs,
        out: &mut dyn Write,
    ) -> anyhow::Result<()> {
        let Some(shape) = args.shape else { return Ok(()) };
        let rest = self.times.get(Stage::Rest);
        let all: Duration = Stage::ALL.into_iter().map(|stage| self.times.get(stage)).sum();
        let layer = (all - rest).as_secs_f64() / layers as f64;
        let whole = rest.as_secs_f64() + layer * shape.layers() as f64;
        writeln!(
            out,
            "node       {:10.1}  tokens/s = {} tokens / ({:.3} ms + {} layers x {:.3} ms); sums \
             across {} of {} ranks are in it",
            self.tokens as f64 / whole,
            self.tokens,
            millis(rest),
            shape.layers(),
            layer * 1e3,
            args.gpus,
            args.of
        )?;
        Ok(())
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
