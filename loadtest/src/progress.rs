//! What stderr shows of a run under way: a screen of its own on a terminal (`screen.rs`), a line every five
//! seconds elsewhere, or JSON. Ends up in no result.

mod screen;

use std::{
    io::{IsTerminal as _, Write as _},
    time::Duration,
};

use self::screen::Screen;
use crate::tally::Tally;

/// How to show progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Ui {
    /// `screen` on a terminal, else plain lines.
    Auto,
    /// The whole terminal: progress, rates, percentiles, failures, workers.
    #[value(alias = "tui", alias = "dashboard")]
    Screen,
    /// One line, redrawn each second.
    #[value(alias = "simple")]
    Line,
    /// A line every five seconds.
    Plain,
    /// A line of JSON each second, for programs.
    #[value(alias = "json-lines")]
    Json,
    /// Nothing.
    None,
}

/// Says on stderr what is assumed before a run; as JSON where programs read it.
pub fn remark(ui: Ui, text: &str) {
    // A closed stderr must not end the measurement.
    let _ = match ui {
        Ui::Json => writeln!(std::io::stderr(), "{}", serde_json::json!({ "remark": text })),
        _ => writeln!(std::io::stderr(), "keyway-loadtest: {text}"),
    };
}

/// Where a run stands.
#[derive(Debug, Clone, Copy)]
pub struct RunStatus {
    /// Time since the run's zero.
    pub elapsed: Duration,
    /// Requests in the schedule, if that is known.
    pub scheduled: Option<u64>,
    /// Requests handed over so far, those that warm up among them.
    pub sent: u64,
    /// Requests that ended in any way, those that warmed up among them.
    pub done: u64,
    /// Requests that failed, those that warmed up left out.
    pub failed: u64,
}

/// Shows a run's progress.
#[derive(Debug)]
pub struct Progress {
    style: Style,
    ticks: u64,
    sent_before: u64,
}

#[derive(Debug, PartialEq)]
enum Style {
    Screen(Screen),
    Redraw,
    Plain,
    Json,
    Nothing,
}

/// Seconds between plain lines.
const PLAIN_EVERY_TICKS: u64 = 5;

impl Progress {
    /// Progress in the style that `ui` and the terminal ask for.
    pub fn new(ui: Ui) -> Self {
        let style = match ui {
            Ui::None => Style::Nothing,
            Ui::Json => Style::Json,
            Ui::Line => Style::Redraw,
            Ui::Screen => Style::Screen(Screen::default()),
            Ui::Auto if std::io::stderr().is_terminal() => Style::Screen(Screen::default()),
            Ui::Auto | Ui::Plain => Style::Plain,
        };
        Self { style, ticks: 0, sent_before: 0 }
    }

    /// Call once a second. `tally` is what has come in so far.
    pub fn tick(&mut self, status: RunStatus, tally: &Tally) {
        self.ticks += 1;
        if let Style::Screen(screen) = &mut self.style {
            // A closed stderr must not end the measurement.
            let _ = std::io::stderr().write_all(screen.draw(status, tally, self.ticks == 1).as_bytes());
            return;
        }
        let every = if self.style == Style::Plain { PLAIN_EVERY_TICKS } else { 1 };
        if self.style == Style::Nothing || !self.ticks.is_multiple_of(every) {
            return;
        }
        let rate = (status.sent - self.sent_before) as f64 / every as f64;
        let line = if self.style == Style::Json { json(status, rate) } else { line(status, rate) };
        self.sent_before = status.sent;
        // A closed stderr must not end the measurement.
        let _ = match self.style {
            Style::Redraw => write!(std::io::stderr(), "\r\x1b[K{line}"),
            _ => writeln!(std::io::stderr(), "{line}"),
        };
    }

    /// Clears a redrawn line, gives the terminal back.
    pub fn finish(&mut self) {
        let _ = match std::mem::replace(&mut self.style, Style::Nothing) {
            Style::Redraw => write!(std::io::stderr(), "\r\x1b[K"),
            Style::Screen(_) if self.ticks > 0 => write!(std::io::stderr(), "{}", screen::LEAVE),
            _ => Ok(()),
        };
    }
}

impl Drop for Progress {
    /// Whatever ended the run, the terminal is the user's again.
    fn drop(&mut self) {
        self.finish();
    }
}

fn line(status: RunStatus, rate: f64) -> String {
    let RunStatus { elapsed, scheduled, sent, done, failed } = status;
    let scheduled = scheduled.map_or_else(String::new, |scheduled| format!("/{scheduled}"));
    format!(
        "{:>5.0} s  sent {sent}{scheduled} ({rate:.1}/s)  in flight {}  done {done}  errors {failed}",
        elapsed.as_secs_f64(),
        sent.saturating_sub(done)
    )
}

fn json(status: RunStatus, rate: f64) -> String {
    let RunStatus { elapsed, scheduled, sent, done, failed } = status;
    let elapsed_s = elapsed.as_secs_f64();
    let in_flight = sent.saturating_sub(done);
    serde_json::json!({
        "elapsed_s": elapsed_s, "scheduled": scheduled, "sent": sent, "sent_per_s": rate, "in_flight": in_flight,
        "done": done, "failed": failed,
    })
    .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line() {
        let status =
            RunStatus { elapsed: Duration::from_secs(7), scheduled: Some(90), sent: 50, done: 48, failed: 1 };
        let read: serde_json::Value = serde_json::from_str(&json(status, 6.0)).unwrap();
        assert_eq!(
            (&read["in_flight"], &read["scheduled"], &read["failed"]),
            (&2.into(), &90.into(), &1.into())
        );
        assert_eq!(line(status, 6.0), "    7 s  sent 50/90 (6.0/s)  in flight 2  done 48  errors 1");
    }
}
