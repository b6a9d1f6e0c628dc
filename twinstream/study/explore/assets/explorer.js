"use strict";
// An element's figure is its attribute `data-figure`, which Dash sets and changes.
const showFigures = () => {
  for (const element of document.querySelectorAll("[data-figure]")) {
    if (element.shown !== element.dataset.figure) {
      element.shown = element.dataset.figure;
      showFigure(element, JSON.parse(element.shown));
    }
  }
  for (const element of figures.keys()) {
    if (!element.isConnected) {
      figures.delete(element);
      Plotly.purge(element);
    }
  }
};
document.addEventListener("DOMContentLoaded", () => {
  new MutationObserver(showFigures).observe(document.body,
    { subtree: true, childList: true, attributeFilter: ["data-figure"] });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  showFigures();
});
