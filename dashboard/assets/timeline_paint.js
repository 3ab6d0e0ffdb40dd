/* Painting a timeline: lanes, gutter, ruler with steps, overview; on a second canvas selection, hits and cursor. */
(function () {
  "use strict";
  const S = (window.stepscope = window.stepscope || {});
  const OVERVIEW = 46, STEPS = 17, TICKS = 20, FONT = "Inter, system-ui, sans-serif";
  S.TOP = OVERVIEW + STEPS + TICKS;
  S.OVERVIEW_HEIGHT = OVERVIEW;

  /** Fill styles of the categories: solid colours, and patterns that move with the picture. */
  S.Fills = class {
    constructor(context, theme, dark, lane, card) {
      this.colour = theme.categories.map((c) => (dark ? c.dark : c.light));
      this.texture = theme.categories.map((c) => c.texture);
      this.tint = this.colour.map((c, i) => S.mix(c, lane, this.texture[i] === "stripes" ? 0.35 : 0.26));
      this.style = this.colour.map((c, i) => this._style(context, i));
      this.card = card;
    }
    _style(context, i) {
      if (this.texture[i] === "solid") return this.colour[i];
      if (this.texture[i] === "outline") return this.tint[i];
      const size = this.texture[i] === "diagonal" ? 6 : 4;
      const tile = document.createElement("canvas");
      tile.width = tile.height = size;
      const g = tile.getContext("2d");
      g.fillStyle = this.tint[i]; g.fillRect(0, 0, size, size);
      if (size === 4) { g.fillStyle = this.colour[i]; g.fillRect(0, 0, 4, 2); return context.createPattern(tile, "repeat"); }
      g.strokeStyle = this.colour[i]; g.lineWidth = 1.4; g.beginPath();
      for (const d of [-6, 0, 6]) { g.moveTo(d, 6); g.lineTo(d + 6, 0); }
      g.stroke();
      return context.createPattern(tile, "repeat");
    }
    shift(x) { // so that hatching does not crawl while the picture is panned
      const moved = new DOMMatrix([1, 0, 0, 1, ((x % 12) + 12) % 12, 0]);
      for (const style of this.style) if (style instanceof CanvasPattern) style.setTransform(moved);
    }
  };

  S.paint = function (T) {
    const c = T.base, { width: W, height: H, gutter: G, colours: K } = T;
    c.fillStyle = K.card; c.fillRect(0, 0, W, H);
    if (!T.meta || !K.card) return;
    const D = T.feed.data;
    if (D && D.hasShares && !D.image) {
      D.image = S.sharesImage(D, (id) => T.layout.byTrack.get(id), T.inks, S.theme.stack, T.hidden) || "none";
    }
    if (D) T.fills.shift(T.x(D.start));
    const body = S.TOP + T.layout.pinHeight;
    section(T, T.layout.rows.filter((r) => r.y + r.h > T.scroll - 30 && r.y < T.scroll + H - body + 30), body, H - body, T.scroll);
    if (T.layout.pinHeight) {
      section(T, T.layout.pinRows, S.TOP, T.layout.pinHeight, 0);
      c.fillStyle = K.muted; c.fillRect(0, body - 1, W, 1);
    }
    scrollbar(T, body);
    ruler(T);
    overview(T);
    if (T.feed.failed) note(T, `the server did not answer (${T.feed.failed}); this is the last picture`);
    else if (!T.layout.count) note(T, "no rank matches the filter");
    c.fillStyle = K.line; c.fillRect(G - 1, S.TOP, 1, H - S.TOP);
  };

  function section(T, rows, top, height, scroll) {
    const c = T.base, { width: W, gutter: G, colours: K } = T;
    c.save();
    c.beginPath(); c.rect(0, top, W, height); c.clip();
    c.fillStyle = K.card; c.fillRect(0, top, W, height);
    c.translate(0, top - scroll);
    c.fillStyle = K.lane;
    for (const r of rows) c.fillRect(G, r.y, W - G, r.h);
    c.save();
    c.beginPath(); c.rect(G, scroll, W - G, height); c.clip();
    c.fillStyle = K.grid;
    for (const tick of T.ticks().at) c.fillRect(Math.round(T.x(tick)), scroll, 1, height);
    lanes(T, rows);
    boundaries(T, rows, scroll, height);
    c.restore();
    names(T, rows);
    c.restore();
  }

  function lanes(T, rows) {
    const D = T.feed.data;
    if (!D) return;
    const c = T.base, origin = T.x(D.start), scale = D.binNs * T.pixelsPerNs, labels = [];
    c.imageSmoothingEnabled = false;
    for (const row of rows) {
      const lane = D.lanes.get(row.track);
      if (lane && !lane.single && D.image instanceof HTMLCanvasElement && lane.imageH) {
        c.drawImage(D.image, 0, lane.imageY, D.bins, lane.imageH, origin, row.y, D.bins * scale, row.h);
      }
    }
    const buckets = S.theme.categories.map(() => []);
    for (const row of rows) {
      const lane = D.lanes.get(row.track);
      if (lane && lane.single) collect(T, lane, row, origin, scale, buckets, labels);
    }
    buckets.forEach((boxes, code) => {
      if (!boxes.length || T.hidden.has(code)) return;
      c.fillStyle = T.fills.style[code];
      for (let i = 0; i < boxes.length; i += 4) c.fillRect(boxes[i], boxes[i + 1], boxes[i + 2], boxes[i + 3]);
      if (T.fills.texture[code] !== "outline") return;
      c.strokeStyle = T.fills.colour[code]; c.lineWidth = 1;
      for (let i = 0; i < boxes.length; i += 4) {
        if (boxes[i + 2] > 3) c.strokeRect(boxes[i] + 0.5, boxes[i + 1] + 0.5, boxes[i + 2] - 1, boxes[i + 3] - 1);
      }
    });
    eventLabels(T, labels);
  }

  /** Visible rectangles of one lane of single events, by category; wide ones ask for a label. */
  function collect(T, lane, row, origin, scale, buckets, labels) {
    const { x: X, w: Wd, category: C, n } = lane, left = T.gutter, right = T.width;
    let low = 0, high = n; // first piece that ends in view
    while (low < high) { const m = (low + high) >> 1; if (origin + (X[m] + Wd[m]) * scale < left) low = m + 1; else high = m; }
    for (let j = low; j < n; j++) {
      const x = origin + X[j] * scale;
      if (x > right) break;
      let w = Wd[j] * scale;
      if (w > 4) w -= 0.8;
      const from = Math.max(x, left - 20), to = Math.min(x + Math.max(w, 0.8), right + 20);
      buckets[C[j]].push(from, row.y, Math.max(to - from, 0.8), row.h);
      if (w > 30 && row.h > 11 && labels.length < 8000) labels.push(x, w, row, lane.name[j], C[j]);
    }
  }

  function eventLabels(T, labels) {
    const c = T.base;
    c.textBaseline = "middle"; c.textAlign = "left";
    for (let i = 0; i < labels.length; i += 5) {
      const [x, w, row, name, code] = labels.slice(i, i + 5);
      if (T.hidden.has(code)) continue;
      const left = Math.max(x, T.gutter) + 4, room = x + w - left - 4;
      const text = T.fitted(T.feed.labels.get(name) || "", room, row.h > 15 ? 11 : 10);
      if (!text) continue;
      c.font = `500 ${row.h > 15 ? 11 : 10}px ${FONT}`;
      const y = row.y + row.h / 2 + 0.5;
      if (T.fills.texture[code] === "solid") c.fillStyle = T.colours.label;
      else {
        c.lineJoin = "round"; c.lineWidth = 4; c.strokeStyle = T.colours.card; c.strokeText(text, left, y);
        c.fillStyle = T.colours.text;
      }
      c.fillText(text, left, y);
    }
  }

  /** Each rank's own step boundaries; where they are too many, the whole run's. */
  function boundaries(T, rows, scroll, height) {
    const c = T.base;
    c.fillStyle = T.colours.step;
    const heads = rows.filter((r) => r.head), bounds = T.meta.bounds;
    for (const row of heads) {
      const block = rows.filter((r) => r.rank === row.rank), last = block[block.length - 1];
      for (const t of bounds[row.rank] || []) {
        const x = T.x(t);
        if (x >= T.gutter && x <= T.width) c.fillRect(Math.round(x), row.top - 2, 1, last.y + last.h - row.top + 4);
      }
    }
    if (Object.keys(bounds).length) return;
    for (const step of T.meta.steps) {
      const x = T.x(step.start);
      if (x >= T.gutter && x <= T.width) c.fillRect(Math.round(x), scroll, 1, height);
    }
  }

  /** The gutter: rank and mesh position at each rank's head, lane names below. */
  function names(T, rows) {
    const c = T.base, { gutter: G, colours: K } = T;
    c.fillStyle = K.card; c.fillRect(0, T.scroll - 40, G - 1, T.height + 80);
    c.textBaseline = "middle";
    rows.forEach((row) => {
      const y = row.y + row.h / 2 + 0.5;
      if (row.head) {
        if (row.top > 6) { c.fillStyle = K.line; c.fillRect(0, row.top - 5, T.width, 1); }
        if (T.hoverRank === row.rank) { c.fillStyle = K.lane; c.fillRect(0, row.y, G - 1, row.h); }
        triangle(c, 13, y, row.folded, K.muted);
        c.textAlign = "left"; c.fillStyle = K.text; c.font = `600 12px ${FONT}`;
        const rank = `rank ${row.rank}`;
        c.fillText(rank, 22, y);
        if (row.rankLabel) {
          const x = 22 + c.measureText(rank).width;
          c.font = `400 12px ${FONT}`; c.fillStyle = K.muted; c.fillText(` · ${row.rankLabel}`, x, y);
        }
        const pinned = T.layout.pinned.has(row.rank);
        if (pinned || T.hoverRank === row.rank) {
          c.textAlign = "right"; c.font = `400 12px ${FONT}`; c.fillStyle = pinned ? K.accent : K.muted;
          c.fillText(pinned ? "★" : "☆", G - 8, y);
        }
      } else if (row.label) {
        c.textAlign = "right"; c.fillStyle = K.muted; c.font = `400 10.5px ${FONT}`;
        c.fillText(T.fitted(row.label, G - 34, 10.5), G - 8, y);
      }
    });
    c.textAlign = "left";
  }

  function triangle(c, x, y, folded, colour) {
    c.fillStyle = colour; c.beginPath();
    if (folded) { c.moveTo(x - 2.5, y - 4); c.lineTo(x + 3, y); c.lineTo(x - 2.5, y + 4); }
    else { c.moveTo(x - 4, y - 2.5); c.lineTo(x + 4, y - 2.5); c.lineTo(x, y + 3); }
    c.fill();
  }

  /** 1 where the number of a usual step fits into it, else n: every n-th is numbered, across those that follow. */
  function everyStep(T) {
    const seen = T.meta.steps.filter((s) => T.x(s.end) > T.gutter && T.x(s.start) < T.width);
    if (seen.length < 2) return 1;
    const pitch = (T.x(seen[seen.length - 1].end) - T.x(seen[0].start)) / seen.length, needed = 9 + 8 * String(T.meta.steps.length).length;
    return pitch >= needed ? 1 : [2, 5, 10, 20, 50, 100, 200, 500, 1000].find((n) => n * pitch >= needed + 12) || 5000;
  }

  function ruler(T) {
    const c = T.base, { width: W, gutter: G, colours: K } = T, y0 = OVERVIEW;
    c.fillStyle = K.card; c.fillRect(0, 0, W, S.TOP);
    c.save(); c.beginPath(); c.rect(G, y0, W - G, STEPS + TICKS); c.clip();
    c.textBaseline = "middle";
    let free = -Infinity;
    const every = everyStep(T), numbers = []; // drawn last: they may reach into the steps that follow
    T.meta.steps.forEach((step, i) => {
      const next = T.meta.steps[i + 1], x = T.x(step.start), end = T.x(next ? Math.max(next.start, step.start) : step.end);
      if (end < G || x > W) return;
      if (i % 2 === 0) { c.fillStyle = K.lane; c.fillRect(x, y0 + 1, end - x, STEPS - 2); }
      c.fillStyle = K.step; c.fillRect(Math.round(x), y0 + 1, 1, STEPS - 1);
      const left = Math.max(x, G) + 5, text = step.step === "all" ? "whole trace (no step annotation)" : `step ${step.step}`;
      c.font = `600 11px ${FONT}`;
      const short = c.measureText(text).width + 8 < end - left ? text : String(step.step);
      const width = c.measureText(short).width;
      if ((width + 4 > end - left && (every === 1 || i % every)) || left < free) return;
      numbers.push([short, left, width]);
      free = left + width + 6;
    });
    for (const [text, left, width] of numbers) {
      c.fillStyle = K.card; if (every > 1) c.fillRect(left - 2, y0 + 3, width + 4, STEPS - 5);
      c.fillStyle = K.text; c.fillText(text, left, y0 + STEPS / 2 + 0.5);
    }
    const ticks = T.ticks();
    c.font = `400 11px ${FONT}`;
    for (const tick of ticks.at) {
      const x = Math.round(T.x(tick));
      c.fillStyle = K.line; c.fillRect(x, y0 + STEPS + 3, 1, TICKS - 3);
      const text = ticks.text(tick);
      if (x + 4 + c.measureText(text).width > W) continue;
      c.fillStyle = K.muted; c.fillText(text, x + 4, y0 + STEPS + TICKS / 2 + 1);
    }
    c.restore();
    c.fillStyle = K.muted; c.font = `400 11px ${FONT}`; c.textBaseline = "middle";
    c.fillText(`${S.duration(T.view.span)} in view`, 12, y0 + STEPS + TICKS / 2 + 1);
    c.fillText("step", 12, y0 + STEPS / 2 + 0.5);
    c.fillStyle = K.line; c.fillRect(0, S.TOP - 1, W, 1); c.fillRect(0, y0, W, 1);
  }

  function overview(T) {
    const c = T.base, { width: W, gutter: G, colours: K } = T, y = 7, h = OVERVIEW - 14, w = W - G;
    c.fillStyle = K.lane; c.fillRect(G, y, w, h);
    c.fillStyle = K.muted; c.font = `400 11px ${FONT}`; c.textBaseline = "middle";
    c.fillText("overview", 12, y + h / 2);
    const O = T.overview, X = (t) => G + t / T.meta.span_ns * w;
    if (O) {
      if (!O.image) O.image = S.overviewImage(O, S.theme, S.isDark(), K.lane);
      c.imageSmoothingEnabled = false; c.drawImage(O.image, G, y, w, h);
    }
    c.fillStyle = K.step;
    if (T.meta.steps.length < w / 3) for (const step of T.meta.steps) c.fillRect(Math.round(X(step.start)), y, 1, h);
    const from = Math.max(G, X(T.view.start + T.shift)), to = Math.min(W, X(T.view.end + T.shift));
    c.fillStyle = K.veil;
    c.fillRect(G, y, Math.max(0, from - G), h); c.fillRect(to, y, Math.max(0, W - to), h);
    if (T.found) {
      c.fillStyle = K.hit;
      for (const [bin] of T.found.bins) c.fillRect(Math.round(X(bin * T.found.bin_ns)), y - 4, 1.5, h + 8);
    }
    c.strokeStyle = K.accent; c.lineWidth = 1.5;
    c.strokeRect(from + 0.75, y - 1.25, Math.max(3, to - from - 1.5), h + 2.5);
    c.fillStyle = K.accent;
    for (const edge of [from, Math.max(from + 3, to)]) c.fillRect(edge - 1.5, y + h / 2 - 6, 3, 12);
    c.lineWidth = 1;
  }

  function scrollbar(T, body) {
    const room = T.height - body;
    if (T.layout.height <= room) return;
    const share = room / T.layout.height;
    T.base.fillStyle = S.mix(T.colours.muted, T.colours.card, 0.55);
    T.base.beginPath(); T.base.roundRect(T.width - 6, body + T.scroll * share + 1, 4, Math.max(18, room * share - 2), 2); T.base.fill();
  }

  function note(T, text) {
    const c = T.base;
    c.font = `500 12px ${FONT}`; c.textBaseline = "middle"; c.textAlign = "left";
    const w = c.measureText(text).width + 20;
    c.fillStyle = T.colours.text; c.beginPath(); c.roundRect(T.gutter + 12, T.height - 34, w, 24, 6); c.fill();
    c.fillStyle = T.colours.card; c.fillText(text, T.gutter + 22, T.height - 21.5);
  }

  S.FONT = FONT;
})();
