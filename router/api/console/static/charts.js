// Draws on canvases, in the colours of the page.

function begin(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

// A custom property is what was written, light-dark() included; a colour that it sets is resolved.
const probe = document.createElement("i");
probe.hidden = true;
document.body.append(probe);
const colour = (name) => {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
};

// Draws values as an area, the latest at the right. room: how many fit.
export function area(canvas, values, room) {
  const { context, width, height } = begin(canvas);
  if (!width || values.length < 2) return;
  const most = Math.max(...values, 1e-9);
  const x = (i) => width - ((values.length - 1 - i) * width) / (room - 1);
  const y = (value) => height - 2 - (value / most) * (height - 4);
  context.beginPath();
  values.forEach((value, i) => context.lineTo(x(i), y(value)));
  context.strokeStyle = colour("accent");
  context.lineWidth = 1.5;
  context.stroke();
  context.lineTo(x(values.length - 1), height);
  context.lineTo(x(0), height);
  context.globalAlpha = 0.15;
  context.fillStyle = colour("accent");
  context.fill();
  context.globalAlpha = 1;
}

// Draws the map of KV blocks. used, cached: a byte for each cell, 255: all of its blocks.
export function blocks(canvas, used, cached) {
  const { context, width, height } = begin(canvas);
  const count = used.length;
  if (!width || !count) return;
  const columns = Math.max(1, Math.ceil(Math.sqrt((count * width) / height)));
  const rows = Math.ceil(count / columns);
  const [w, h] = [width / columns, height / rows];
  const [free, held, kept] = [colour("free"), colour("used"), colour("cached")];
  for (let i = 0; i < count; i += 1) {
    const [x, y] = [(i % columns) * w, Math.floor(i / columns) * h];
    const size = [Math.max(w - 1, 0.5), Math.max(h - 1, 0.5)];
    context.fillStyle = free;
    context.fillRect(x, y, ...size);
    for (const [share, fill] of [[cached[i], kept], [used[i], held]]) {
      if (!share) continue;
      context.globalAlpha = 0.25 + (0.75 * share) / 255;
      context.fillStyle = fill;
      context.fillRect(x, y, ...size);
      context.globalAlpha = 1;
    }
  }
}

// Draws steps as bars, prefill above drafts above decodes; heights grow with the root of the tokens. list: [decode, draft, prefill] of each
// step. budget: tokens that a step may compute.
export function steps(canvas, list, budget, room) {
  const { context, width, height } = begin(canvas);
  if (!width) return;
  const total = (step) => step[0] + step[1] + step[2];
  const most = Math.max(...list.map(total), 8);
  // Decodes would not be seen beside a prefill of the whole budget.
  const heightOf = (tokens) => (height - 2) * Math.sqrt(tokens / most);
  const w = width / room;
  const fills = [colour("decode"), colour("draft"), colour("prefill")];
  list.forEach((step, i) => {
    let y = height;
    const scale = heightOf(total(step)) / Math.max(total(step), 1);
    step.forEach((tokens, kind) => {
      const size = tokens * scale;
      context.fillStyle = fills[kind];
      context.fillRect((room - list.length + i) * w, y - size, Math.max(w - 0.5, 0.5), size);
      y -= size;
    });
  });
  if (budget <= most) {
    context.strokeStyle = colour("warn");
    context.beginPath();
    context.moveTo(0, height - heightOf(budget));
    context.lineTo(width, height - heightOf(budget));
    context.stroke();
  }
}
