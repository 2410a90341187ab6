// Images of the next message: attached by button, paste or drop, checked against what the router takes, shown small, and
// removed again. They are drawn on canvases, so the page needs no source of images in its policy.

import { el, setText, visible } from "./dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const NAMES = "PNG, JPEG, WebP, GIF or BMP";
// Pixels of a small picture's longer side.
const SIDE = 192;

export function bytes(count) {
  const mib = count / 2 ** 20;
  return mib < 1 ? `${Math.ceil(count / 1024)} KiB` : `${mib.toFixed(mib < 10 ? 1 : 0)} MiB`;
}

// Tells why a file can't be attached; empty: it can. file: {name, type, size}. terms: router.images of the feed. held:
// {count, bytes} of the images that the chat has: each request carries all of them.
export function whyNot(file, terms, held) {
  if (!terms) return "not connected: whether the model takes images is not known yet";
  if (terms.why_not) return terms.why_not;
  if (!TYPES.includes(file.type)) return `${file.name} is ${file.type || "of an unknown type"}: use ${NAMES}`;
  if (!file.size) return `${file.name} is empty`;
  if (file.size > terms.item_bytes) return `${file.name} has ${bytes(file.size)}: an image may have ${bytes(terms.item_bytes)}`;
  if (held.count >= terms.count) return `${file.name} would be image ${held.count + 1} of this chat, which may have ${terms.count}`;
  if (held.bytes + file.size > terms.request_bytes) {
    return `${file.name} has ${bytes(file.size)}: the images of a chat may have ${bytes(terms.request_bytes)} together, and ${bytes(held.bytes)} are taken`;
  }
  return "";
}

// The same for the size of what a file shows.
export function whyNotSize({ name, width, height }, terms) {
  const has = `${name} has ${width} x ${height} pixels`;
  if (width * height > terms.pixels) return `${has}: an image may have ${terms.pixels}`;
  if (terms.width && width > terms.width) return `${has}: it may be ${terms.width} wide`;
  if (terms.height && height > terms.height) return `${has}: it may be ${terms.height} high`;
  return "";
}

export class Attachments {
  terms = null;
  #images = [];
  #reading = Promise.resolve();

  // root: takes what is pasted and dropped into it. held: returns {count, bytes} of the images that were sent before.
  // leave: gives the focus back when there is nothing left to remove.
  constructor(root, { held, leave }) {
    this.held = held;
    this.leave = leave;
    this.files = el("input", { type: "file", accept: TYPES.join(), multiple: true, hidden: true, "aria-hidden": "true" });
    this.button = el("button", { type: "button", onclick: () => this.#choose() }, "Attach image");
    this.list = el("div", { class: "images" });
    this.about = el("div", { class: "dim", hidden: true });
    this.refusal = el("div", { class: "error", role: "alert" });
    this.element = el("div", { class: "attached" }, this.files, this.list, this.about, this.refusal);
    this.files.addEventListener("change", () => {
      const chosen = [...this.files.files];
      this.files.value = "";
      this.add(chosen).then(this.leave);
    });
    root.addEventListener("paste", (event) => {
      // What was copied as text, too, is pasted as text.
      const { files, types } = event.clipboardData;
      if (!files.length || types.includes("text/plain")) return;
      event.preventDefault();
      this.add([...files]);
    });
    root.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      root.classList.add("dropping");
    });
    root.addEventListener("dragleave", (event) => {
      if (!root.contains(event.relatedTarget)) root.classList.remove("dropping");
    });
    root.addEventListener("drop", (event) => {
      root.classList.remove("dropping");
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }

  // Takes what the router tells of images; null: nothing yet.
  learn(terms) {
    this.terms = terms;
    const refused = whyNot({ name: "image", type: TYPES[0], size: 1 }, terms, { count: 0, bytes: 0 });
    this.button.setAttribute("aria-disabled", String(Boolean(refused)));
    this.button.title = refused || `${NAMES}, up to ${bytes(terms.item_bytes)}; or paste it, or drop it here`;
  }

  get length() {
    return this.#images.length;
  }

  // Adds files, those that it can; the others are refused in words. Ends once they have been read.
  add(files) {
    this.#reading = this.#reading.then(() => this.#add(files));
    return this.#reading;
  }

  // Waits for files that are being read, then hands over all images: [{url, picture}].
  async take() {
    await this.#reading;
    const taken = this.#images;
    this.#images = [];
    this.list.replaceChildren();
    this.#tell([]);
    return taken;
  }

  #choose() {
    const refused = whyNot({ name: "image", type: TYPES[0], size: 1 }, this.terms, this.#taken());
    if (refused) this.#tell([refused]);
    else this.files.click();
  }

  async #add(files) {
    const refusals = [];
    for (const file of files) {
      const refused = whyNot(file, this.terms, this.#taken()) || (await this.#read(file));
      // One cause may refuse all of them.
      if (refused && !refusals.includes(refused)) refusals.push(refused);
    }
    this.#tell(refusals);
  }

  // Returns why a file was refused; empty: it is attached.
  async #read(file) {
    let bitmap, url;
    try {
      [bitmap, url] = [await createImageBitmap(file), await dataUrl(file)];
    } catch {
      return `${file.name} can't be read as an image`;
    }
    const { width, height } = bitmap;
    const refused = whyNotSize({ name: file.name, width, height }, this.terms);
    if (!refused) this.#show({ name: file.name, size: file.size, url, picture: drawn(bitmap, file.name) });
    bitmap.close();
    return refused;
  }

  #show(image) {
    const remove = el("button", { type: "button", class: "remove", "aria-label": `Remove ${visible(image.name)}`, title: "Remove" }, "×");
    const figure = el("figure", {}, image.picture, remove);
    remove.addEventListener("click", () => {
      const next = figure.nextSibling ?? figure.previousSibling;
      this.#images = this.#images.filter((each) => each !== image);
      figure.remove();
      this.#tell([]);
      if (next) next.querySelector("button").focus();
      else this.leave();
    });
    this.#images.push(image);
    this.list.append(figure);
  }

  // {count, bytes} of images that were sent, and of those that wait here.
  #taken() {
    const { count, bytes: sent } = this.held();
    return { count: count + this.#images.length, bytes: this.#images.reduce((sum, { size }) => sum + size, sent) };
  }

  #tell(refusals) {
    const { count, bytes: size } = this.#taken();
    this.about.hidden = !this.#images.length;
    if (this.#images.length) setText(this.about, `${count} of ${this.terms.count} images, ${bytes(size)} of ${bytes(this.terms.request_bytes)}`);
    setText(this.refusal, refusals.join("; "));
  }
}

function drawn(bitmap, name) {
  const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = el("canvas", { width, height, role: "img", "aria-label": visible(name), title: visible(name) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, width, height);
  return canvas;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
