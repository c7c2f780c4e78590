// What the theme leaves out for keyboards and screen readers: names for its two side bars, focus for boxes that scroll, the
// heading of the search, levels of the captions of lists, no second name for what unfolds, and no empty headers of tables.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelector("aside.sidebar-drawer")?.setAttribute("aria-label", "Pages");
  document.querySelector("aside.toc-drawer")?.setAttribute("aria-label", "On this page");
  for (const box of document.querySelectorAll("pre, .table-wrapper")) box.tabIndex = 0;
  for (const caption of document.querySelectorAll("p.caption[role=heading]")) caption.setAttribute("aria-level", "2");
  for (const summary of document.querySelectorAll("summary[aria-label]")) summary.removeAttribute("aria-label");
  for (const corner of document.querySelectorAll("th:empty, th:has(> p:only-child:empty)"))
    corner.replaceWith(document.createElement("td"));
  if (!document.querySelector("h1")) {
    const heading = document.createElement("h1");
    heading.textContent = document.title.split(" - ")[0];
    heading.className = "visually-hidden"; // the page of a search has a visible heading of a lower level
    document.querySelector("article")?.prepend(heading);
  }
});
