// Makes elements. Text only ever becomes text nodes: nothing that a model or a client wrote is parsed as HTML.

// Control characters that could move, hide or reorder what stands around them.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

// Replaces them by visible names, such as \u241b for ESC and [U+202E] for a right-to-left override.
export function visible(text) {
  return text.replace(UNSEEN, (char) => {
    const code = char.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    return `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
  });
}

// Makes an element. attributes: `class`, `title` and so on; names that begin with `on` are listeners.
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(visible(String(child))))));
  return made;
}

// Replaces a text only if it differs, so that the page is not laid out again for nothing.
export function setText(element, text) {
  const shown = visible(String(text));
  if (element.textContent !== shown) element.textContent = shown;
}

// Keeps one element a key: makes new ones, updates known ones, and removes those whose key is gone.
export function keyed(parent, items, keyOf, make, update) {
  const known = (parent.keyedChildren ??= new Map());
  const seen = new Set();
  let before = null;
  for (const item of items) {
    const key = keyOf(item);
    if (seen.has(key)) continue;
    seen.add(key);
    let child = known.get(key);
    if (!child) known.set(key, (child = make(item)));
    update(child, item);
    const place = before ? before.nextSibling : parent.firstChild;
    if (place !== child) parent.insertBefore(child, place);
    before = child;
  }
  for (const [key, child] of known) {
    if (!seen.has(key)) {
      child.remove();
      known.delete(key);
    }
  }
}

export function seconds(value) {
  if (value === null || value === undefined || value < 0) return "–";
  if (value < 1) return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return value < 100 ? `${value.toFixed(2)} s` : `${Math.round(value)} s`;
}

export function share(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}%`;
}

export function number(value) {
  return Number(value).toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
}
