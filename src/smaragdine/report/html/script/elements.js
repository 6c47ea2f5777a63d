// Elements without markup: whatever a recording calls its operations is text here.

const at = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else if (value !== null && value !== undefined && value !== false)
      made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

function tableHead(texts, lastClass = null) {
  const column = (text, i) =>
    element("th", { scope: "col", class: i === texts.length - 1 ? lastClass : null }, text);
  return element("thead", {}, element("tr", {}, ...texts.map(column)));
}

function drawn(tag, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// What moves the cursor or turns the text around is shown as its code.
const visible = (text) =>
  text.replace(
    /[\u0000-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069]/g,
    (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );

// Kernels have names of a thousand characters; what tells them apart is at the ends.
const shortened = (text, most) =>
  text.length <= most
    ? text
    : `${text.slice(0, Math.ceil(most / 2))}…${text.slice(-Math.floor(most / 2) + 1)}`;

function sharp(canvas, width, height) {
  const ratio = Math.max(1, window.devicePixelRatio || 1);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  pen.textBaseline = "middle";
  return pen;
}

const token = (name) => getComputedStyle(document.body).getPropertyValue(`--${name}`).trim();

// A path may be broken after each layer.
const breakable = (path) => path.split(/(?<=\/)/).flatMap((part) => [part, element("wbr")]);

// As wide as it is shown; on paper, as wide as a page.
const widthOf = (field) => (printing.matches ? 680 : field.clientWidth || 800);

// Lines of [label, value], under a heading.
function showTip(x, y, heading, lines) {
  const tip = at("tip");
  const rows = lines.map(([label, value]) =>
    element("tr", {}, element("th", { scope: "row" }, label), element("td", {}, ...breakable(value))),
  );
  tip.replaceChildren(
    element("strong", {}, ...breakable(shortened(visible(heading), 300))),
    element("table", {}, element("tbody", {}, ...rows)),
  );
  tip.hidden = false;
  const [width, height] = [tip.offsetWidth, tip.offsetHeight];
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${y + 18 + height < innerHeight ? y + 18 : Math.max(8, y - height - 14)}px`;
}

function hideTip() {
  at("tip").hidden = true;
}
