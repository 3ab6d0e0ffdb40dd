/* Below the timeline: the facts of what is selected, its parts on every rank, and the sums of a selected range. */
(function () {
  "use strict";
  const S = (window.stepscope = window.stepscope || {});
  const MAX_PARTS = 64;

  S.Inspector = class {
    constructor(element, timeline) {
      Object.assign(this, { element, timeline, event: null, sums: null });
      this.live = S.make("div", { class: "ss-visually-hidden", "aria-live": "polite", role: "status" });
      this.body = S.make("div", { class: "ss-inspector-body" });
      element.replaceChildren(this.live, this.body);
      timeline.on("selected", (event) => { this.event = event; this.render(); this.say(event ? this.sentence(event) : ""); });
      timeline.on("range", (range) => this.askSums(range));
      timeline.on("said", (text) => this.say(text, true));
      this.render();
    }
    say(text, show = false) {
      this.live.textContent = text;
      if (show) { this.timeline.tell("flash", text); }
    }
    sentence(event) {
      const what = `${event.name}, ${S.theme.categories[event.category].label}, rank ${event.rank}`;
      return event.note ? `${what}. ${event.parts.length} ranks: ${event.note}.` : `${what}, ${S.duration(event.end - event.start)}.`;
    }
    async askSums(range) {
      if (!range) { this.sums = null; this.render(); return; }
      const ranks = this.timeline.layout.filter ? `&ranks=${S.ranges(this.timeline.layout.shownRanks().map((r) => r.rank))}` : "";
      const [start, end] = range.map(Math.round);
      const sums = await S.json(`/api/sums/${S.runPath(this.timeline.run)}?start=${start}&end=${end}${ranks}`);
      const now = this.timeline.range;
      if (!now || Math.round(now[0]) !== start || Math.round(now[1]) !== end) return;
      this.sums = sums;
      this.render();
      this.say(`Range of ${sums.range}, mean over ${sums.ranks.length} ranks: ` + sums.terms.map((code, i) => `${S.theme.categories[code].label} ${sums.text[i]}`).join(", "));
    }
    render() {
      const blocks = [];
      if (this.event) blocks.push(this.eventBlock(this.event));
      if (this.event && this.event.parts.length) blocks.push(this.partsBlock(this.event));
      if (this.sums) blocks.push(this.sumsBlock(this.sums));
      if (!blocks.length) blocks.push(S.make("p", { class: "ss-hint" },
        "Click an operation for its parts on every rank. Shift+drag, or drag on the ruler, for the sums of a range. / searches the whole run, ? lists the keys."));
      this.body.replaceChildren(...blocks);
    }
    head(title, code, close) {
      return S.make("div", { class: "ss-block-head" }, code === null ? null : S.swatch(code), S.make("h3", {}, title),
        S.make("button", { class: "ss-close", type: "button", "aria-label": "Clear", title: "Clear (Esc)", click: close }, "✕"));
    }
    eventBlock(event) {
      const category = S.theme.categories[event.category];
      const rows = [["Term", category.label], ...event.facts].map(([k, v]) => S.make("tr", {}, S.make("th", { scope: "row" }, k), S.make("td", {}, v)));
      const block = S.make("section", { class: "ss-block", "aria-label": "Selected operation" }, this.head(event.name, event.category, () => this.timeline.clearSelection()),
        S.make("table", { class: "ss-facts" }, S.make("tbody", {}, rows)));
      if (!event.event) block.append(S.make("p", { class: "ss-definition" }, category.definition));
      const flying = event.in_flight || [];
      if (flying.length) {
        block.append(S.make("p", { class: "ss-definition" }, "In flight meanwhile: ", ...flying.map((one) =>
          S.make("button", { class: "ss-link", type: "button", click: () => this.timeline.choose(one.track, one.index, false) }, one.name))));
      }
      return block;
    }
    partsBlock(event) {
      const parts = [...event.parts].sort((a, b) => b.start - a.start).slice(0, MAX_PARTS);
      const first = Math.min(...event.parts.map((p) => p.start)), last = Math.max(...event.parts.map((p) => p.end)), span = Math.max(1, last - first);
      const bar = (p) => S.make("div", { class: "ss-part-bar", "aria-hidden": "true" }, p.pieces.map(([code, a, b]) => S.texture(code, (a - first) / span, (b - a) / span)));
      const rows = parts.map((p) => S.make("tr", { class: p.rank === event.last_rank ? "ss-last" : "" },
        S.make("th", { scope: "row" }, S.make("button", { class: "ss-link", type: "button", click: () => this.timeline.revealRank(p.rank) }, `rank ${p.rank}`), p.label ? S.make("small", {}, ` ${p.label}`) : null),
        S.make("td", {}, p.wait), S.make("td", {}, p.transfer), S.make("td", { class: "ss-wide" }, bar(p)),
        S.make("td", {}, p.rank === event.last_rank ? "last" : "")));
      const more = event.parts.length - parts.length;
      return S.make("section", { class: "ss-block ss-grow", "aria-label": "Parts on all ranks" },
        S.make("div", { class: "ss-block-head" }, S.make("h3", {}, `On ${event.parts.length} ranks: ${event.note}`)),
        S.make("div", { class: "ss-scroll" }, S.make("table", { class: "ss-parts" },
          S.make("thead", {}, S.make("tr", {}, ...["Rank, latest first", "Waits", "Transfers", "", ""].map((h) => S.make("th", { scope: "col" }, h)))),
          S.make("tbody", {}, rows))), more > 0 ? S.make("p", { class: "ss-definition" }, `and ${more} more, which came earlier`) : null);
    }
    sumsBlock(sums) {
      const length = sums.end - sums.start, column = (i) => sums.ns.map((row) => row[i]);
      const rows = sums.terms.map((code, i) => {
        const share = sums.mean_ns[i] / length, values = column(i);
        const category = S.theme.categories[code];
        return S.make("tr", { title: category.definition }, S.make("th", { scope: "row" }, S.swatch(code), category.label), S.make("td", {}, sums.text[i]), S.make("td", {}, S.percent(share)),
          S.make("td", { class: "ss-wide" }, S.make("div", { class: "ss-part-bar", "aria-hidden": "true" }, S.texture(code, 0, share))),
          S.make("td", {}, values.length > 1 ? `${S.duration(Math.min(...values), 3)} – ${S.duration(Math.max(...values), 3)}` : ""));
      });
      return S.make("section", { class: "ss-block ss-grow", "aria-label": "Sums of the selected range" },
        this.head(`Range of ${sums.range}: mean over ${sums.ranks.length} ${sums.ranks.length === 1 ? "rank" : "ranks"}`, null, () => this.timeline.setRange(null)),
        S.make("table", { class: "ss-parts" }, S.make("thead", {}, S.make("tr", {}, ...["Term", "Mean", "Share", "", "Over ranks"].map((h) => S.make("th", { scope: "col" }, h)))), S.make("tbody", {}, rows)));
    }
  };

  /** A piece of a small bar: from `left`, `width` wide, as shares of the bar. */
  S.texture = (code, left, width) => S.make("i", { class: `ss-t-${S.theme.categories[code].texture}`, style: { "--c": `var(--ss-c-${S.theme.categories[code].key})`, left: `${100 * left}%`, width: `${Math.max(width > 0 ? 0.4 : 0, 100 * width)}%` } });
  S.swatch = (code) => S.make("i", { class: `ss-swatch ss-t-${S.theme.categories[code].texture}`, style: { "--c": `var(--ss-c-${S.theme.categories[code].key})` }, "aria-hidden": "true" });
})();
