//! Charts as SVG text: readable on light and dark pages, without scripts, fonts or references to anything outside.
//!
//! A [`Figure`] has a heading and panels; a panel is a [`LineChart`] (two side by side) or a [`BarChart`] (the whole
//! width).

mod bars;
mod canvas;
mod lines;
mod scale;

pub use bars::{Bar, BarChart};
pub use lines::{LineChart, Series};

use canvas::{Align, Canvas};

/// Width of a figure, px.
const WIDTH: f64 = 880.0;
/// Around the panels, px.
const MARGIN: f64 = 24.0;
/// Between panels, px.
const GUTTER: f64 = 28.0;
/// From the top to the panels below title and subtitle, px.
const HEADING_HEIGHT: f64 = 72.0;
/// About this many characters of a subtitle fit the width.
const SUBTITLE_CHARACTERS: usize = 130;

/// Panels under one heading.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// What it shows.
    pub title: String,
    /// Under which conditions.
    pub subtitle: String,
    /// From left to right, then downwards.
    pub panels: Vec<Panel>,
}

/// One chart.
#[derive(Debug, Clone, PartialEq)]
pub enum Panel {
    /// Curves over a quantity; half the width.
    Lines(LineChart),
    /// Horizontal bars, one a line; the whole width.
    Bars(BarChart),
}

/// A place on the canvas, px.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Area {
    left: f64,
    top: f64,
    width: f64,
    height: f64,
}

impl Figure {
    /// The SVG text.
    pub fn to_svg(&self) -> String {
        let mut canvas = Canvas::new();
        canvas.text(MARGIN, MARGIN + 14.0, Align::Start, "title", &self.title);
        let subtitle: String = self.subtitle.chars().take(SUBTITLE_CHARACTERS).collect();
        canvas.text(MARGIN, MARGIN + 34.0, Align::Start, "faint", &subtitle);
        let mut top = HEADING_HEIGHT;
        let mut waiting: Option<&LineChart> = None;
        for panel in &self.panels {
            match (panel, waiting.take()) {
                (Panel::Lines(chart), None) => waiting = Some(chart),
                (Panel::Lines(right), Some(left)) => {
                    top = draw_lines(&mut canvas, &[left, right], top);
                }
                (Panel::Bars(chart), left) => {
                    if let Some(left) = left {
                        top = draw_lines(&mut canvas, &[left], top);
                    }
                    let area =
                        Area { left: MARGIN, top, width: WIDTH - 2.0 * MARGIN, height: chart.height() };
                    chart.draw(&mut canvas, area);
                    top += area.height + GUTTER;
                }
            }
        }
        if let Some(left) = waiting {
            top = draw_lines(&mut canvas, &[left], top);
        }
        canvas.finish(WIDTH, top - GUTTER + MARGIN, &self.title)
    }
}

/// One or two charts in a line; the next line's top.
fn draw_lines(canvas: &mut Canvas, charts: &[&LineChart], top: f64) -> f64 {
    let width = (WIDTH - 2.0 * MARGIN - GUTTER) / 2.0;
    for (at, chart) in charts.iter().enumerate() {
        let left = MARGIN + at as f64 * (width + GUTTER);
        chart.draw(canvas, Area { left, top, width, height: LineChart::HEIGHT });
    }
    top + LineChart::HEIGHT + GUTTER
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lines(points: Vec<(f64, f64)>) -> Panel {
        let series = vec![
            Series { name: "a < b & \"c\"".into(), points },
            Series { name: "second".into(), points: vec![(1.0, 2.0), (8.0, 3.0)] },
        ];
        let (title, x_label, y_label) = ("T".to_owned(), "x".to_owned(), "y".to_owned());
        Panel::Lines(LineChart { title, x_label, y_label, series })
    }

    fn bars(values: &[f64]) -> Panel {
        let bar = |&value: &f64| Bar { label: "op".into(), value, text: "1 %".into(), group: 0 };
        let bars = values.iter().map(bar).collect();
        Panel::Bars(BarChart {
            title: "B".into(),
            x_label: "fraction".into(),
            groups: vec!["one".into()],
            limit: Some(1.0),
            bars,
        })
    }

    /// Every tag is closed in order, every coordinate is a number within the picture.
    fn check(svg: &str) -> Result<(), String> {
        let mut open: Vec<&str> = Vec::new();
        for tag in svg.split('<').skip(1) {
            let (tag, _) = tag.split_once('>').ok_or("a tag does not end")?;
            let name = tag.split_whitespace().next().unwrap_or_default();
            if let Some(name) = name.strip_prefix('/') {
                if open.pop() != Some(name) {
                    return Err(format!("</{name}> closes nothing"));
                }
            } else if !tag.ends_with('/') {
                open.push(name);
            }
            for attribute in ["x=\"", "y=\"", "x1=\"", "y2=\"", "width=\"", "height=\""] {
                for value in tag.split(&format!(" {attribute}")).skip(1) {
                    let value: f64 = value
                        .split('"')
                        .next()
                        .unwrap_or_default()
                        .parse()
                        .map_err(|_| format!("{attribute}: {tag}"))?;
                    if !(-0.01..=20_000.0).contains(&value) {
                        return Err(format!("{value} in {tag}"));
                    }
                }
            }
        }
        if open.is_empty() { Ok(()) } else { Err(format!("open: {open:?}")) }
    }

    #[test]
    fn a_figure_is_well_formed_and_escapes_its_texts() {
        let panels =
            vec![lines(vec![(1.0, 10.0), (64.0, 900.0)]), bars(&[0.5, 1.2]), lines(vec![]), lines(vec![])];
        let svg = Figure { title: "<script>".into(), subtitle: "a & b".into(), panels }.to_svg();
        check(&svg).unwrap();
        assert!(svg.contains("&lt;script&gt;") && !svg.contains("<script>"));
        assert!(svg.contains("a &lt; b &amp; &quot;c&quot;") || svg.contains("a &lt; b &amp; \"c\""));
        assert!(svg.contains("prefers-color-scheme: dark"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn a_figure_may_be_empty() {
        check(&Figure { title: String::new(), subtitle: String::new(), panels: vec![] }.to_svg()).unwrap();
    }

    proptest! {
        #[test]
        fn any_numbers_make_a_picture(
            points in prop::collection::vec((0.0..1e6f64, 0.0..1e9f64), 0..12),
            values in prop::collection::vec(0.0..3.0f64, 0..12),
        ) {
            let panels = vec![lines(points), bars(&values)];
            let svg = Figure { title: "t".into(), subtitle: "s".into(), panels }.to_svg();
            prop_assert!(!svg.contains("NaN") && !svg.contains("inf"));
            check(&svg).map_err(TestCaseError::fail)?;
        }
    }
}
