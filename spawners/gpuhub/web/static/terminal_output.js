// Output of a terminal as text with colours. It is inserted as text alone, so that nothing in it is HTML.

// A longer line is broken; of a longer output, the beginning is dropped. Characters, with control sequences.
const MAX_LINE = 20000;
const MAX_CHARACTERS = 200000;
const COLOUR = /\x1b\[([0-9;:]*)m/g;
// Control sequences that are left after the colours; the last alternatives are the beginnings of sequences.
const CONTROL = /\x1b(?:\[[0-9;:<=>?]*[ -\/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|\x1b(?:\[[0-9;:<=>?]*[ -\/]*|\][^\x07\x1b]*)?$|[\x00-\x08\x0b-\x1f\x7f]/g;
const PLAIN = { fg: null, bg: null, styles: "" };
const STYLES = { 1: "bold", 2: "dim", 3: "italic", 4: "underline", 7: "inverse", 9: "strike" };
const ENDS = { 22: ["bold", "dim"], 23: ["italic"], 24: ["underline"], 27: ["inverse"], 29: ["strike"] };

function isByte(value) {
  return Number.isInteger(value) && value >= 0 && value <= 255;
}

// One of xterm's 256 colours: a number below 16 for the page's own palette, else a colour of CSS.
function findColour(number) {
  if (number < 16) { return number; }
  if (number >= 232) { return `rgb(${Array(3).fill(8 + 10 * (number - 232)).join(",")})`; }
  const level = (step) => (step ? 55 + 40 * step : 0);
  const cube = number - 16;
  return `rgb(${level(Math.floor(cube / 36))},${level(Math.floor(cube / 6) % 6)},${level(cube % 6)})`;
}

// The colour after a code 38 or 48, and how many codes it has; null for none.
function readColour(codes) {
  if (codes[0] === 5 && isByte(codes[1])) { return [findColour(codes[1]), 2]; }
  if (codes[0] === 2 && codes.length >= 4 && codes.slice(1, 4).every(isByte)) { return [`rgb(${codes.slice(1, 4).join(",")})`, 4]; }
  return [null, codes.length];
}

// The style after the codes of one sequence, such as `1;31`.
function applyCodes(style, text) {
  let { fg, bg } = style;
  let styles = new Set(style.styles ? style.styles.split(" ") : []);
  const codes = text.split(/[;:]/).map(Number);
  for (let place = 0; place < codes.length; place += 1) {
    const code = codes[place];
    if (code === 0) { fg = bg = null; styles = new Set(); }
    else if (STYLES[code]) { styles.add(STYLES[code]); }
    else if (ENDS[code]) { ENDS[code].forEach((name) => styles.delete(name)); }
    else if (code === 38 || code === 48) {
      const [colour, used] = readColour(codes.slice(place + 1));
      if (code === 38) { fg = colour; } else { bg = colour; }
      place += used;
    }
    else if (code === 39) { fg = null; }
    else if (code === 49) { bg = null; }
    else if (code >= 30 && code <= 37) { fg = code - 30; }
    else if (code >= 40 && code <= 47) { bg = code - 40; }
    else if (code >= 90 && code <= 97) { fg = code - 82; }
    else if (code >= 100 && code <= 107) { bg = code - 92; }
  }
  return { fg, bg, styles: [...styles].join(" ") };
}

function applyText(style, text) {
  for (const [, codes] of text.matchAll(COLOUR)) { style = applyCodes(style, codes); }
  return style;
}

function appendText(element, raw, style) {
  const text = raw.replace(CONTROL, "");
  if (!text) { return; }
  if (style.fg === null && style.bg === null && !style.styles) { element.append(text); return; }
  const part = document.createElement("span");
  part.textContent = text;
  for (const name of style.styles.split(" ").filter(Boolean)) { part.classList.add(`gpuhub-ansi-${name}`); }
  for (const [property, kind, colour] of [["color", "fg", style.fg], ["backgroundColor", "bg", style.bg]]) {
    if (typeof colour === "number") { part.classList.add(`gpuhub-ansi-${kind}`, `gpuhub-ansi-${kind}-${colour % 8}`); }
    else if (colour) { part.style[property] = colour; }
  }
  element.append(part);
}

// Progress bars go back to the beginning of their line: what they wrote before is not shown.
function findVisibleStart(line) {
  return (line.endsWith("\r") ? line.slice(0, -1) : line).lastIndexOf("\r") + 1;
}

export class TerminalOutput {
  constructor(screen) {
    this.screen = screen;
    this.clear();
  }

  clear() {
    this.screen.replaceChildren();
    this.sizes = []; // of the complete lines, characters
    this.total = 0;
    this.style = PLAIN; // at the beginning of the last line
    this.rest = ""; // the last line so far
    this.last = null; // its element
  }

  append(text) {
    const isAtEnd = this.screen.scrollHeight - this.screen.scrollTop - this.screen.clientHeight < 40;
    this.last?.remove();
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop();
    const added = document.createDocumentFragment();
    for (const line of lines) { this.addLine(added, line); }
    const start = findVisibleStart(this.rest);
    this.style = applyText(this.style, this.rest.slice(0, start));
    this.rest = this.rest.slice(start);
    while (this.rest.length > MAX_LINE) {
      this.addLine(added, this.rest.slice(0, MAX_LINE));
      this.rest = this.rest.slice(MAX_LINE);
    }
    this.last = this.render(this.rest);
    added.append(this.last);
    this.screen.append(added);
    this.dropOldLines();
    if (isAtEnd) { this.screen.scrollTop = this.screen.scrollHeight; }
  }

  addLine(parent, line) {
    for (let begin = 0; begin === 0 || begin < line.length; begin += MAX_LINE) {
      const piece = line.slice(begin, begin + MAX_LINE);
      const element = this.render(piece);
      element.append("\n");
      parent.append(element);
      this.style = applyText(this.style, piece);
      this.sizes.push(piece.length + 1);
      this.total += piece.length + 1;
    }
  }

  render(line) {
    const element = document.createElement("span");
    const start = findVisibleStart(line);
    let style = applyText(this.style, line.slice(0, start));
    let end = start;
    for (const match of line.slice(start).matchAll(COLOUR)) {
      appendText(element, line.slice(end, start + match.index), style);
      style = applyCodes(style, match[1]);
      end = start + match.index + match[0].length;
    }
    appendText(element, line.slice(end), style);
    return element;
  }

  dropOldLines() {
    let count = 0;
    while (this.total > MAX_CHARACTERS && count < this.sizes.length) { this.total -= this.sizes[count]; count += 1; }
    this.sizes.splice(0, count);
    while (count > 0) { this.screen.firstChild.remove(); count -= 1; }
  }
}
