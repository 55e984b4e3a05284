// A table that sorts by a click on its head and filters as one types. Long ones show their first rows.

import { button, h } from "./dom";
import { count, counted } from "./format";

const FEW_MORE = 4; // rows that need no click

/** As one types it: without what keeps letters that are read from the right apart. */
const typed = (text: string) => text.replace(/[\u2068\u2069]/g, "").toLowerCase();

export interface Column<Row> {
  name: string;
  value: (row: Row) => string | number | null; // null: there is none, which comes last
  show?: (row: Row) => Node | string;
  text?: boolean; // aligned as text, and first from A to Z
  least?: boolean; // the least is best, and comes first
}

export function table<Row>(caption: string, columns: Column<Row>[], rows: Row[], sortBy: number | null, atFirst = 12): HTMLElement {
  let by = sortBy;
  const startsFalling = (i: number) => !columns[i].text && !columns[i].least;
  let falling = by !== null && startsFalling(by);
  let limit = atFirst;
  let wanted = "";
  const body = h("tbody");
  const status = h("p", { class: "about", role: "status" });
  const more = button("Show more", `Show more rows of ${caption}`, () => {
    limit *= 5;
    draw();
  });
  const heads = columns.map((column, i) =>
    h("th", { scope: "col", class: column.text ? "" : "number" }, h("button", { type: "button", onclick: () => sort(i) }, column.name)),
  );
  const texts = rows.map((row) => columns.filter((c) => c.text).map((c) => typed(String(c.value(row)))).join("\n"));

  function sort(i: number): void {
    falling = i === by ? !falling : startsFalling(i);
    by = i;
    draw();
  }

  function draw(): void {
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== by ? "none" : falling ? "descending" : "ascending"));
    const keys = rows.map(by === null ? () => 0 : columns[by].value); // as they came, unless sorted
    const sign = falling ? -1 : 1;
    const order = rows.map((_, i) => i).filter((i) => texts[i].includes(wanted));
    order.sort((a, b) => Number(keys[a] === null) - Number(keys[b] === null) || sign * compared(keys[a], keys[b]) || a - b);
    const shown = order.length <= limit + FEW_MORE ? order.length : limit;
    body.replaceChildren(
      ...order.slice(0, shown).map((i) =>
        h("tr", {}, ...columns.map((column) => h("td", { class: column.text ? "" : "number" }, column.show ? column.show(rows[i]) : String(column.value(rows[i]))))),
      ),
    );
    more.hidden = order.length <= shown;
    status.textContent = order.length > shown ? `${count(shown)} of ${count(order.length)} rows` : wanted ? counted(order.length, "row") : "";
  }

  function compared(a: string | number | null, b: string | number | null): number {
    if (a === null || b === null) return 0;
    return typeof a === "number" ? a - (b as number) : a.localeCompare(String(b), "en", { numeric: true });
  }

  const filter = h("input", {
    type: "search", placeholder: "Filter", "aria-label": `Filter ${caption}`,
    oninput: (event: Event) => {
      wanted = typed((event.target as HTMLInputElement).value.trim());
      draw();
    },
  });
  draw();
  return h(
    "div", { class: "table" },
    rows.length > 4 ? filter : null,
    h("div", { class: "wide panel", tabindex: 0, role: "region", "aria-label": caption }, h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, ...heads)), body)),
    h("div", { class: "bar" }, more, status),
  );
}
