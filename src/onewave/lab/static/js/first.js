// Runs before the first paint: a chosen colour scheme does not flash, and the address that was opened is kept even if
// somebody goes to another view before the page has loaded.
(() => {
  const { dataset } = document.documentElement;
  dataset.opened = location.hash;
  try {
    const chosen = localStorage.getItem("onewave-theme");
    if (chosen === "light" || chosen === "dark") dataset.theme = chosen;
  } catch {
    // Storage may be forbidden; then the system's scheme holds.
  }
})();
