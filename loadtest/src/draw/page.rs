//! What every HTML page of this program has in common: one style sheet, light or dark as the reader's system
//! is, no script, nothing loaded from elsewhere. Knows no report.

use std::fmt::Write as _;

use super::svg::Plot;

const STYLE: &str = include_str!("html.css");

/// Writes the page's beginning. `title` is escaped already.
pub fn begin(title: &str, out: &mut String) -> std::fmt::Result {
    writeln!(out, "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">")?;
    writeln!(out, r#"<meta name="viewport" content="width=device-width, initial-scale=1">"#)?;
    // Without this a browser asks the server for an icon.
    writeln!(out, r#"<link rel="icon" href="data:,">"#)?;
    writeln!(
        out,
        "<title>{title} - keyway-loadtest</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>"
    )
}

/// Writes the page's end.
pub fn end(out: &mut String) -> std::fmt::Result {
    writeln!(out, "</main>\n</body>\n</html>")
}

/// Writes a section of plots; none if there is nothing to draw. Names are escaped already.
pub fn plots<N: AsRef<str>>(title: &str, plots: Vec<(N, Plot)>, out: &mut String) -> std::fmt::Result {
    let drawn: Vec<_> =
        plots.into_iter().filter_map(|(name, plot)| Some((name, plot.render()?, plot.legend()))).collect();
    if drawn.is_empty() {
        return Ok(());
    }
    writeln!(out, "<h2>{title}</h2>\n<div class=\"plots\">")?;
    for (name, svg, legend) in drawn {
        writeln!(out, "<figure>\n<figcaption>{}</figcaption>\n{legend}\n{svg}</figure>", name.as_ref())?;
    }
    writeln!(out, "</div>")
}

/// Writes a table. Cells are escaped already.
pub fn table(heads: &[&str], rows: impl Iterator<Item = Vec<String>>, out: &mut String) -> std::fmt::Result {
    writeln!(out, "<div class=\"scroll\"><table>\n<tr><th>{}</th></tr>", heads.join("</th><th>"))?;
    for row in rows {
        writeln!(out, "<tr><td>{}</td></tr>", row.join("</td><td>"))?;
    }
    writeln!(out, "</table></div>")
}
