"use strict";
const setTheme = (name) => { document.documentElement.dataset.theme = name; drawAll(); };
document.addEventListener("DOMContentLoaded", () => {
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  setTheme(prefersDark.matches ? "dark" : "light");
  for (const element of document.querySelectorAll("script[type='application/json']")) {
    showFigure(document.getElementById(element.dataset.figure), JSON.parse(element.textContent));
  }
  document.getElementById("theme").addEventListener("click", () =>
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
});
