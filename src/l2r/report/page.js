// A page of tables and figures: a light and a dark theme, figures that fit when a part is opened.
"use strict";

{
  const night = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const set = (dark) => {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    button.textContent = dark ? "Light theme" : "Dark theme";
  };
  night.addEventListener("change", () => set(night.matches));
  button.addEventListener("click", () => set(document.documentElement.dataset.theme === "light"));
  set(night.matches);

  // A figure that was drawn in a closed part has no width yet.
  for (const part of document.querySelectorAll("details")) {
    part.addEventListener("toggle", () => {
      for (const figure of part.querySelectorAll(".js-plotly-plot")) window.Plotly.Plots.resize(figure);
    });
  }
  const open = () => {
    const target = document.getElementById(location.hash.slice(1));
    const part = target && target.closest("details");
    if (part) part.open = true;
  };
  addEventListener("hashchange", open);
  open();
}
