//! Curves over a quantity that doubles: concurrency, prompt length.

use super::Area;
use super::canvas::{Align, CHARACTER_WIDTH, Canvas};
use super::scale::{tick_text, ticks};

/// Room around the plot itself, px.
const LEFT: f64 = 46.0;
const RIGHT: f64 = 14.0;
const ABOVE: f64 = 68.0;
const BELOW: f64 = 44.0;

/// A chart of curves. The horizontal axis is logarithmic and has a tick at every measured value; the vertical axis
/// begins at 0.
#[derive(Debug, Clone, PartialEq)]
pub struct LineChart {
    /// What is shown.
    pub title: String,
    /// The horizontal quantity.
    pub x_label: String,
    /// The vertical quantity with its unit.
    pub y_label: String,
    /// The curves.
    pub series: Vec<Series>,
}

/// One curve. Points without a finite value are left out, and those with no positive place too.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Place and value.
    pub points: Vec<(f64, f64)>,
}

impl LineChart {
    pub(super) const HEIGHT: f64 = 310.0;

    pub(super) fn draw(&self, canvas: &mut Canvas, area: Area) {
        let plot = Area {
            left: area.left + LEFT,
            top: area.top + ABOVE,
            width: area.width - LEFT - RIGHT,
            height: area.height - ABOVE - BELOW,
        };
        canvas.text(area.left, area.top + 12.0, Align::Start, "name", &self.title);
        self.draw_legend(canvas, area);
        let y_ticks = ticks(self.points().map(|(_, y)| y).fold(0.0, f64::max), 5);
        let top = y_ticks.last().copied().unwrap_or(1.0);
        let bottom = plot.top + plot.height;
        let y_place = |value: f64| bottom - value / top * plot.height;
        for &tick in &y_ticks {
            let y = y_place(tick);
            let class = if tick == 0.0 { "axis" } else { "grid" };
            canvas.line((plot.left, y), (plot.left + plot.width, y), class);
            canvas.text(plot.left - 7.0, y + 4.0, Align::End, "faint", &tick_text(tick));
        }
        canvas.text(area.left, area.top + 54.0, Align::Start, "faint", &self.y_label);
        let middle = plot.left + plot.width / 2.0;
        canvas.text(middle, area.top + area.height - 6.0, Align::Middle, "faint", &self.x_label);

        let places = self.places();
        let x_place = x_scale(&places, plot);
        let mut free_from = f64::NEG_INFINITY;
        for &place in &places {
            let x = x_place(place);
            canvas.line((x, bottom), (x, bottom + 4.0), "axis");
            let text = tick_text(place);
            let half = text.len() as f64 * CHARACTER_WIDTH / 2.0;
            // Values close together share a label: the first one keeps it.
            if x - half >= free_from {
                canvas.text(x, bottom + 18.0, Align::Middle, "faint", &text);
                free_from = x + half + CHARACTER_WIDTH;
            }
        }
        for (at, series) in self.series.iter().enumerate() {
            let points: Vec<(f64, f64)> = series.drawable().map(|(x, y)| (x_place(x), y_place(y))).collect();
            if points.len() > 1 {
                canvas.curve(&points, at);
            }
            for (x, y) in points {
                canvas.marker(x, y, at);
            }
        }
    }

    fn draw_legend(&self, canvas: &mut Canvas, area: Area) {
        let mut x = area.left + 5.0;
        for (at, series) in self.series.iter().enumerate() {
            canvas.marker(x, area.top + 28.0, at);
            canvas.text(x + 10.0, area.top + 32.0, Align::Start, "label", &series.name);
            x += 10.0 + series.name.chars().count() as f64 * CHARACTER_WIDTH + 22.0;
        }
    }

    fn points(&self) -> impl Iterator<Item = (f64, f64)> {
        self.series.iter().flat_map(Series::drawable)
    }

    /// Every place on the horizontal axis, in order.
    fn places(&self) -> Vec<f64> {
        let mut places: Vec<f64> = self.points().map(|(x, _)| x).collect();
        places.sort_by(f64::total_cmp);
        places.dedup();
        places
    }
}

impl Series {
    fn drawable(&self) -> impl Iterator<Item = (f64, f64)> {
        self.points.iter().copied().filter(|&(x, y)| x.is_finite() && x > 0.0 && y.is_finite() && y >= 0.0)
    }
}

/// Logarithmic, with some room at both ends; a single place is in the middle.
fn x_scale(places: &[f64], plot: Area) -> impl Fn(f64) -> f64 {
    const ROOM: f64 = 18.0;
    let low = places.first().copied().unwrap_or(1.0).ln();
    let span = places.last().copied().unwrap_or(1.0).ln() - low;
    move |value: f64| {
        let fraction = if span > 0.0 { (value.ln() - low) / span } else { 0.5 };
        plot.left + ROOM + fraction * (plot.width - 2.0 * ROOM)
    }
}
