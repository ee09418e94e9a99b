"use strict";
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const recall = () => { try { return localStorage.getItem("dcpp-theme"); } catch { return null; } };
  const keep = (theme) => { try { localStorage.setItem("dcpp-theme", theme); } catch { /* a page opened from disk may not be allowed to */ } };
  const set = (theme) => { if (theme === "dark" || theme === "light") root.dataset.theme = theme; };
  const other = () => (root.dataset.theme || (dark.matches ? "dark" : "light")) === "dark" ? "light" : "dark";
  set(recall());

  const themes = (button) => {
    const show = () => { button.textContent = other() === "dark" ? "Dark" : "Light"; button.setAttribute("aria-label", `Show in ${other()} colours`); };
    button.addEventListener("click", () => { set(other()); keep(root.dataset.theme); show(); });
    dark.addEventListener("change", show);
    show();
    button.hidden = false;
  };

  // Numbers are sorted by value, text alphabetically; missing values come last in both directions.
  const key = (cell) => {
    if (cell.dataset.value !== undefined) return [0, Number(cell.dataset.value)];
    const text = cell.textContent.trim();
    return text === "" || text === "–" ? [2, ""] : [1, text];
  };
  const compare = (a, b, sign) => {
    const [kind, one] = key(a), [otherKind, two] = key(b);
    if (kind !== otherKind) return kind - otherKind;
    return sign * (kind === 0 ? one - two : String(one).localeCompare(String(two), "en", { numeric: true }));
  };
  const sortable = (table) => {
    const heads = [...table.tHead.rows[0].cells];
    const groups = [...table.tBodies].map((body) => [body, [...body.rows].filter((row) => !row.classList.contains("group"))]);
    heads.forEach((head, place) => {
      const button = document.createElement("button");
      button.type = "button";
      button.title = "Sort";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const next = { ascending: "descending", descending: "" }[head.getAttribute("aria-sort")] ?? "ascending";
        heads.forEach((one) => one.removeAttribute("aria-sort"));
        if (next) head.setAttribute("aria-sort", next);
        const sign = next === "descending" ? -1 : 1;
        for (const [body, rows] of groups) {
          body.append(...(next ? [...rows].sort((a, b) => compare(a.cells[place], b.cells[place], sign)) : rows));
        }
      });
    });
  };

  const reveal = () => {
    const target = document.getElementById(location.hash.slice(1));
    const details = target && target.closest("details");
    if (details) { details.open = true; target.scrollIntoView(); }
  };

  document.addEventListener("DOMContentLoaded", () => {
    themes(document.getElementById("theme"));
    document.querySelectorAll("table").forEach(sortable);
    addEventListener("hashchange", reveal);
    document.addEventListener("click", (event) => { if (event.target.closest('a[href^="#protocol-"]')) setTimeout(reveal); });
    reveal();
  });
})();
