// What the address says: #view?query. Views write their state there, so that any address can be shared.

export function read(views, hash = location.hash) {
  const [view, query = ""] = hash.slice(1).split(/\?(.*)/s);
  return views.includes(view) ? { view, query } : { view: views[0], query: "" };
}

// Replaces the address without leaving a step in the browser's history; `view` must be the one shown.
export function remember(view, query) {
  const text = `#${view}${query ? `?${query}` : ""}`;
  if (location.hash !== text && document.getElementById(`view-${view}`).hidden === false) {
    history.replaceState(null, "", text);
  }
}

export async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href);
    return "Link copied.";
  } catch {
    return "The address bar holds the link.";
  }
}
