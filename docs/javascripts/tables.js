// Mark the tables that are wider than the page; tables.css says below which mark that they scroll.
function markTables() {
  for (const wrap of document.querySelectorAll(".md-typeset__scrollwrap")) {
    wrap.classList.toggle("scrolls", wrap.scrollWidth > wrap.clientWidth + 1);
  }
}
window.addEventListener("load", () => setTimeout(markTables));
window.addEventListener("resize", markTables);
