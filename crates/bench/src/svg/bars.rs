//! Horizontal bars: one figure for each of many names.

use super::Area;
use super::canvas::{Align, CHARACTER_WIDTH, COLOURS, Canvas};
use super::scale::{tick_text, ticks};

/// Above the bars, px: title and legend.
const ABOVE: f64 = 44.0;
/// Below them, px: ticks and the quantity's name.
const BELOW: f64 = 40.0;
/// A bar and the distance to the next one, px.
const BAR_HEIGHT: f64 = 14.0;
const BAR_GAP: f64 = 7.0;
/// The distance within a cluster: to a bar without a label, which belongs to the one above it.
const CLUSTER_GAP: f64 = 2.0;

/// A chart of horizontal bars from 0.
#[derive(Debug, Clone, PartialEq)]
pub struct BarChart {
    /// What is shown.
    pub title: String,
    /// The quantity with its unit.
    pub x_label: String,
    /// Names of the groups, each with a colour; a legend appears for more than one.
    pub groups: Vec<String>,
    /// A dashed line at this value: what could be reached at most.
    pub limit: Option<f64>,
    /// From top to bottom.
    pub bars: Vec<Bar>,
}

/// One bar.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// On its left; empty for one more bar of the label above.
    pub label: String,
    /// Its length, at least 0.
    pub value: f64,
    /// On its right: the value with its unit.
    pub text: String,
    /// Index into the chart's groups.
    pub group: usize,
}

impl BarChart {
    pub(super) fn height(&self) -> f64 {
        let last = self.tops().last().map_or(0.0, |top| top + BAR_HEIGHT);
        ABOVE + last + BAR_GAP + BELOW
    }

    /// The upper edge of each bar below the first one's upper gap, px.
    fn tops(&self) -> Vec<f64> {
        let mut next = 0.0;
        let mut tops = Vec::with_capacity(self.bars.len());
        for bar in &self.bars {
            let gap = if bar.label.is_empty() { CLUSTER_GAP } else { BAR_GAP };
            tops.push(next + gap);
            next += gap + BAR_HEIGHT;
        }
        tops
    }

    pub(super) fn draw(&self, canvas: &mut Canvas, area: Area) {
        canvas.text(area.left, area.top + 12.0, Align::Start, "name", &self.title);
        self.draw_legend(canvas, area);
        let room = |text: fn(&Bar) -> &str| {
            let longest = self.bars.iter().map(|bar| text(bar).chars().count()).max().unwrap_or(0);
            longest as f64 * CHARACTER_WIDTH + 10.0
        };
        let (label_room, text_room) = (room(|bar| &bar.label), room(|bar| &bar.text));
        let left = area.left + label_room;
        let width = (area.width - label_room - text_room).max(60.0);
        let (top, bottom) = (area.top + ABOVE, area.top + area.height - BELOW);

        let longest =
            self.bars.iter().map(|bar| bar.value).filter(|value| value.is_finite()).fold(0.0, f64::max);
        let ticks = ticks(longest.max(self.limit.unwrap_or(0.0)), 5);
        let end = ticks.last().copied().unwrap_or(1.0);
        let place = |value: f64| left + value / end * width;
        for &tick in &ticks {
            let x = place(tick);
            canvas.line((x, top), (x, bottom), if tick == 0.0 { "axis" } else { "grid" });
            canvas.text(x, bottom + 15.0, Align::Middle, "faint", &tick_text(tick));
        }
        canvas.text(left + width / 2.0, bottom + 33.0, Align::Middle, "faint", &self.x_label);
        for (bar, bar_top) in self.bars.iter().zip(self.tops()) {
            let middle = top + bar_top + BAR_HEIGHT / 2.0;
            let value = if bar.value.is_finite() { bar.value.max(0.0) } else { 0.0 };
            let class = format!("f{}", bar.group % COLOURS);
            canvas.text(left - 8.0, middle + 4.0, Align::End, "label", &bar.label);
            canvas.rectangle(left, middle - BAR_HEIGHT / 2.0, place(value) - left, BAR_HEIGHT, &class);
            canvas.text(place(value) + 7.0, middle + 4.0, Align::Start, "label", &bar.text);
        }
        if let Some(limit) = self.limit {
            canvas.line((place(limit), top - 4.0), (place(limit), bottom), "limit");
        }
    }

    fn draw_legend(&self, canvas: &mut Canvas, area: Area) {
        if self.groups.len() < 2 {
            return;
        }
        let mut x = area.left;
        for (at, name) in self.groups.iter().enumerate() {
            canvas.rectangle(x, area.top + 23.0, 10.0, 10.0, &format!("f{}", at % COLOURS));
            canvas.text(x + 15.0, area.top + 32.0, Align::Start, "label", name);
            x += 15.0 + name.chars().count() as f64 * CHARACTER_WIDTH + 22.0;
        }
    }
}
