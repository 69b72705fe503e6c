//! A comparison as one HTML page: each figure's change with its interval, better and worse in colour. Judges
//! nothing.

use std::fmt::Write as _;

use super::{ChangeVerdict, ComparedFigure, Comparison};
use crate::{
    draw::{page, svg::escape},
    report::Report,
};

/// Size of the plot of changes, in SVG units.
const WIDTH: f64 = 760.0;
const LEFT: f64 = 110.0;
const RIGHT: f64 = 44.0;
const LINE: f64 = 22.0;
const TOP: f64 = 8.0;

/// Renders `comparison` of two sides whose first runs are `base` and `new`.
pub fn render(comparison: &Comparison, base: &Report, new: &Report) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(comparison, base, new, &mut out);
    out
}

fn write(comparison: &Comparison, base: &Report, new: &Report, out: &mut String) -> std::fmt::Result {
    let title = escape(&base.config.describe());
    page::begin(&title, out)?;
    writeln!(out, "<h1>{title}</h1>\n<p class=\"sub\">{}</p>", comparison.describe())?;
    for (name, report) in [("base", base), ("new", new)] {
        let (model, url) = (escape(&report.config.model), escape(&report.config.url));
        writeln!(out, "<p class=\"sub\">{name}: {model} at {url}, seed {}</p>", report.config.seed)?;
    }
    for warning in &comparison.warnings {
        writeln!(out, "<p class=\"verdict warn\">{}</p>", escape(warning))?;
    }
    for gate in &comparison.failed {
        writeln!(out, "<p class=\"verdict bad\"><b>failed</b> {}</p>", escape(gate))?;
    }
    writeln!(out, "<h2>Change of each figure, with its 95 % interval</h2>")?;
    intervals(&comparison.rows, out)?;
    writeln!(out, "<h2>Figures</h2>")?;
    let heads = ["figure", "base ms", "new ms", "change", "95 % interval", "p", "verdict"];
    let cells = |row: &ComparedFigure| row.cells().map(|cell| escape(&cell)).to_vec();
    page::table(&heads, comparison.rows.iter().map(cells), out)?;
    writeln!(out, "<h2>Others</h2>")?;
    let plain = comparison.plain.iter().map(|plain| plain.cells().map(|cell| escape(&cell)).to_vec());
    page::table(&["figure", "base", "new"], plain, out)?;
    writeln!(
        out,
        "<p class=\"sub\">better, worse: by more than --min-change and more than chance, with all figures in view: 5 %</p>"
    )?;
    page::end(out)
}

/// A line for each figure: its interval, and a dot at the change.
fn intervals(rows: &[ComparedFigure], out: &mut String) -> std::fmt::Result {
    let judged: Vec<_> = rows.iter().filter_map(|row| Some((row, row.interval?))).collect();
    let reach =
        round_up(judged.iter().flat_map(|(_, (low, high))| [low.abs(), high.abs()]).fold(0.01, f64::max));
    let middle = f64::midpoint(LEFT, WIDTH - RIGHT);
    let at = |change: f64| middle + change / reach * (WIDTH - RIGHT - middle);
    let height = TOP + judged.len() as f64 * LINE + 26.0;
    let bottom = height - 26.0;
    writeln!(out, r#"<figure><svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img">"#)?;
    writeln!(out, "<title>Changes with their intervals</title>")?;
    for share in [-1.0, -0.5, 0.0, 0.5, 1.0] {
        let x = at(share * reach);
        writeln!(out, r#"<line class="grid" x1="{x:.1}" x2="{x:.1}" y1="{TOP}" y2="{bottom}"/>"#)?;
        let percent = (share * reach * 1e6).round() / 1e4;
        let text = if percent == 0.0 { "0 %".into() } else { format!("{percent:+} %") };
        writeln!(out, r#"<text class="tick mid" x="{x:.1}" y="{:.1}">{text}</text>"#, bottom + 16.0)?;
    }
    for (i, (row, (low, high))) in judged.iter().enumerate() {
        let y = TOP + (i as f64 + 0.5) * LINE;
        let colour = match row.verdict {
            ChangeVerdict::Better => "c3",
            ChangeVerdict::Worse => "c2",
            ChangeVerdict::Same | ChangeVerdict::TooFew => "c1",
        };
        writeln!(
            out,
            r#"<text class="tick end" x="{:.1}" y="{:.1}">{}</text>"#,
            LEFT - 8.0,
            y + 4.0,
            row.figure
        )?;
        let (from, to) = (at(*low), at(*high));
        writeln!(
            out,
            r#"<line class="line {colour}" x1="{from:.1}" x2="{to:.1}" y1="{y:.1}" y2="{y:.1}"/>"#
        )?;
        let change = format!("{}: {:+.1} %", row.figure, row.change * 100.0);
        writeln!(
            out,
            r#"<circle class="dot {colour}" cx="{:.1}" cy="{y:.1}" r="4"><title>{change}</title></circle>"#,
            at(row.change)
        )?;
    }
    writeln!(out, "</svg></figure>")
}

/// The next of 1, 2, 4, 6, 8 and 10 times a power of ten, so that its half reads well too.
fn round_up(reach: f64) -> f64 {
    let power = 10f64.powi(reach.log10().floor() as i32);
    let steps = [1.0, 2.0, 4.0, 6.0, 8.0, 10.0];
    let step = steps.into_iter().find(|step| step * power >= reach * (1.0 - 1e-9)).unwrap_or(10.0);
    // By way of decimal digits: 0.6 of 0.1 is not 0.06 in binary, and would be printed so.
    format!("{:.6}", step * power).parse().unwrap_or(reach)
}

#[cfg(test)]
mod tests {
    use super::round_up;

    #[test]
    fn ends_of_the_axis_are_round() {
        for (reach, end) in
            [(0.01, 0.01), (0.013, 0.02), (0.052, 0.06), (0.85, 1.0), (2.867, 4.0), (14.0, 20.0)]
        {
            assert_eq!(round_up(reach), end);
        }
    }
}
