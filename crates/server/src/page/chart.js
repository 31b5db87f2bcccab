// Lines and bars as SVG nodes.
const SPACE = "http://www.w3.org/2000/svg";
const HEIGHT = 144;
/// Room for the numbers beside and below the line.
const [LEFT, BOTTOM, TOP] = [44, 18, 8];

function shape(tag, attributes, text) {
  const node = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

/// The next number of 1, 2 and 5 with zeros that is not below `value`.
export function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].find((factor) => factor * power >= value) * power;
}

/** Draws points {age, value} of the last `span` seconds. */
export function drawLine(svg, points, span) {
  const width = svg.clientWidth || 480;
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const top = roundUp(Math.max(10, ...points.map((point) => point.value)));
  const x = (age) => LEFT + (width - LEFT) * (1 - Math.min(age, span) / span);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
  const nodes = [];
  for (const part of [0, 0.5, 1]) {
    nodes.push(shape("line", { class: "grid", x1: LEFT, x2: width, y1: y(top * part), y2: y(top * part) }));
    nodes.push(shape("text", { x: LEFT - 6, y: y(top * part) + 4, "text-anchor": "end" }, short(top * part)));
  }
  for (let age = span; age >= 0; age -= 60) {
    const anchor = age === 0 ? "end" : age === span ? "start" : "middle";
    nodes.push(shape("text", { x: x(age), y: HEIGHT - 3, "text-anchor": anchor }, age === 0 ? "now" : "−" + age / 60 + " min"));
  }
  if (points.length) {
    const path = points.map(({ age, value }) => x(age).toFixed(1) + "," + y(value).toFixed(1));
    const [first, last] = [points[0], points.at(-1)];
    nodes.push(shape("polygon", { class: "under", points: [x(first.age) + "," + y(0), ...path, x(last.age) + "," + y(0)].join(" ") }));
    nodes.push(shape("polyline", { class: "line", points: path.join(" ") }));
  }
  svg.replaceChildren(...nodes);
}
const short = (value) => (value >= 1_000_000 ? value / 1_000_000 + " M" : value >= 1000 ? value / 1000 + " k" : String(value));

/** A bar of parts {share, name}; shares are of the whole, 0 to 1. */
export function bar(parts) {
  const svg = shape("svg", { viewBox: "0 0 100 1", preserveAspectRatio: "none", role: "img", "aria-label": parts.map((part) => part.name).join(", ") });
  let from = 0;
  parts.forEach(({ share, name }, index) => {
    const part = shape("rect", { class: "part-" + (index % 5), x: from, y: 0, width: 100 * share, height: 1 });
    part.append(shape("title", {}, name));
    svg.append(part);
    from += 100 * share;
  });
  const box = document.createElement("div");
  box.className = "bar";
  box.append(svg);
  return box;
}
