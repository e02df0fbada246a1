"""The board as one HTML file: the player for somebody without a notebook, or without Python.

    python -m mamba_teach demo --board board.html

Nothing is fetched: styles, script and frames lie in the page. The frames are JSON, made from the same
cells as every other picture of the board; the script only lays them out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from mamba_teach.events import Event, reduce
from mamba_teach.viz import history
from mamba_teach.viz.board_markup import film_strip
from mamba_teach.viz.cells import NULL, ROLES, BoardView, Cell, roles_in, view


def board_page(events: Sequence[Event], title: str) -> str:
    """A self-contained page that plays an event log."""
    views = [view(board, evicted) for board, evicted in history.step_boards(events)]
    views.append(view(reduce(events)))
    notes = [*[""] * (len(views) - 1), " (end of the log)"]
    slots = range(views[-1].num_blocks)
    data = {
        "groups": views[-1].groups,
        "roles": {role.letter: [role.name, role.colour] for role in ROLES},
        "frames": [frame_data(seen, note) for seen, note in zip(views, notes, strict=True)],
        "owners": history.answers(events, slots),
    }
    # "</" must not occur inside a script element.
    packed = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    key = "".join(
        f'<li><span class="mark" style="background:{role.colour}">{role.letter or "&nbsp;"}</span> '
        f"{escape(role.meaning)}</li>"
        for role in roles_in(views)
    )
    parts = {
        "TITLE": escape(title),
        "STYLE": STYLE,
        "LAST": str(len(views) - 1),
        "SLOT": str(slots[-1]),
        "KEY": key,
        "STRIP": film_strip(views, notes, "Without JavaScript: some frames."),
        "DATA": packed,
        "SCRIPT": SCRIPT,
    }
    return re.sub("@([A-Z]+)@", lambda match: parts[match[1]], PAGE)


def frame_data(seen: BoardView, note: str = "") -> dict[str, object]:
    """A frame as JSON: words for its rows, a packed text for its cells."""
    return {
        "title": seen.title + note,
        "rows": [[row.request_id, row.doing, *map(pack, row.cells)] for row in seen.rows],
        "waiting": ", ".join(seen.waiting),
        "evicted": pack(seen.evicted),
        "free": pack(seen.free),
    }


def pack(cells: Iterable[Cell]) -> str:
    """Cells as one text: "block/letter/tokens/flags" by space, ".3" for three that hold nothing."""
    words: list[str] = []
    for is_null, run in groupby(cells, key=lambda cell: cell.role is NULL):
        held = list(run)
        words += [f".{len(held)}"] if is_null else map(_pack, held)
    return " ".join(words)


def _pack(cell: Cell) -> str:
    flags = "r" * cell.reads + "w" * cell.writes
    return f"{cell.block}/{cell.letter}/{cell.tokens}/{flags}"


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@TITLE@</title>
<style>@STYLE@</style>
</head>
<body>
<h1>@TITLE@</h1>
<p>Requests are rows. Each group of layers has its own block table; all blocks come from one pool.
Arrow keys step, Home and End jump, the space bar plays.</p>
<div class="controls" role="group" aria-label="player">
<button id="back" aria-label="step back">&#9664; back</button>
<button id="play" aria-pressed="false">&#9654; play</button>
<button id="forward" aria-label="step forward">forward &#9654;</button>
<input id="slider" type="range" min="0" max="@LAST@" value="0" aria-label="frame">
</div>
<p id="title" role="status" aria-live="polite"></p>
<div class="board"><table id="board" aria-describedby="title"></table></div>
<noscript>@STRIP@</noscript>
<p><label>Who owned slot <input id="slot" type="number" min="0" max="@SLOT@" value="1"></label>?</p>
<pre id="answer" role="status" aria-live="polite"></pre>
<h2>How to read it</h2>
<ul class="key">@KEY@</ul>
<p>In a block: its slot; its role; <b>=12</b> the state after 12 tokens, <b>+4</b> the keys of 4
tokens; <b>r&#8599;</b> the step reads this state, <b>w&#8601;</b> the step writes to this block.
The free blocks stand in the order in which they will be handed out; one that is still published can
be hit until then.</p>
<script type="application/json" id="log">@DATA@</script>
<script>@SCRIPT@</script>
</body>
</html>
"""

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem; color: #111; background: #fff; }
h1 { font-size: 1.35rem; margin: 0 0 .3rem; } h2 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
.controls { display: flex; flex-wrap: wrap; gap: .5rem; align-items: center; max-width: 60rem; }
.controls input { flex: 1 1 14rem; } button { font: inherit; padding: .15rem .7rem; }
:focus-visible { outline: 3px solid #0072B2; outline-offset: 1px; }
#title { font-weight: 600; margin: .6rem 0; }
.board { overflow-x: auto; }
table { border-collapse: collapse; } #board th, #board td { border: 1px solid #ccc; padding: 4px 6px;
  text-align: left; vertical-align: top; }
#board th small { display: block; font-weight: normal; white-space: nowrap; }
.cells { display: flex; gap: 1px; } .pool .cells { flex-wrap: wrap; max-width: 70rem; }
.block { box-sizing: border-box; flex: 0 0 39px; height: 40px; border: 1px solid #000;
  font: 10px/12px ui-monospace, monospace; padding: 1px 2px; display: flex;
  justify-content: space-between; flex-wrap: wrap; }
.block span { flex: 0 0 100%; min-height: 12px; } .block.s { border-style: dashed; }
.empty { flex: 0 0 39px; text-align: center; color: #666; } .empty.narrow { flex-basis: 7px; }
.cut { align-self: center; padding: 0 .6rem; color: #444; }
.key { columns: 20rem; list-style: none; padding: 0; margin: 0; } .key li { margin: 2px 0; }
.mark { display: inline-block; min-width: 1.5em; text-align: center; border: 1px solid #000; }
pre { margin: 0; white-space: pre-wrap; }
"""

SCRIPT = """
"use strict";
const log = JSON.parse(document.getElementById("log").textContent);
const at = id => document.getElementById(id);
const node = (tag, text, name) => {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  if (name) made.className = name;
  return made;
};
const unpack = text => (text ? text.split(" ") : []).flatMap(word => {
  if (word[0] === ".") return Array(Number(word.slice(1))).fill(null);
  const [block, letter, tokens, flags] = word.split("/");
  return [{block, letter, tokens, flags}];
});
const role = letter => log.roles[/^\\d+x$/.test(letter) ? "2x" : letter];

function drawBlock(cell, where) {
  const [name, colour] = role(cell.letter);
  const box = node("div", "", "block " + cell.letter);
  box.style.background = colour;
  const does = {r: ", read", w: ", written", rw: ", read and written"}[cell.flags] || "";
  box.title = "slot " + cell.block + (where || "") + ": " + name + does;
  box.append(node("b", cell.block), node("i", cell.letter), node("span", cell.tokens));
  box.append(node("span", cell.flags.replace("r", "r\\u2197 ").replace("w", "w\\u2199")));
  return box;
}
function drawCells(cells, isHeld) {
  const line = node("div", "", "cells");
  cells.forEach((cell, column) => {
    if (cell) line.append(drawBlock(cell, isHeld && ", column " + column));
    else line.append(node("div", ".", isHeld(column) ? "empty" : "empty narrow"));
  });
  return line;
}
function drawQueue(cells) {
  const most = 60, hidden = cells.slice(most / 2, -most / 2);
  if (cells.length <= most) return drawCells(cells);
  const line = drawCells(cells.slice(0, most / 2));
  const size = c => c.tokens[0] === "…" ? Number(c.tokens.slice(1)) - Number(c.block) + 1 : 1;
  const cut = hidden.reduce((sum, cell) => sum + size(cell), 0);
  line.append(node("div", "… " + cut + " more …", "cut"));
  cells.slice(-most / 2).forEach(cell => line.append(drawBlock(cell)));
  return line;
}
function drawRow(name, doing, parts) {
  const row = node("tr"), head = node("th", name);
  head.scope = "row";
  if (doing) head.append(node("small", doing));
  row.append(head, ...parts.map(part => { const td = node("td"); td.append(part); return td; }));
  return row;
}
function drawWide(name, part) {
  const row = drawRow(name, "", [part]);
  row.className = "pool";
  row.lastChild.colSpan = log.groups.length;
  return row;
}
let shown = -1, timer = null;
function select(index) {
  index = Math.min(Math.max(index, 0), log.frames.length - 1);
  if (index === shown) return;
  shown = index;
  const frame = log.frames[index], table = at("board"), head = node("tr");
  for (const name of ["request", ...log.groups]) {
    const cell = node("th", name);
    cell.scope = "col";
    head.append(cell);
  }
  const tables = frame.rows.map(row => row.slice(2).map(unpack));
  const isHeld = group => column => tables.some(row => row[group][column]);
  const rows = frame.rows.map((row, i) =>
    drawRow(row[0], row[1], tables[i].map((cells, g) => drawCells(cells, isHeld(g)))));
  if (frame.waiting) rows.push(drawWide("waiting", frame.waiting));
  if (frame.evicted) rows.push(drawWide("evicted", drawCells(unpack(frame.evicted))));
  rows.push(drawWide("free, next first", drawQueue(unpack(frame.free))));
  table.replaceChildren(head, ...rows);
  at("title").textContent = frame.title;
  at("slider").value = index;
  at("slider").setAttribute("aria-valuetext", frame.title);
}
function play(on) {
  if (timer) clearInterval(timer);
  timer = on ? setInterval(() => {
    if (shown === log.frames.length - 1) play(false); else select(shown + 1);
  }, 700) : null;
  at("play").setAttribute("aria-pressed", String(on));
  at("play").textContent = on ? "\\u275A\\u275A pause" : "\\u25B6 play";
}
function toggle() {
  if (!timer && shown === log.frames.length - 1) select(0);
  play(!timer);
}
function ask() {
  const slot = at("slot").value;
  at("answer").textContent = log.owners[slot] || "no such slot";
}
at("slider").addEventListener("input", event => select(Number(event.target.value)));
at("back").addEventListener("click", () => select(shown - 1));
at("forward").addEventListener("click", () => select(shown + 1));
at("play").addEventListener("click", toggle);
at("slot").addEventListener("input", ask);
document.addEventListener("keydown", event => {
  if (event.target.tagName === "INPUT" || event.ctrlKey || event.metaKey || event.altKey) return;
  const jump = {ArrowLeft: shown - 1, ArrowRight: shown + 1, Home: 0, End: log.frames.length}[event.key];
  if (jump !== undefined) { select(jump); event.preventDefault(); }
  if (event.key === " " && event.target.tagName !== "BUTTON") { toggle(); event.preventDefault(); }
});
select(0);
ask();
"""
