//! The full-screen view of a run: how far it is, how fast, the percentiles so far, failures by class, each
//! worker's share. Text and ANSI escapes only; no keys are read, so Ctrl-C works as ever.

use std::{collections::VecDeque, fmt::Write as _};

use super::RunStatus;
use crate::{
    stats::{Samples, Summary},
    tally::Tally,
};

/// Enters the alternate screen and hides the cursor.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
/// Shows the cursor and leaves the alternate screen: undoes `ENTER`.
pub(super) const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
/// To the top; each line clears what is behind it, the end clears what is below.
const HOME: &str = "\x1b[H";
const CLEAR_LINE: &str = "\x1b[K\n";
const CLEAR_REST: &str = "\x1b[J";

/// Seconds of history in a sparkline.
const HISTORY_S: usize = 60;
/// Size of a terminal that does not tell it.
const COLUMNS: usize = 100;
const ROWS: usize = 30;
/// Classes of failures shown; workers are as many as the terminal's rows allow.
const FAILURES_MAX: usize = 5;

/// The screen, with what it must remember from one second to the next.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Screen {
    sent: u64,
    done: u64,
    tokens: u64,
    /// Answers of each of the last seconds.
    done_per_s: VecDeque<u64>,
}

// === impl Screen ===

impl Screen {
    /// What to write to the terminal this second.
    pub(super) fn draw(&mut self, status: RunStatus, tally: &Tally, first: bool) -> String {
        let size = rustix::termios::tcgetwinsize(std::io::stderr()).ok();
        let columns = size.map_or(0, |size| usize::from(size.ws_col));
        let rows = size.map_or(0, |size| usize::from(size.ws_row));
        let (columns, rows) =
            (if columns > 0 { columns } else { COLUMNS }, if rows > 0 { rows } else { ROWS });
        let mut lines = self.lines(status, tally, columns);
        lines.truncate(rows.saturating_sub(1));
        let mut out = String::from(if first { ENTER } else { "" });
        out.push_str(HOME);
        for line in lines {
            out.extend(line.chars().take(columns));
            out.push_str(CLEAR_LINE);
        }
        out + CLEAR_REST
    }

    fn lines(&mut self, status: RunStatus, tally: &Tally, columns: usize) -> Vec<String> {
        let RunStatus { elapsed, scheduled, sent, done, failed } = status;
        let rate = |now: u64, before: &mut u64| now.saturating_sub(std::mem::replace(before, now));
        let (sent_s, done_s) = (rate(sent, &mut self.sent), rate(done, &mut self.done));
        let tokens_s = rate(tally.tokens.completion, &mut self.tokens);
        self.done_per_s.push_back(done_s);
        if self.done_per_s.len() > HISTORY_S.min(columns.saturating_sub(24)) {
            self.done_per_s.pop_front();
        }
        let mut lines = vec![
            format!(
                "keyway-loadtest   {:.0} s   (Ctrl-C ends the run and keeps the report)",
                elapsed.as_secs_f64()
            ),
            String::new(),
            progress(sent, scheduled, columns),
            format!(
                "done {done}   in flight {}   failed {failed}   sent {sent_s}/s   answered {done_s}/s   generated {tokens_s} tokens/s",
                sent.saturating_sub(done)
            ),
            format!("answers a second   {}", sparkline(&self.done_per_s)),
            String::new(),
            format!("{:<16}{:>10}{:>11}{:>11}{:>11}{:>11}", "ms", "n", "p50", "p90", "p99", "max"),
        ];
        let figures: [(&str, &Samples); 5] = [
            ("TTFT", &tally.response.ttft),
            ("per token", &tally.tpot),
            ("between events", &tally.itl),
            ("end to end", &tally.response.e2e),
            ("sent late by", &tally.lag),
        ];
        lines.extend(figures.iter().filter_map(|(name, samples)| figure(name, samples.summary()?).into()));
        if let Some(slo) = &tally.slo {
            lines.push(format!("objective kept by {} of {}", slo.met, slo.of));
        }
        let tokens = &tally.tokens;
        if tokens.with_cached > 0 {
            let share = |part: u64, whole: u64| part as f64 * 100.0 / whole.max(1) as f64;
            lines.push(format!(
                "cached {:.1} % of prompt tokens, possible {:.1} %",
                share(tokens.cached, tokens.prompt),
                share(tokens.possible, tokens.wanted_prompt)
            ));
        }
        failures(tally, &mut lines);
        workers(tally, columns, &mut lines);
        lines
    }
}

fn progress(sent: u64, scheduled: Option<u64>, columns: usize) -> String {
    let Some(scheduled) = scheduled.filter(|&n| n > 0) else { return format!("sent {sent}") };
    let text = format!(" {sent} of {scheduled} sent");
    let width = columns.saturating_sub(text.len() + 2).clamp(10, 60);
    format!("{}{text}", bar(sent as f64 / scheduled as f64, width))
}

/// A bar of `width` cells, `share` of it filled.
fn bar(share: f64, width: usize) -> String {
    let filled = ((share.clamp(0.0, 1.0) * width as f64).round() as usize).min(width);
    format!("{}{}", "█".repeat(filled), "░".repeat(width - filled))
}

fn sparkline(values: &VecDeque<u64>) -> String {
    const STEPS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let most = values.iter().max().copied().unwrap_or(0).max(1);
    values.iter().map(|&value| STEPS[(value * 7 / most) as usize]).collect()
}

fn figure(name: &str, summary: Summary) -> String {
    let Summary { n, p50, p90, p99, max, .. } = summary;
    format!("{name:<16}{n:>10}{p50:>11.2}{p90:>11.2}{p99:>11.2}{max:>11.2}")
}

fn failures(tally: &Tally, lines: &mut Vec<String>) {
    let failures = tally.failures();
    if failures.is_empty() {
        return;
    }
    lines.push(String::new());
    for row in failures.iter().take(FAILURES_MAX) {
        // What a server says must not steer the terminal.
        let sample: String = row
            .samples
            .first()
            .into_iter()
            .flat_map(|text| text.chars())
            .filter(|c| !c.is_control())
            .collect();
        lines.push(format!("{:>8} {:<14}{sample}", row.count, row.class));
    }
}

fn workers(tally: &Tally, columns: usize, lines: &mut Vec<String>) {
    let workers = tally.workers();
    let all: u64 = workers.iter().map(|row| row.requests).sum();
    let most = workers.iter().map(|row| row.requests).max().unwrap_or(0);
    if most == 0 {
        return;
    }
    lines.push(String::new());
    for row in workers {
        let mut line = String::new();
        let cached = row.cached_tokens as f64 * 100.0 / row.prompt_tokens.max(1) as f64;
        let worker: String = row.worker.chars().filter(|c| !c.is_control()).take(28).collect();
        // Writing to a string cannot fail.
        let _ = write!(
            line,
            "{worker:<28}{:>8} {:>5.1} %",
            row.requests,
            row.requests as f64 * 100.0 / all as f64
        );
        let width = columns.saturating_sub(70).clamp(10, 40);
        let _ = write!(line, " {}  cached {cached:>5.1} %", bar(row.requests as f64 / most as f64, width));
        lines.push(line);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::client::record::{Failure, FailureClass, Outcome, tests::good};

    fn tally() -> Tally {
        let mut tally = Tally::new(Some("ttft<12ms".parse().unwrap()));
        for i in 0..30 {
            let mut record = good(i, i, i + 10, i + 40);
            record.exchange.worker = Some(format!("w{}", i % 3));
            tally.add(&record);
        }
        let mut bad = good(0, 0, 1, 2);
        let message = "no \x1b[2J worker".into();
        bad.exchange.outcome = Outcome::Failed(Failure { class: FailureClass::Status(503), message });
        tally.add(&bad);
        tally
    }

    #[test]
    fn everything_is_on_the_screen_and_fits() {
        let mut screen = Screen::default();
        let status =
            RunStatus { elapsed: Duration::from_secs(3), scheduled: Some(62), sent: 31, done: 31, failed: 1 };
        let lines = screen.lines(status, &tally(), 80);
        let text = lines.join("\n");
        for want in
            ["31 of 62 sent", "failed 1", "answered 31/s", "TTFT", "status_503", "w2", "33.3 %", "30 of 31"]
        {
            assert!(text.contains(want), "{want} in\n{text}");
        }
        // What a server said cannot move the cursor.
        assert!(!text.contains('\x1b') && text.contains("no [2J worker"));
        assert_eq!(lines[2].matches('█').count(), lines[2].matches('░').count());
        // The second time, rates count from the first.
        assert!(screen.lines(status, &tally(), 80)[3].contains("answered 0/s"));
    }

    #[test]
    fn a_screen_without_a_terminal_has_a_size_all_the_same() {
        let status = RunStatus { elapsed: Duration::ZERO, scheduled: None, sent: 0, done: 0, failed: 0 };
        let mut screen = Screen::default();
        let first = screen.draw(status, &Tally::default(), true);
        assert!(first.starts_with(ENTER) && first.ends_with(CLEAR_REST) && first.lines().count() <= ROWS);
        assert!(!screen.draw(status, &Tally::default(), false).contains(ENTER));
    }

    #[test]
    fn bars_and_sparklines() {
        assert_eq!((bar(0.5, 4), bar(7.0, 2)), ("██░░".into(), "██".into()));
        assert_eq!(sparkline(&VecDeque::from([0, 4, 8])), "▁▄█");
    }
}
