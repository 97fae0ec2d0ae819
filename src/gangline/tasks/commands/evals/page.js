const body = document.querySelector("#tasks tbody"), rows = [...body.rows];
const words = document.querySelector("#words"), open = document.querySelector("#open");
function show() {
  const wanted = words.value.toLowerCase().split(/\s+/);
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !wanted.every((word) => text.includes(word)) || (open.checked && row.dataset.passed === "1");
  }
  document.querySelector("#shown").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} tasks`;
}
words.oninput = open.onchange = show;
const value = (row, at) => row.cells[at].dataset.value ?? row.cells[at].textContent;
const order = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
document.querySelectorAll("#tasks th").forEach((head, at) => {
  head.firstChild.onclick = () => {
    const way = head.ariaSort === "ascending" ? -1 : 1;
    document.querySelectorAll("#tasks th").forEach((one) => one.removeAttribute("aria-sort"));
    head.ariaSort = way > 0 ? "ascending" : "descending";
    rows.sort((a, b) => way * order(value(a, at), value(b, at)));
    body.append(...rows);
  };
});
show();
