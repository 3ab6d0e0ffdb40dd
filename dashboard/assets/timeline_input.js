/* Mouse and keys of a timeline: wheel, drag, brush, hover, click, and every key listed in the help. */
(function () {
  "use strict";
  const S = (window.stepscope = window.stepscope || {});

  S.attachInput = function (T) {
    const el = T.element;
    el.addEventListener("wheel", (e) => wheel(T, e), { passive: false });
    el.addEventListener("pointerdown", (e) => down(T, e));
    el.addEventListener("pointermove", (e) => move(T, e));
    el.addEventListener("pointerup", (e) => up(T, e));
    el.addEventListener("pointercancel", () => { T.drag = null; });
    el.addEventListener("pointerleave", () => { T.cursor = null; T.hoverRank = null; hideTip(T); T.paint(); });
    el.addEventListener("dblclick", (e) => doubleClick(T, e));
    el.addEventListener("keydown", (e) => key(T, e));
  };

  const place = (T, e) => { const r = T.element.getBoundingClientRect(); return [e.clientX - r.left, e.clientY - r.top]; };

  function wheel(T, e) {
    if (!T.meta) return;
    const [x] = place(T, e);
    if (e.ctrlKey || e.metaKey) {
      e.preventDefault();
      T.view.zoom(Math.exp(Math.max(-1, Math.min(1, e.deltaY * 0.0035))), T.time(Math.max(x, T.gutter)) - T.shift);
    } else if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
      e.preventDefault();
      T.view.pan((e.deltaX || e.deltaY) / T.pixelsPerNs);
    } else if (T.scrollBy(e.deltaY)) e.preventDefault(); // at its end the page scrolls on
    hideTip(T);
  }

  // ---- drag ---------------------------------------------------------------------------------------------------------
  function down(T, e) {
    if (!T.meta || e.button) return;
    T.element.focus({ preventScroll: true });
    const [x, y] = place(T, e);
    if (x < T.gutter) { if (y > S.TOP) gutterClick(T, x, y); return; }
    T.element.setPointerCapture(e.pointerId);
    const kind = y < S.OVERVIEW_HEIGHT ? overviewGrip(T, x) : y < S.TOP || e.shiftKey ? "range" : "pan";
    T.drag = { kind, x, y, start: T.view.start, end: T.view.end, scroll: T.scroll, moved: false };
    hideTip(T);
  }

  function overviewGrip(T, x) {
    const [from, to] = [T.view.start, T.view.end].map((t) => overviewX(T, t + T.shift));
    if (Math.abs(x - from) < 6) return "left";
    if (Math.abs(x - to) < 6) return "right";
    return x > from && x < to && to - from < T.width - T.gutter - 8 ? "window" : "brush";
  }
  const overviewX = (T, t) => T.gutter + t / T.meta.span_ns * (T.width - T.gutter);
  const overviewTime = (T, x) => (x - T.gutter) / (T.width - T.gutter) * T.meta.span_ns - T.shift;

  function move(T, e) {
    if (!T.meta) return;
    const [x, y] = place(T, e), d = T.drag;
    T.cursor = x;
    if (!d) { hover(T, x, y); return; }
    if (Math.abs(x - d.x) + Math.abs(y - d.y) > 3) d.moved = true;
    if (!d.moved) return;
    const over = (x - d.x) / (T.width - T.gutter) * T.meta.span_ns;
    if (d.kind === "pan") {
      const ns = (d.x - x) * (d.end - d.start) / (T.width - T.gutter);
      T.view.set(d.start + ns, d.end + ns);
      T.scroll = d.scroll; T.scrollBy(d.y - y);
    } else if (d.kind === "range") { T.range = [T.time(d.x), T.time(x)].sort((a, b) => a - b); T.paintOver(); }
    else if (d.kind === "window") T.view.set(d.start + over, d.end + over);
    else if (d.kind === "left") T.view.set(Math.min(d.start + over, d.end - 40), d.end);
    else if (d.kind === "right") T.view.set(d.start, Math.max(d.end + over, d.start + 40));
    else { const [a, b] = [d.x, x].map((v) => overviewTime(T, v)).sort((p, q) => p - q); T.view.set(a, b); }
  }

  function up(T, e) {
    const d = T.drag;
    T.drag = null;
    if (!d || !T.meta) return;
    const [x, y] = place(T, e);
    if (d.kind === "range" && d.moved) { T.setRange(T.range[1] - T.range[0] >= 1 ? T.range.map(Math.round) : null); return; }
    if (d.moved) return;
    if (d.kind === "brush") { const t = overviewTime(T, x), half = T.view.span / 2; T.view.set(t - half, t + half); return; }
    if (y < S.TOP && y > S.OVERVIEW_HEIGHT) { stepAt(T, T.time(x)); return; }
    if (y < S.TOP) return;
    const hit = T.hit(x, y);
    if (hit && hit.dense) { T.view.zoom(0.2, T.time(x) - T.shift); return; }
    if (hit) T.choose(hit.track, hit.index, false); else T.clearSelection();
  }

  /** A click on the ruler: that step fills the view. */
  function stepAt(T, t) {
    const step = [...T.meta.steps].reverse().find((s) => s.start <= t && t < s.end);
    if (step) T.showStep(step);
  }

  function gutterClick(T, x, y) {
    const rank = T.rankAt(y);
    if (rank === null) return;
    const L = T.layout, set = x > T.gutter - 26 ? L.pinned : L.collapsed;
    if (set.has(rank)) set.delete(rank); else set.add(rank);
    T.relayout();
  }

  function doubleClick(T, e) {
    const [x, y] = place(T, e);
    if (x < T.gutter || y < S.TOP) return;
    if (!T.selected) { T.view.fit(); return; }
    const { start, end } = T.selected, pad = Math.max(end - start, 20);
    T.view.set(start - pad - T.shift, end + pad - T.shift);
  }

  // ---- what lies under a point --------------------------------------------------------------------------------------
  Object.assign(S.Timeline.prototype, {
    /** The range, else the selected operation with all its parts, else everything. */
    fitTo() {
      const chosen = this.selected, parts = chosen ? [chosen, ...chosen.parts] : [];
      const found = this.range || (chosen ? [Math.min(...parts.map((p) => p.start)), Math.max(...parts.map((p) => p.end))] : null);
      if (!found) { this.view.fit(); return; }
      const pad = Math.max((found[1] - found[0]) * 0.25, 20);
      this.view.set(found[0] - pad - this.shift, found[1] + pad - this.shift);
    },
    rowAt(y) {
      if (y < S.TOP) return null;
      const pinned = y < this.body, at = pinned ? y - S.TOP : y - this.body + this.scroll;
      return (pinned ? this.layout.pinRows : this.layout.rows).find((r) => at >= r.y && at <= r.y + r.h) || null;
    },
    rankAt(y) {
      const pinned = y < this.body, at = pinned ? y - S.TOP : y - this.body + this.scroll;
      let rank = null;
      for (const row of pinned ? this.layout.pinRows : this.layout.rows) if (row.y <= at) rank = row.rank;
      return rank;
    },
    hit(x, y) {
      const D = this.feed.data, row = x >= this.gutter ? this.rowAt(y) : null, lane = row && D && D.lanes.get(row.track);
      if (!lane) return null;
      const p = (this.time(x) - D.start) / D.binNs;
      if (!lane.single) {
        const bin = Math.floor(p);
        if (bin < 0 || bin >= D.bins) return null;
        const mix = lane.shares.map(([code, s]) => [code, s[bin] / 255]).filter(([, s]) => s > 0).sort((a, b) => b[1] - a[1]);
        return mix.length ? { dense: true, track: row.track, row, mix } : null;
      }
      const slack = 2.5 / (this.pixelsPerNs * D.binNs);
      let low = 0, high = lane.n;
      while (low < high) { const m = (low + high) >> 1; if (lane.x[m] <= p) low = m + 1; else high = m; }
      let best = -1, distance = slack;
      for (let j = Math.max(0, low - 2); j < Math.min(lane.n, low + 2); j++) {
        const away = Math.max(lane.x[j] - p, p - lane.x[j] - lane.w[j], 0);
        if (away < distance && !this.hidden.has(lane.category[j])) { distance = away; best = j; }
      }
      if (best < 0) return null;
      const found = { track: row.track, row, index: lane.first + best, code: lane.category[best], name: lane.name[best] };
      return { ...found, ns: lane.w[best] * D.binNs };
    },
  });

  // ---- hover --------------------------------------------------------------------------------------------------------
  function hover(T, x, y) {
    const rank = x < T.gutter ? T.rankAt(y) : null;
    if (rank !== T.hoverRank) { T.hoverRank = rank; T.paint(); } else T.paintOver();
    T.element.style.cursor = pointerShape(T, x, y, rank);
    const hit = T.hit(x, y);
    if (!hit) { hideTip(T); return; }
    const categories = S.theme.categories, { row } = hit;
    const where = [`rank ${row.rank}`, row.rankLabel, row.label || row.role].filter(Boolean).join(" · ");
    if (hit.dense) {
      const D = T.feed.data, rest = 1 - hit.mix.reduce((s, [, v]) => s + v, 0);
      const lines = hit.mix.map(([code, share]) => [`${categories[code].label}`, share < 0.005 ? "<1 %" : S.percent(share)]);
      if (rest > 0.01) lines.push(["nothing", S.percent(rest)]);
      showTip(T, x, y, `${S.duration(D.binNs)} of ${where}`, lines, "click to zoom in");
      return;
    }
    const text = T.feed.labels.get(hit.name) || categories[hit.code].label;
    const lines = [[categories[hit.code].label, S.duration(hit.ns)]];
    showTip(T, x, y, text, lines, where);
    exact(T, hit, x, y, text, where);
  }

  function pointerShape(T, x, y, rank) {
    if (x < T.gutter) return rank === null ? "default" : "pointer";
    if (y >= S.OVERVIEW_HEIGHT) return y < S.TOP ? "text" : "default";
    return { left: "ew-resize", right: "ew-resize", window: "grab", brush: "crosshair" }[overviewGrip(T, x)];
  }

  /** The exact figures of what is under the cursor, asked once the cursor rests. */
  function exact(T, hit, x, y, text, where) {
    clearTimeout(T.hovering);
    const wanted = (T.wantedTip = `${hit.track}.${hit.index}`);
    T.hovering = setTimeout(async () => {
      let event;
      try { event = await S.json(`/api/event/${S.runPath(T.run)}?track=${hit.track}&index=${hit.index}`); } catch (error) { return; }
      if (T.wantedTip !== wanted || !T.tip.classList.contains("shown")) return;
      const facts = event.facts.filter(([name]) => !["Rank", "Stream", "Group", "Matched by"].includes(name));
      const lines = [[S.theme.categories[event.category].label, S.duration(hit.ns)], ...facts];
      if (event.note) lines.push(["", event.note]);
      showTip(T, x, y, event.name, lines, where);
    }, 90);
  }

  function showTip(T, x, y, title, lines, foot) {
    const rows = lines.map(([k, v]) => S.make("div", { class: "ss-tip-row" }, S.make("span", {}, k), S.make("b", {}, v)));
    T.tip.replaceChildren(S.make("div", { class: "ss-tip-title" }, title), ...rows, S.make("div", { class: "ss-tip-foot" }, foot));
    T.tip.classList.add("shown");
    const w = T.tip.offsetWidth, h = T.tip.offsetHeight;
    T.tip.style.left = `${x + 16 + w > T.width ? Math.max(4, x - w - 14) : x + 16}px`;
    T.tip.style.top = `${y + 18 + h > T.height ? Math.max(4, y - h - 12) : y + 18}px`;
  }
  function hideTip(T) { clearTimeout(T.hovering); T.wantedTip = ""; T.tip.classList.remove("shown"); }

  // ---- keys ---------------------------------------------------------------------------------------------------------
  function key(T, e) {
    if (!T.meta || e.ctrlKey || e.metaKey || e.altKey) return;
    const span = T.view.span, over = T.cursor !== null && T.cursor > T.gutter;
    const at = over ? T.time(T.cursor) - T.shift : (T.view.start + T.view.end) / 2;
    const actions = {
      w: () => T.view.zoom(0.7, at), s: () => T.view.zoom(1 / 0.7, at),
      a: () => T.view.pan(-span * 0.15), d: () => T.view.pan(span * 0.15),
      ArrowLeft: () => (T.selected ? T.neighbour(-1) : T.view.pan(-span * 0.15)),
      ArrowRight: () => (T.selected ? T.neighbour(1) : T.view.pan(span * 0.15)),
      ArrowUp: () => T.scrollBy(-60), ArrowDown: () => T.scrollBy(60),
      PageUp: () => T.scrollBy(-(T.height - T.body)), PageDown: () => T.scrollBy(T.height - T.body),
      f: () => T.fitTo(), Home: () => T.view.fit(),
      "[": () => T.sameName(-1), "]": () => T.sameName(1), n: () => T.search(T.query, true),
      Escape: () => T.clear(), Enter: () => firstInView(T),
    };
    const action = actions[e.key.length === 1 ? e.key.toLowerCase() : e.key];
    if (action) { e.preventDefault(); hideTip(T); action(); }
  }

  function firstInView(T) {
    const D = T.feed.data;
    if (!D || T.selected) return;
    for (const row of [...T.layout.pinRows, ...T.layout.rowsBetween(T.scroll, T.scroll + T.height - T.body)]) {
      const lane = D.lanes.get(row.track), from = lane && (T.view.start + T.shift - D.start) / D.binNs;
      const j = lane && lane.single ? lane.x.findIndex((x) => x >= from) : -1;
      if (j >= 0) { T.choose(row.track, lane.first + j, false); return; }
    }
    T.tell("said", "zoom in (W) until single operations show, then press Enter");
  }
})();
