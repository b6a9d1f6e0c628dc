"use strict";
// Figures in the colours and the width of their page. `showFigure` draws one, or draws it again.
const NARROW_PX = 640;
const TOOLBAR_PX = 28; // above all that a figure has, so that it covers no legend or scale
const figures = new Map();
const config = { responsive: true, displaylogo: false, scrollZoom: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
const colours = () => {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return { text: of("--text"), grid: of("--grid"), edge: of("--edge"), card: of("--card") };
};
const isAxis = (key) => /^[xy]axis/.test(key);
const themed = ({ data, layout }) => {
  const c = colours();
  const margin = { ...layout.margin, t: (layout.margin?.t ?? 60) + TOOLBAR_PX };
  const result = { ...layout, margin, height: layout.height && layout.height + TOOLBAR_PX, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: c.text, family: "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif", size: 12.5 },
    hoverlabel: { bgcolor: c.card, bordercolor: c.edge, font: { color: c.text }, align: "left" } };
  for (const key of Object.keys(layout).filter(isAxis)) {
    result[key] = { ...layout[key], gridcolor: c.grid, zerolinecolor: c.grid, linecolor: c.edge };
  }
  // Lines of a black that no dark page shows take the colour of the text.
  const traces = data.map((trace) => trace.line?.color === "#222222"
    ? { ...trace, line: { ...trace.line, color: c.text } } : trace);
  return { data: traces, layout: result };
};
// On a phone all legends are one below the figure, in as many rows as entries at most, and the margins are the plot's.
const narrowed = ({ data, layout }) => {
  const named = data.filter((trace) => trace.showlegend !== false && trace.name && !trace.z);
  const names = new Set(named.map((trace) => trace.legendgroup || trace.name));
  const hasLegend = layout.showlegend ?? names.size > 1;
  const legendPx = hasLegend ? 12 + 19 * names.size : 0;
  const margin = layout.margin || {};
  const hasTexts = data.some((trace) => trace.textposition === "outside");
  const { legend2, ...kept } = layout;
  const result = { ...kept, dragmode: false, height: layout.height + legendPx,
    margin: { ...margin, t: Math.min(margin.t, 34), l: Math.min(margin.l, 50), r: hasTexts ? 95 : 12, b: margin.b + legendPx },
    legend: { orientation: "h", x: 0, xref: "container", y: 0, yref: "container", yanchor: "bottom",
      font: { size: 11 },
      traceorder: layout.legend?.traceorder || "normal" } };
  for (const key of Object.keys(layout).filter(isAxis)) {
    result[key] = { ...layout[key], automargin: true };
  }
  // What stands at the right of a subplot's title goes a line above it; long titles take two.
  result.annotations = (layout.annotations || []).map((note) => note.xanchor === "right"
    ? { ...note, text: `${note.text}<br> `, font: { ...note.font, size: 11 } }
    : { ...note, align: "left", text: note.text.length > 48 ? note.text.replace(", ", ",<br>") : note.text });
  const traces = data.map((trace) => ({ ...trace, ...(trace.legend && { legend: "legend" }),
    ...(trace.z && { showscale: false }) }));
  return { data: traces, layout: result };
};
// A legend of several rows may reach the toolbar, which only what is drawn shows: the figure gets so much taller.
const clearToolbar = (element, tries) => {
  const bar = element.querySelector(".modebar")?.getBoundingClientRect();
  if (!bar || !tries) return;
  const boxes = [...element.querySelectorAll(".legend, .colorbar, .annotation")]
    .map((part) => part.getBoundingClientRect())
    .filter((box) => box.width && box.left < bar.right && bar.left < box.right);
  const covered = bar.bottom - Math.min(...boxes.map((box) => box.top));
  if (!(covered > 0)) return;
  const { margin, height } = element.layout, more = covered + 4;
  Plotly.relayout(element, { "margin.t": margin.t + more, height: height && height + more })
    .then(() => clearToolbar(element, tries - 1));
};
const isNarrow = (element) => element.clientWidth > 0 && element.clientWidth < NARROW_PX;
const draw = (element) => {
  const one = figures.get(element);
  one.narrow = isNarrow(element);
  const { data, layout } = themed(one.narrow ? narrowed(one.figure) : one.figure);
  Plotly.react(element, data, layout, config).then(() => {
    clearToolbar(element, 4);
    addPlayer(element);
  });
};
const drawAll = () => { for (const element of figures.keys()) draw(element); };
const showFigure = (element, figure) => { figures.set(element, { figure }); draw(element); };
window.addEventListener("resize", () => {
  for (const [element, one] of figures) if (isNarrow(element) !== one.narrow) draw(element);
});
