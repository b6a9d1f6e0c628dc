"use strict";
const colours = () => {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return { text: of("--text"), paper: of("--paper"), grid: of("--grid"), edge: of("--edge"), card: of("--card") };
};
const themed = (layout) => {
  const c = colours();
  const result = { ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: c.text, family: "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif", size: 12.5 },
    hoverlabel: { bgcolor: c.card, bordercolor: c.edge, font: { color: c.text }, align: "left" } };
  for (const key of Object.keys(layout)) {
    if (/^[xy]axis/.test(key)) {
      result[key] = { ...layout[key], gridcolor: c.grid, zerolinecolor: c.grid, linecolor: c.edge };
    }
  }
  return result;
};
const figures = new Map();
const config = { responsive: true, displaylogo: false, scrollZoom: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
const draw = () => {
  for (const [id, figure] of figures) {
    // Lines of a black that no dark page shows take the colour of the text.
    for (const trace of figure.data) {
      if (trace.line && (trace.line.color === "#222222" || trace.line.themed)) {
        trace.line = { ...trace.line, color: colours().text, themed: true };
      }
    }
    Plotly.react(id, figure.data, themed(figure.layout), config);
  }
};
const setTheme = (name) => { document.documentElement.dataset.theme = name; draw(); };
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll("script[type='application/json']")) {
    figures.set(element.dataset.figure, JSON.parse(element.textContent));
  }
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  setTheme(prefersDark.matches ? "dark" : "light");
  document.getElementById("theme").addEventListener("click", () =>
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
});
