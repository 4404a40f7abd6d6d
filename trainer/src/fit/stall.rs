//! How long training waits for its input, and why. Knows no data set.

/// Largest share of the time that waiting may take without being explained.
const QUIET: f64 = 0.01;

/// Times of the input of a run so far, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct InputTimes {
    /// Batches taken.
    pub batches: u64,
    /// Waited for the first of them.
    pub first: f64,
    /// Waited for the others.
    pub later: f64,
    /// Spent by the reading threads.
    pub reading: f64,
}

impl InputTimes {
    /// Notes a batch that was waited for and had taken `reading` to prepare.
    pub fn add(&mut self, waited: f64, reading: f64) {
        match self.batches {
            0 => self.first = waited,
            _ => self.later += waited,
        }
        self.batches += 1;
        self.reading += reading;
    }

    /// Seconds waited.
    pub fn waited(&self) -> f64 {
        self.first + self.later
    }

    /// Share of `seconds` of training that was waited.
    pub fn share(&self, seconds: f64) -> f64 {
        if seconds > 0.0 { self.waited() / seconds } else { 0.0 }
    }

    /// Why more than one percent of `seconds` was waited, and what helps; `None` if it was less.
    pub fn explain(&self, seconds: f64) -> Option<String> {
        let share = self.share(seconds);
        if share <= QUIET {
            return None;
        }
        let text = format!(
            "{:.1} % of the time ({:.1} s) was waited for input",
            100.0 * share,
            self.waited()
        );
        let batches = self.batches.max(1) as f64;
        let (read, step) = (self.reading / batches, (seconds - self.waited()) / batches);
        let why = if self.first > self.later {
            "nearly all for the first batch: shards are compared with their digests before their \
             first use (data.verify = never leaves it to `extractor audit`)"
                .to_owned()
        } else if read > step {
            format!(
                "a batch takes {:.1} ms to read and {:.1} ms to train on: the disk or the \
                 processor is too slow for the device",
                1e3 * read,
                1e3 * step
            )
        } else {
            format!(
                "a batch takes {:.1} ms to read and {:.1} ms to train on, so single batches are \
                 late: raise data.prefetch",
                1e3 * read,
                1e3 * step
            )
        };
        Some(format!("{text}; {why}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(waits: &[f64], reading: f64) -> InputTimes {
        let mut times = InputTimes::default();
        waits.iter().for_each(|&waited| times.add(waited, reading));
        times
    }

    #[test]
    fn little_waiting_is_not_explained() {
        assert_eq!(times(&[0.05, 0.01, 0.02], 0.5).explain(10.0), None);
        assert_eq!(InputTimes::default().explain(0.0), None);
    }

    #[test]
    fn each_cause_has_its_remedy() {
        let cause = |waits: &[f64], reading| times(waits, reading).explain(10.0).unwrap();
        let first = cause(&[3.0, 0.1, 0.1], 0.2);
        assert!(first.contains("32.0 %") && first.contains("data.verify"), "{first}");
        let slow = cause(&[1.0, 2.0, 3.0], 2.5);
        assert!(slow.contains("2500.0 ms to read and 1333.3 ms"), "{slow}");
        assert!(cause(&[0.0, 0.5, 0.5], 0.2).contains("data.prefetch"));
    }
}
