// Elements from data. Text only ever becomes text: nothing here reads markup.

type Child = Node | string | number | null | undefined | false;
type Props = Record<string, unknown>;

export function h<K extends keyof HTMLElementTagNameMap>(tag: K, props: Props = {}, ...children: Child[]): HTMLElementTagNameMap[K] {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag: string, props: Props = {}, ...children: Child[]): SVGElement {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
}

function fill<E extends Element>(element: E, props: Props, children: Child[]): E {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value as EventListener);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

export function section(id: string, title: string, about: string | null, ...children: Child[]): HTMLElement {
  return h("section", { id, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, title), about && h("p", { class: "about" }, about), ...children);
}

export function button(text: string, label: string, onclick: () => void, props: Props = {}): HTMLButtonElement {
  return h("button", { type: "button", "aria-label": label, title: label, onclick, ...props }, text);
}

/** Text that may break after the dots of names, but not within numbers. */
export function broken(text: string): Child[] {
  return text.split(/(?<=[^\d\s]\.)(?=\S)|(?<=\d\.)(?=[^\d\s])/).flatMap((part, i) => (i ? [h("wbr"), part] : [part]));
}

/** The end of a name tells most: what is too long for its place loses its beginning. */
export function tail(name: string, props: Props = {}): HTMLElement {
  return h("span", { ...props, class: `tail ${props.class ?? ""}` }, h("bdi", {}, name));
}

/** A name that leads somewhere. */
export function link(name: string | Node, label: string, onclick: () => void): HTMLElement {
  return h("button", { type: "button", "aria-label": label, title: label, onclick, class: "link" }, ...(typeof name === "string" ? broken(name) : [name]));
}

/** A swatch and what it stands for, which stay together. */
export function key(text: string, props: Props): HTMLElement {
  return h("span", { class: "entry" }, h("span", { ...props, class: `key ${props.class ?? ""}` }), text);
}
