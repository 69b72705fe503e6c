//! Line plots as SVG text that carries no style of its own: the page's style sheet colours it, light or dark.
//! Knows nothing of reports.

use std::fmt::Write as _;

/// Size of a plot and of the space around its area, in SVG units.
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 44.0;

/// The lowest value of a logarithmic axis over its highest.
const LOG_SPAN_MIN: f64 = 1e-4;

/// How an axis places its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AxisScale {
    /// Evenly, from 0 on.
    Linear,
    /// By logarithm; what lies more than four decades below the highest value, 0 among it, is drawn at the
    /// bottom.
    Log,
    /// A percentile by -log10(1 - p/100), so that 90, 99 and 99.9 stand apart evenly.
    Tail,
}

/// An axis: its label and how it places values. Its range comes from the points.
#[derive(Debug, Clone)]
pub struct Axis {
    /// What it shows, with its unit.
    pub label: String,
    /// How values are placed along it.
    pub scale: AxisScale,
}

/// One line of a plot, or points without one.
#[derive(Debug, Clone)]
pub struct Line {
    /// Its name, for the legend and the tooltip of each point.
    pub name: String,
    /// Its points in order of x; the line breaks where y is not finite.
    pub points: Vec<(f64, f64)>,
    /// Draws the points alone, without a line between them.
    pub dots: bool,
}

/// A plot of up to four lines.
#[derive(Debug, Clone)]
pub struct Plot {
    /// What it shows as a whole, for those who do not see it.
    pub title: String,
    /// The horizontal axis, from left to right.
    pub x: Axis,
    /// The vertical axis, from bottom to top.
    pub y: Axis,
    /// Drawn in colours 1, 2, 3, 4.
    pub lines: Vec<Line>,
}

/// An axis with its range.
struct Fitted {
    scale: AxisScale,
    low: f64,
    high: f64,
}

/// Escapes text for HTML and SVG.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// A number with about three digits and no zeros at its end.
pub fn short(value: f64) -> String {
    let digits = if value == 0.0 { 0 } else { (2 - value.abs().log10().floor() as i32).clamp(0, 6) };
    let text = format!("{value:.*}", digits as usize);
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

// === impl Plot ===

impl Plot {
    /// The SVG element; `None` without a point to draw.
    pub fn render(&self) -> Option<String> {
        let points = || self.lines.iter().flat_map(|line| &line.points).filter(|(_, y)| y.is_finite());
        points().next()?;
        let x = Fitted::new(self.x.scale, points().map(|point| point.0));
        let y = Fitted::new(self.y.scale, points().map(|point| point.1));
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = self.write(&x, &y, &mut out);
        Some(out)
    }

    fn write(&self, x: &Fitted, y: &Fitted, out: &mut String) -> std::fmt::Result {
        writeln!(out, r#"<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">"#)?;
        writeln!(out, "<title>{}</title>", escape(&self.title))?;
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for (value, text) in y.ticks() {
            let at = y.at(value, bottom, TOP);
            writeln!(out, r#"<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1}" y2="{at:.1}"/>"#)?;
            writeln!(
                out,
                r#"<text class="tick end" x="{:.1}" y="{:.1}">{text}</text>"#,
                LEFT - 8.0,
                at + 4.0
            )?;
        }
        for (value, text) in x.ticks() {
            let at = x.at(value, LEFT, right);
            writeln!(out, r#"<line class="grid" x1="{at:.1}" x2="{at:.1}" y1="{TOP}" y2="{bottom}"/>"#)?;
            writeln!(out, r#"<text class="tick mid" x="{at:.1}" y="{:.1}">{text}</text>"#, bottom + 16.0)?;
        }
        let middle = f64::midpoint(LEFT, right);
        writeln!(
            out,
            r#"<text class="label mid" x="{middle}" y="{}">{}</text>"#,
            HEIGHT - 6.0,
            escape(&self.x.label)
        )?;
        let height = f64::midpoint(TOP, bottom);
        writeln!(
            out,
            r#"<text class="label mid" transform="translate(14 {height}) rotate(-90)">{}</text>"#,
            escape(&self.y.label)
        )?;
        for (i, line) in self.lines.iter().enumerate() {
            line.write(i + 1, x, y, out)?;
        }
        writeln!(out, "</svg>")
    }

    /// The legend, where there is more than one line.
    pub fn legend(&self) -> String {
        if self.lines.len() < 2 {
            return String::new();
        }
        let entry = |(i, line): (usize, &Line)| {
            format!(r#"<span class="key"><i class="c{}"></i>{}</span>"#, i + 1, escape(&line.name))
        };
        format!(r#"<p class="legend">{}</p>"#, self.lines.iter().enumerate().map(entry).collect::<String>())
    }
}

// === impl Line ===

impl Line {
    fn write(&self, colour: usize, x: &Fitted, y: &Fitted, out: &mut String) -> std::fmt::Result {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        if !self.dots {
            for run in self.points.split(|(_, y)| !y.is_finite()).filter(|run| run.len() > 1) {
                write!(out, r#"<polyline class="line c{colour}" points=""#)?;
                for &(px, py) in run {
                    write!(out, "{:.1},{:.1} ", x.at(px, LEFT, right), y.at(py, bottom, TOP))?;
                }
                writeln!(out, r#""/>"#)?;
            }
        }
        // A line's dots are there to be pointed at; dots alone are there to be seen.
        let class = if self.dots { "dot" } else { "hit" };
        for &(px, py) in self.points.iter().filter(|(_, y)| y.is_finite()) {
            let (cx, cy) = (x.at(px, LEFT, right), y.at(py, bottom, TOP));
            writeln!(
                out,
                r#"<circle class="{class} c{colour}" cx="{cx:.1}" cy="{cy:.1}" r="4"><title>{}: {} at {}</title></circle>"#,
                escape(&self.name),
                short(py),
                short(px)
            )?;
        }
        Ok(())
    }
}

// === impl Fitted ===

impl Fitted {
    fn new(scale: AxisScale, values: impl Iterator<Item = f64> + Clone) -> Self {
        let low = values.clone().fold(f64::INFINITY, f64::min);
        let high = values.fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = match scale {
            AxisScale::Linear => (low.min(0.0), if high > 0.0 { high * 1.05 } else { 1.0 }),
            AxisScale::Log => {
                let high = high.max(1e-9);
                let low = low.max(high * LOG_SPAN_MIN);
                (low / 1.1, (high * 1.1).max(low * 1.5))
            }
            AxisScale::Tail => (0.0, high.clamp(90.0, 99.999)),
        };
        Self { scale, low, high }
    }

    fn project(&self, value: f64) -> f64 {
        match self.scale {
            AxisScale::Linear => value,
            AxisScale::Log => value.max(self.low).ln(),
            AxisScale::Tail => -(1.0 - value.clamp(0.0, 99.9999) / 100.0).log10(),
        }
    }

    /// Where `value` lies between `from` and `to`.
    fn at(&self, value: f64, from: f64, to: f64) -> f64 {
        let (low, high) = (self.project(self.low), self.project(self.high));
        from + (to - from) * ((self.project(value) - low) / (high - low)).clamp(0.0, 1.0)
    }

    fn ticks(&self) -> Vec<(f64, String)> {
        let values: Vec<f64> = match self.scale {
            AxisScale::Linear => even(self.low, self.high),
            AxisScale::Log => {
                let decades = (self.high / self.low).log10();
                let marks: &[f64] = if decades > 3.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
                let first = self.low.log10().floor() as i32;
                let last = self.high.log10().ceil() as i32;
                let all = (first..=last).flat_map(|e| marks.iter().map(move |mark| mark * 10f64.powi(e)));
                let marks: Vec<f64> = all.filter(|&value| value >= self.low && value <= self.high).collect();
                // Within less than a doubling there may be none.
                if marks.len() < 2 { even(self.low, self.high) } else { marks }
            }
            AxisScale::Tail => {
                let marks = [0.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9, 99.99];
                marks.into_iter().filter(|&value| value <= self.high).collect()
            }
        };
        values.into_iter().map(|value| (value, short(value))).collect()
    }
}

/// About five round numbers between `low` and `high`.
fn even(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|&step| step >= rough).unwrap_or(rough);
    let first = (low / step).ceil();
    (0..=10).map(|i| (first + f64::from(i)) * step).filter(|&value| value <= high).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn plot(scale: AxisScale, points: Vec<(f64, f64)>) -> Plot {
        let axis = |label: &str, scale| Axis { label: label.into(), scale };
        let line = Line { name: "<b>".into(), points, dots: false };
        Plot {
            title: "a & b".into(),
            x: axis("x", AxisScale::Linear),
            y: axis("y", scale),
            lines: vec![line],
        }
    }

    #[test]
    fn text_is_escaped_and_gaps_break_the_line() {
        let svg = plot(AxisScale::Log, vec![(0.0, 1.0), (1.0, 2.0), (2.0, f64::NAN), (3.0, 4.0), (4.0, 5.0)])
            .render();
        let svg = svg.unwrap();
        assert!(svg.contains("a &amp; b") && svg.contains("&lt;b&gt;: 2 at 1") && !svg.contains("<b>"));
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(plot(AxisScale::Linear, vec![(0.0, f64::NAN)]).render().is_none());
        assert_eq!(escape("\"'<>&"), "&quot;&#39;&lt;&gt;&amp;");
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in [(0.0, "0"), (1234.56, "1235"), (12.34, "12.3"), (0.5, "0.5"), (100.0, "100")] {
            assert_eq!(short(value), text);
        }
    }

    proptest! {
        #[test]
        fn everything_stays_inside(
            points in prop::collection::vec((0.0f64..1e6, 1e-3f64..1e7), 1..50), log: bool,
        ) {
            let scale = if log { AxisScale::Log } else { AxisScale::Linear };
            let svg = plot(scale, points).render().unwrap();
            let numbers = |key: &str| svg.split(key).skip(1)
                .map(|rest| rest.split('"').next().unwrap().parse::<f64>().unwrap()).collect::<Vec<_>>();
            prop_assert!(numbers("cx=\"").iter().all(|x| (LEFT..=WIDTH - RIGHT).contains(x)));
            prop_assert!(numbers("cy=\"").iter().all(|y| (TOP..=HEIGHT - BOTTOM).contains(y)));
            prop_assert!((2..=14).contains(&svg.matches("tick end").count()), "{svg}");
        }
    }
}
