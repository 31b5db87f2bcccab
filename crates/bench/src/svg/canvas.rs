//! Shapes and texts as SVG elements.

use std::fmt::Write as _;

/// Colours by class, so that one rule changes them on dark pages. The series' colours keep a contrast of at least 3
/// to both backgrounds and differ in lightness too; curves have markers of different shapes besides.
const STYLE: &str = "\
text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif;fill:#24292f}\
.title{font-size:17px;font-weight:600}\
.name{font-size:13px;font-weight:600}\
.faint{fill:#57606a}\
.page{fill:#ffffff}\
.grid{stroke:#d8dee4;stroke-width:1}\
.axis{stroke:#8c959f;stroke-width:1}\
.limit{stroke:#57606a;stroke-width:1.5;stroke-dasharray:5 4}\
.curve{fill:none;stroke-width:2;stroke-linejoin:round}\
.f0{fill:#1f6feb}.f1{fill:#d4651a}.f2{fill:#1a8f5a}.f3{fill:#9a4fd1}\
.s0{stroke:#1f6feb}.s1{stroke:#d4651a}.s2{stroke:#1a8f5a}.s3{stroke:#9a4fd1}\
@media (prefers-color-scheme: dark){\
text{fill:#e6edf3}.faint{fill:#9198a1}.page{fill:#0d1117}\
.grid{stroke:#2b3138}.axis{stroke:#6e7681}.limit{stroke:#9198a1}\
.f0{fill:#4c93ff}.f1{fill:#f0883e}.f2{fill:#3fb97f}.f3{fill:#bb80f0}\
.s0{stroke:#4c93ff}.s1{stroke:#f0883e}.s2{stroke:#3fb97f}.s3{stroke:#bb80f0}}";

/// How many series colours there are; further series begin anew.
pub(super) const COLOURS: usize = 4;

/// Average width of a character of the labels' font, px. Only for leaving room: no text is cut to it.
pub(super) const CHARACTER_WIDTH: f64 = 6.6;

/// Which end of a text is at its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Align {
    Start,
    Middle,
    End,
}

/// Collects elements.
#[derive(Debug, Default)]
pub(super) struct Canvas {
    body: String,
}

impl Canvas {
    pub(super) fn new() -> Self {
        Self::default()
    }

    pub(super) fn line(&mut self, from: (f64, f64), to: (f64, f64), class: &str) {
        let (x1, y1, x2, y2) = (round(from.0), round(from.1), round(to.0), round(to.1));
        let _ = writeln!(self.body, r#"<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="{class}"/>"#);
    }

    pub(super) fn rectangle(&mut self, left: f64, top: f64, width: f64, height: f64, class: &str) {
        let (x, y, width, height) = (round(left), round(top), round(width.max(0.0)), round(height));
        let _ = writeln!(
            self.body,
            r#"<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="2" class="{class}"/>"#
        );
    }

    /// A text whose baseline is at `y`.
    pub(super) fn text(&mut self, x: f64, y: f64, align: Align, class: &str, text: &str) {
        let anchor = match align {
            Align::Start => "start",
            Align::Middle => "middle",
            Align::End => "end",
        };
        let (x, y) = (round(x), round(y));
        let _ = writeln!(
            self.body,
            r#"<text x="{x}" y="{y}" text-anchor="{anchor}" class="{class}">{}</text>"#,
            escape(text)
        );
    }

    /// A curve through points, in the colour of a series.
    pub(super) fn curve(&mut self, points: &[(f64, f64)], series: usize) {
        let points: Vec<String> = points.iter().map(|&(x, y)| format!("{},{}", round(x), round(y))).collect();
        let colour = series % COLOURS;
        let _ = writeln!(self.body, r#"<polyline points="{}" class="curve s{colour}"/>"#, points.join(" "));
    }

    /// A marker of a series: circle, square, diamond or triangle.
    pub(super) fn marker(&mut self, x: f64, y: f64, series: usize) {
        let colour = series % COLOURS;
        let corners: &[(f64, f64)] = match colour {
            1 => &[(-3.6, -3.6), (3.6, -3.6), (3.6, 3.6), (-3.6, 3.6)],
            2 => &[(0.0, -5.0), (5.0, 0.0), (0.0, 5.0), (-5.0, 0.0)],
            3 => &[(0.0, -4.8), (4.8, 3.8), (-4.8, 3.8)],
            _ => {
                let (x, y) = (round(x), round(y));
                let _ = writeln!(self.body, r#"<circle cx="{x}" cy="{y}" r="4" class="f{colour}"/>"#);
                return;
            }
        };
        let points: Vec<String> =
            corners.iter().map(|(dx, dy)| format!("{},{}", round(x + dx), round(y + dy))).collect();
        let _ = writeln!(self.body, r#"<polygon points="{}" class="f{colour}"/>"#, points.join(" "));
    }

    /// The whole document.
    pub(super) fn finish(self, width: f64, height: f64, title: &str) -> String {
        let (width, height) = (round(width), round(height));
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" role=\"img\">\n<title>{}</title>\n<style>{STYLE}</style>\n\
             <rect width=\"{width}\" height=\"{height}\" class=\"page\"/>\n{}</svg>\n",
            escape(title),
            self.body
        )
    }
}

/// Hundredths of a pixel are enough, and make the same file on every machine.
fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
