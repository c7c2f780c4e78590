// What the theme leaves out for keyboards and screen readers: names for its two side bars, and focus for boxes that scroll.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelector("aside.sidebar-drawer")?.setAttribute("aria-label", "Pages");
  document.querySelector("aside.toc-drawer")?.setAttribute("aria-label", "On this page");
  for (const box of document.querySelectorAll("pre, .table-wrapper")) box.tabIndex = 0;
});
