// What the pages drawn by a script share: their data and elements, a light and a dark theme.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// The system's theme, or the other by the button; ``shown`` runs after every change.
function followTheme(shown = () => {}) {
  const night = matchMedia("(prefers-color-scheme: dark)");
  const set = (dark) => {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    find("theme").textContent = dark ? "Light theme" : "Dark theme";
    shown();
  };
  night.addEventListener("change", () => set(night.matches));
  find("theme").addEventListener("click", () => set(document.documentElement.dataset.theme === "light"));
  set(night.matches);
}
