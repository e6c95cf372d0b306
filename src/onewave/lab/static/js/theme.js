// Runs before the first paint, so that a chosen colour scheme does not flash.
(() => {
  try {
    const chosen = localStorage.getItem("onewave-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Storage may be forbidden; then the system's scheme holds.
  }
})();
