/* The timeline's data: the binary format, one request in flight with the latest wish winning, what is in view. */
(function () {
  "use strict";
  const S = (window.stepscope = window.stepscope || {});
  const EVENTS = 0;

  /** The message of level_of_detail.pack_view as typed arrays over the one buffer. */
  S.parseView = function (buffer) {
    const length = new DataView(buffer).getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    const base = 4 + length;
    const lanes = new Map();
    for (const [id, mode, n, first, ...rest] of header.tracks) {
      if (mode === EVENTS) {
        const [x, w, category, name] = rest;
        lanes.set(id, {
          id, single: true, n, first,
          x: new Float32Array(buffer, base + x, n), w: new Float32Array(buffer, base + w, n),
          category: new Uint8Array(buffer, base + category, n), name: new Uint32Array(buffer, base + name, n),
        });
      } else {
        const shares = rest[0].map(([category, offset]) => [category, new Uint8Array(buffer, base + offset, header.bins)]);
        lanes.set(id, { id, single: false, n, first, shares });
      }
    }
    return {
      lanes, names: header.names, bins: header.bins, binNs: header.bin_ns, single: header.single, merged: header.merged,
      start: header.first_bin * header.bin_ns, end: (header.first_bin + header.bins) * header.bin_ns,
      firstBin: header.first_bin, bytes: buffer.byteLength, image: null,
      hasShares: [...lanes.values()].some((lane) => !lane.single),
    };
  };

  S.parseOverview = function (buffer) {
    const length = new DataView(buffer).getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    const rows = header.rows.map((row) => row.map(([c, offset]) => [c, new Uint8Array(buffer, 4 + length + offset, header.bins)]));
    return { bins: header.bins, rows, image: null };
  };

  /** `3-9,12` of ascending numbers. */
  S.ranges = function (ids) {
    const parts = [];
    for (let i = 0; i < ids.length; i++) {
      let j = i;
      while (j + 1 < ids.length && ids[j + 1] === ids[j] + 1) j++;
      parts.push(i === j ? String(ids[i]) : `${ids[i]}-${ids[j]}`);
      i = j;
    }
    return parts.join(",");
  };

  /** Bins lie on an absolute power-of-two grid, about one a pixel. */
  S.binFor = (nsPerPixel) => Math.max(1, 2 ** Math.round(Math.log2(Math.max(nsPerPixel, 1e-9))));

  /** One transform for one or more timelines: [start, end) in ns; listeners are told of every change. */
  S.View = class {
    constructor() { this.start = 0; this.end = 1; this.limits = [0, 1]; this.listeners = new Set(); }
    get span() { return this.end - this.start; }
    set(start, end) {
      const [low, high] = this.limits, most = (high - low) * 1.04, margin = (high - low) * 0.02;
      const span = Math.min(Math.max(end - start, 40), most);
      let from = span === end - start ? start : (start + end - span) / 2;
      from = Math.min(Math.max(from, low - margin), high + margin - span);
      if (from === this.start && from + span === this.end) return;
      this.start = from; this.end = from + span;
      this.listeners.forEach((f) => f());
    }
    zoom(factor, at) { // around the instant `at`
      const [low, high] = this.limits;
      const span = Math.min(Math.max(this.span * factor, 40), (high - low) * 1.04);
      const share = (at - this.start) / this.span;
      this.set(at - span * share, at - span * share + span);
    }
    pan(ns) { this.set(this.start + ns, this.end + ns); }
    fit() { const [low, high] = this.limits, pad = (high - low) * 0.004; this.set(low - pad, high + pad); }
  };

  /** Fetches what a timeline shows. `wish()` says what is wanted now; `arrived()` is called after each answer. */
  S.Feed = class {
    constructor(run, wish, arrived, settled) {
      Object.assign(this, { run, wish, arrived, settled, data: null, busy: false, again: false, failed: "", fetches: 0 });
      this.labels = new Map();
    }
    covers(wanted) {
      const D = this.data;
      if (!D || D.start > wanted.from || D.end < wanted.to || D.epoch !== wanted.epoch) return false;
      const sharp = D.binNs === wanted.binNs || (!D.hasShares && D.binNs < 2 * wanted.binNs);
      return sharp && wanted.lanes.every((id) => D.lanes.has(id));
    }
    /** Ask for what is in view unless it is there; while a request runs, only remember to look again. */
    refresh() {
      const wanted = this.wish();
      if (!wanted) return;
      if (!wanted.overLanes.length || this.covers(wanted)) { this.settled(); return; }
      if (this.busy) { this.again = true; return; }
      this.busy = true;
      this.fetches += 1;
      const { binNs } = wanted;
      const first = Math.floor(wanted.overFrom / binNs / 128) * 128;
      const last = Math.ceil(wanted.overTo / binNs / 128) * 128;
      const lanes = S.ranges([...wanted.overLanes].sort((a, b) => a - b));
      const path = `/api/view/${S.runPath(this.run)}?first=${first}&bins=${last - first}&bin_ns=${binNs}&lanes=${lanes}`;
      fetch(path, { credentials: "same-origin" })
        .then((response) => { if (!response.ok) throw new Error(String(response.status)); return response.arrayBuffer(); })
        .then((buffer) => {
          this.data = S.parseView(buffer);
          this.data.epoch = wanted.epoch;
          for (const [id, text] of Object.entries(this.data.names)) this.labels.set(Number(id), text);
          this.failed = "";
          this.arrived();
        })
        .catch((error) => { this.failed = error.message; this.again = false; this.arrived(); })
        .finally(() => {
          this.busy = false;
          if (this.again) { this.again = false; this.refresh(); } else this.settled();
        });
    }
  };
})();
