/* One timeline: a canvas fed by /api/view, its state, and what happens on zoom, selection, search and theme. */
(function () {
  "use strict";
  const S = (window.stepscope = window.stepscope || {});
  const SETTLE = 350; // ms without a change before the address bar is written

  S.Timeline = class {
    /** `primary`: this timeline's state is the address bar's; `view`: shared between linked timelines. */
    constructor(element, { run, view = new S.View(), primary = true }) {
      Object.assign(this, { element, run, view, primary });
      this.shift = 0; // run time = view time + shift: linked timelines are aligned at a step's start
      this.scroll = 0; this.cursor = null; this.hoverRank = null; this.range = null; this.selected = null;
      this.found = null; this.foundLabels = new Set(); this.query = "";
      this.hidden = new Set(); this.overview = null; this.meta = null;
      this.width = 0; this.height = 0; this.gutter = 150; this.colours = {}; this.paints = []; this.widths = new Map();
      this.canvas = S.make("canvas", { "aria-hidden": "true" }); this.overCanvas = S.make("canvas", { "aria-hidden": "true" });
      this.tip = S.make("div", { class: "ss-tip", role: "tooltip" });
      element.replaceChildren(this.canvas, this.overCanvas, this.tip);
      this.base = this.canvas.getContext("2d", { alpha: false }); this.over = this.overCanvas.getContext("2d");
      this.feed = new S.Feed(run, () => this.wish(), () => { this.paint(); this.tell("arrived"); }, () => this.settled());
      this.listeners = {};
      view.listeners.add(() => this.changed());
      S.themed.add(() => this.recolour());
      new ResizeObserver(() => this.resize()).observe(element);
      S.attachInput(this);
      this.loading = this.load();
    }
    on(event, f) { (this.listeners[event] = this.listeners[event] || []).push(f); return this; }
    tell(event, ...values) { for (const f of this.listeners[event] || []) f(...values); }

    async load() {
      await S.ready;
      if (this.primary) this.restoring = true; // the address bar is read, not written, until restore()
      this.meta = await S.json(`/api/meta/${S.runPath(this.run)}`);
      this.layout = new S.Layout(this.meta);
      if (this.meta.ranks.length > 64) this.layout.allCollapsed = true;
      await document.fonts.load(`500 11px ${S.FONT}`).catch(() => null);
      await document.fonts.load(`600 12px ${S.FONT}`).catch(() => null);
      this.widths.clear();
      if (this.primary) { this.view.limits = [0, this.meta.span_ns]; this.view.fit(); }
      this.gutter = this.gutterWidth();
      this.recolour();
      this.resize();
      const bins = Math.max(200, Math.round(this.width - this.gutter));
      const response = await fetch(`/api/overview/${S.runPath(this.run)}?bins=${bins}`);
      this.overview = S.parseOverview(await response.arrayBuffer());
      this.paint();
      this.element.dataset.ready = "true";
      this.tell("ready");
    }
    gutterWidth() {
      this.base.font = `600 12px ${S.FONT}`;
      const widest = Math.max(...this.meta.ranks.slice(0, 2000).map((r) => `rank ${r.rank} · ${r.label}`.length).concat(8));
      const sample = this.meta.ranks.find((r) => `rank ${r.rank} · ${r.label}`.length === widest);
      const text = sample ? `rank ${sample.rank} · ${sample.label}` : "rank 0";
      const rank = this.base.measureText(text).width + 52;
      this.base.font = `400 10.5px ${S.FONT}`;
      const labels = this.meta.ranks.slice(0, 64).flatMap((r) => r.tracks.map(([, , label]) => label));
      const lane = Math.max(0, ...labels.map((label) => this.base.measureText(label).width + 34));
      return Math.round(Math.min(240, Math.max(120, rank, Math.min(190, lane))));
    }

    // ---- geometry ---------------------------------------------------------------------------------------------------
    get pixelsPerNs() { return (this.width - this.gutter) / this.view.span; }
    x(t) { return this.gutter + (t - this.shift - this.view.start) * this.pixelsPerNs; }
    time(x) { return this.view.start + this.shift + (x - this.gutter) / this.pixelsPerNs; }
    get body() { return S.TOP + this.layout.pinHeight; }
    resize() {
      if (!this.meta) return;
      const rect = this.element.getBoundingClientRect();
      const share = parseFloat(getComputedStyle(this.element).getPropertyValue("--most")) || 0.66; // of the window's height
      const most = Math.round(Math.max(300, share * window.innerHeight));
      this.layout.arrange(Math.max(160, most - S.TOP));
      const height = Math.round(Math.min(most, Math.max(200, S.TOP + this.layout.height + this.layout.pinHeight)));
      if (height !== Math.round(rect.height)) this.element.style.height = `${height}px`;
      this.width = Math.round(this.element.clientWidth); this.height = height;
      const ratio = devicePixelRatio || 1;
      for (const [canvas, context] of [[this.canvas, this.base], [this.overCanvas, this.over]]) {
        canvas.width = this.width * ratio; canvas.height = height * ratio;
        canvas.style.width = `${this.width}px`; canvas.style.height = `${height}px`;
        context.setTransform(ratio, 0, 0, ratio, 0, 0);
      }
      if (this.feed.data) this.feed.data.image = null;
      this.clampScroll();
      this.changed();
    }
    relayout() { this.layout.arrange(this.height - S.TOP); this.resize(); this.remember(); }
    clampScroll() { this.scroll = Math.max(0, Math.min(this.layout.height - (this.height - this.body), this.scroll)); }
    scrollBy(dy) {
      const before = this.scroll;
      this.scroll += dy; this.clampScroll();
      if (this.scroll !== before) { this.paint(); this.feed.refresh(); }
      return this.scroll !== before;
    }
    revealRank(rank) {
      const row = this.layout.rows.find((r) => r.rank === rank);
      if (!row) return;
      const room = this.height - this.body;
      if (row.y < this.scroll || row.y + 60 > this.scroll + room) this.scrollBy(row.y - room / 3 - this.scroll);
    }
    ticks() {
      const { view } = this, raw = view.span / Math.max(2, (this.width - this.gutter) / 110);
      const power = 10 ** Math.floor(Math.log10(raw));
      const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw), at = [];
      for (let t = Math.ceil(view.start / step) * step; t <= view.end; t += step) at.push(t + this.shift);
      const far = Math.max(Math.abs(view.start), Math.abs(view.end));
      const units = [[1e9, "s", 1e6], [1e6, "ms", 1e3], [1e3, "µs", 0], [0, "ns", 0]]; // from which time and which step on
      const [at1, unit] = units.find(([from, , least]) => far >= from && step >= least), size = at1 || 1;
      const decimals = Math.min(9, Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9)));
      const group = (text) => {
        const [whole, part] = text.split(".");
        return whole.replace(/\B(?=(\d{3})+$)/g, "\u202f") + (part ? `.${part}` : "");
      };
      return { at, text: (t) => `${group(((t - this.shift) / size).toFixed(decimals)).replace("-", "−")} ${unit}` };
    }

    // ---- colours and text -------------------------------------------------------------------------------------------
    recolour() {
      if (!S.theme || !this.element.isConnected) return;
      const css = (name) => S.cssColour(`--ss-${name}`), dark = S.isDark();
      const names = ["card", "lane", "line", "text", "muted", "accent", "label"];
      const K = (this.colours = Object.fromEntries(names.map((name) => [name, css(name)])));
      K.grid = S.mix(K.line, K.lane, 0.6); K.step = S.mix(K.text, K.card, 0.45); K.veil = K.card + "b8"; K.dim = K.card + "8c";
      K.hit = dark ? "#ff8ad8" : "#c2187f";
      this.fills = new S.Fills(this.base, S.theme, dark, K.lane, K.card);
      this.inks = S.inks(S.theme, dark, K.lane);
      if (this.feed.data) this.feed.data.image = null;
      if (this.overview) this.overview.image = null;
      this.paint();
    }
    /** `text` cut to `room` pixels at `size`; empty where fewer than three characters fit. */
    fitted(text, room, size) {
      let width = 0;
      for (let i = 0; i < text.length; i++) {
        width += this.charWidth(text[i]) * size;
        if (width > room) {
          let keep = i, ellipsis = this.charWidth("…") * size;
          while (keep > 0 && width + ellipsis > room) { width -= this.charWidth(text[keep]) * size; keep--; }
          return keep >= 3 ? `${text.slice(0, keep + 1).trimEnd()}…` : "";
        }
      }
      return text;
    }
    charWidth(char) {
      let width = this.widths.get(char);
      if (width === undefined) {
        this.over.font = `500 100px ${S.FONT}`;
        width = this.over.measureText(char).width / 100;
        this.widths.set(char, width);
      }
      return width;
    }

    // ---- painting: at once from what is there, refined when the answer comes ----------------------------------------
    changed() { if (this.meta) { this.paint(); this.feed.refresh(); } }
    paint() {
      if (this.queued || !this.meta) return;
      this.queued = true;
      requestAnimationFrame(() => {
        this.queued = false;
        const began = performance.now();
        S.paint(this); S.paintOverlay(this);
        this.paints.push(performance.now() - began);
        if (this.paints.length > 500) this.paints.shift();
        this.lastPaint = performance.now();
      });
    }
    paintOver() { requestAnimationFrame(() => this.meta && S.paintOverlay(this)); }
    wish() {
      if (!this.meta || this.width <= this.gutter) return null;
      const { view, shift } = this, clip = (t) => Math.min(Math.max(t + shift, 0), this.meta.span_ns), half = view.span / 2;
      const room = this.height - this.body;
      const within = (margin) => [...this.layout.pinRows, ...this.layout.rowsBetween(this.scroll - margin, this.scroll + room + margin)];
      const seen = within(0).map((r) => r.track), near = within(160).map((r) => r.track);
      return {
        from: clip(view.start), to: clip(view.end), overFrom: clip(view.start - half), overTo: clip(view.end + half) + 1,
        binNs: S.binFor(1 / this.pixelsPerNs), lanes: seen, overLanes: near.slice(0, 390),
      };
    }
    settled() {
      clearTimeout(this.settling);
      this.settling = setTimeout(() => { this.remember(); this.tell("settled"); }, SETTLE);
    }

    // ---- the address bar --------------------------------------------------------------------------------------------
    state() {
      const fitted = this.view.span > this.meta.span_ns * 1.0001, L = this.layout;
      const keys = [...this.hidden].map((code) => S.theme.categories[code].key);
      return {
        t: fitted ? "" : `${Math.round(this.view.start)}-${Math.round(this.view.end)}`,
        sel: this.selected ? `${this.selected.track}.${this.selected.index}` : "",
        range: this.range ? this.range.map(Math.round).join("-") : "",
        q: this.query, off: keys.join(","), ranks: L.filter, pin: [...L.pinned].join(","),
        fold: (L.allCollapsed ? "all," : "") + [...L.collapsed].join(","), host: L.host ? "1" : "",
      };
    }
    remember() {
      if (!this.primary || !this.meta || !this.element.isConnected || this.restoring) return;
      const state = this.state(), key = JSON.stringify(state);
      if (key === this.remembered) return;
      const first = this.remembered === undefined;
      this.remembered = key;
      S.url.write({ ...S.url.read(), ...state }, !first);
    }
    restore(state) {
      const pair = (text) => {
        const m = /^(-?[\d.]+)-(-?[\d.]+)$/.exec(text || "");
        return m && Number(m[2]) > Number(m[1]) ? [Number(m[1]), Number(m[2])] : null;
      };
      const list = (text) => (text || "").split(",").filter(Boolean);
      const L = this.layout, t = pair(state.t), codes = new Map(S.theme.categories.map((c, i) => [c.key, i]));
      this.restoring = true;
      if (t) this.view.set(...t); else this.view.fit();
      this.range = pair(state.range);
      this.hidden = new Set(list(state.off).map((k) => codes.get(k)).filter((c) => c !== undefined));
      L.filter = state.ranks || ""; L.host = state.host === "1";
      L.pinned = new Set(list(state.pin).map(Number).filter(Number.isInteger));
      const fold = list(state.fold);
      if (state.fold !== undefined) {
        L.allCollapsed = fold.includes("all");
        L.collapsed = new Set(fold.filter((f) => f !== "all").map(Number));
      }
      if (this.width) this.resize();
      const chosen = /^(\d+)\.(\d+)$/.exec(state.sel || "");
      if (chosen) this.choose(Number(chosen[1]), Number(chosen[2]), false); else this.clearSelection();
      if ((state.q || "") !== this.query) this.search(state.q || "");
      this.restoring = false;
      this.remembered = JSON.stringify(this.state());
      this.tell("restored"); this.tell("range", this.range);
    }

    // ---- selection, range, search -----------------------------------------------------------------------------------
    async choose(track, index, move = true) {
      const asked = (this.asked = (this.asked || 0) + 1);
      let event;
      try { event = await S.json(`/api/event/${S.runPath(this.run)}?track=${track}&index=${index}`); } catch (error) { return; }
      if (asked === this.asked) this.select(event, move);
    }
    select(event, move) {
      this.selected = event;
      if (move) this.reveal(event.rank, event.start, event.end);
      this.paint(); this.remember(); this.tell("selected", event);
    }
    reveal(rank, start, end) {
      this.revealRank(rank);
      const { view, shift } = this, a = start - shift, b = end - shift;
      if (a >= view.start && b <= view.end) return;
      const half = Math.max(view.span, (b - a) * 1.6) / 2;
      view.set((a + b) / 2 - half, (a + b) / 2 + half);
    }
    clearSelection() { this.asked = (this.asked || 0) + 1; this.selected = null; this.paint(); this.tell("selected", null); }
    clear() { this.range = null; this.tell("range", null); this.search(""); this.clearSelection(); this.remember(); }
    setRange(range) { this.range = range; this.paint(); this.remember(); this.tell("range", range); }
    async sameName(direction) {
      const now = this.selected;
      if (!now) return;
      const next = await S.json(`/api/same/${S.runPath(this.run)}?track=${now.track}&index=${now.index}&direction=${direction}`);
      if (next) this.select(next, true);
      else this.tell("said", `no ${direction > 0 ? "later" : "earlier"} event of this name on this lane`);
    }
    neighbour(direction) { if (this.selected) this.choose(this.selected.track, this.selected.index + direction); }
    async search(text, next = false) {
      this.query = text;
      if (text.length < 2) { this.found = null; this.foundLabels = new Set(); this.paint(); this.tell("found", null); return; }
      const after = next ? `&after=${Math.round(this.selected ? this.selected.start : this.view.start + this.shift)}` : "";
      const bins = Math.max(100, Math.round(this.width - this.gutter));
      const found = await S.json(`/api/search/${S.runPath(this.run)}?q=${encodeURIComponent(text)}&bins=${bins}${after}`);
      if (this.query !== text) return;
      this.found = found; this.foundLabels = new Set(found.labels);
      this.paint(); this.remember(); this.tell("found", found);
      if (next && found.next) this.choose(...found.next);
    }
    /** Show a finding's evidence: its rank and interval, its operation when it has one. */
    async show({ rank, start, end, op }) {
      if (start !== null && end !== null) {
        const pad = Math.max((end - start) * 0.35, 2000);
        this.view.set(start - pad - this.shift, end + pad - this.shift);
        this.setRange([start, end]);
      }
      if (rank !== null) { this.layout.filter = ""; this.relayout(); this.revealRank(rank); this.tell("restored"); }
      if (rank !== null && op !== null) {
        const event = await S.json(`/api/locate/${S.runPath(this.run)}?rank=${rank}&op_id=${op}&start=${start || 0}`);
        if (event) this.select(event, start === null);
      }
    }
    showStep(step) {
      const pad = (step.end - step.start) * 0.01;
      this.view.set(step.start - pad - this.shift, step.end + pad - this.shift);
    }
    toggle(code) {
      if (this.hidden.has(code)) this.hidden.delete(code); else this.hidden.add(code);
      if (this.feed.data) this.feed.data.image = null;
      this.paint(); this.remember();
    }
    /** The view as a PNG, both canvases over each other. */
    png() {
      const out = S.make("canvas");
      out.width = this.canvas.width; out.height = this.canvas.height;
      const c = out.getContext("2d");
      c.drawImage(this.canvas, 0, 0); c.drawImage(this.overCanvas, 0, 0);
      out.toBlob((blob) => { if (blob) S.download(blob, `${this.run.replace(/[^\w.-]+/g, "-")}.png`); });
    }
  };

  S.download = function (blob, name) {
    const link = S.make("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 2000);
  };
})();
