/* Below the timeline: the facts of what is selected, its parts on every rank, and the sums of a selected range. */
(function () {
  "use strict";
  const S = (window.stepscope = window.stepscope || {});
  const MAX_PARTS = 64;
  const HINT = "Click an operation for its parts on every rank. Shift+drag, or drag on the ruler, for the sums of a range. "
    + "/ searches the whole run, ? lists the keys.";

  const row = (...cells) => S.make("tr", {}, ...cells);
  const head = (...words) => S.make("thead", {}, row(...words.map((word) => S.make("th", { scope: "col" }, word))));
  const link = (text, click) => S.make("button", { class: "ss-link", type: "button", click }, text);
  const percent = (share) => `${100 * share}%`;

  /** Colour and texture of a category, as in the timeline. */
  const ink = (code) => ({ "--c": `var(--ss-c-${S.theme.categories[code].key})` });
  const texture = (code) => `ss-t-${S.theme.categories[code].texture}`;
  S.swatch = (code) => S.make("i", { class: `ss-swatch ${texture(code)}`, style: ink(code), "aria-hidden": "true" });

  /** A piece of a small bar: from `left`, `width` wide, as shares of the bar. */
  function piece(code, left, width) {
    const wide = Math.max(width > 0 ? 0.004 : 0, width);
    return S.make("i", { class: texture(code), style: { ...ink(code), left: percent(left), width: percent(wide) } });
  }
  const bar = (pieces) => S.make("td", { class: "ss-wide" }, S.make("div", { class: "ss-part-bar", "aria-hidden": "true" }, pieces));

  S.Inspector = class {
    constructor(element, timeline) {
      Object.assign(this, { element, timeline, event: null, sums: null });
      this.live = S.make("div", { class: "ss-visually-hidden", "aria-live": "polite", role: "status" });
      this.body = S.make("div", { class: "ss-inspector-body" });
      element.replaceChildren(this.live, this.body);
      timeline.on("selected", (event) => { this.event = event; this.render(); this.say(event ? this.sentence(event) : ""); });
      timeline.on("range", (range) => this.askSums(range));
      timeline.on("said", (text) => { this.say(text); timeline.tell("flash", text); });
      this.render();
    }
    say(text) { this.live.textContent = text; }
    sentence(event) {
      const what = `${event.name}, ${S.theme.categories[event.category].label}, rank ${event.rank}`;
      return event.note ? `${what}. ${S.counted(event.parts.length, "rank")}: ${event.note}.` : `${what}, ${S.duration(event.end - event.start)}.`;
    }
    async askSums(range) {
      if (!range) { this.sums = null; this.render(); return; }
      const T = this.timeline, [start, end] = range.map(Math.round);
      const ranks = T.layout.filter ? `&ranks=${S.ranges(T.layout.shownRanks().map((r) => r.rank))}` : "";
      const sums = await S.json(`/api/sums/${S.runPath(T.run)}?start=${start}&end=${end}${ranks}`);
      if (!T.range || Math.round(T.range[0]) !== start || Math.round(T.range[1]) !== end) return;
      this.sums = sums;
      this.render();
      const spoken = sums.terms.map((code, i) => `${S.theme.categories[code].label} ${sums.text[i]}`).join(", ");
      this.say(`Range of ${sums.range}, mean over ${S.counted(sums.ranks.length, "rank")}: ${spoken}`);
    }
    render() {
      const blocks = [];
      if (this.event) blocks.push(this.eventBlock(this.event));
      if (this.event && this.event.parts.length) blocks.push(this.partsBlock(this.event));
      if (this.sums) blocks.push(this.sumsBlock(this.sums));
      if (!blocks.length) blocks.push(S.make("p", { class: "ss-hint" }, HINT));
      this.body.replaceChildren(...blocks);
    }
    title(words, code, close) {
      const cross = S.make("button", { class: "ss-close", type: "button", "aria-label": "Clear", title: "Clear (Esc)", click: close }, "✕");
      return S.make("div", { class: "ss-block-head" }, code === null ? null : S.swatch(code), S.make("h3", {}, words), close ? cross : null);
    }
    eventBlock(event) {
      const category = S.theme.categories[event.category], facts = [["Term", category.label], ...event.facts];
      const rows = facts.map(([name, value]) => row(S.make("th", { scope: "row" }, name), S.make("td", {}, value)));
      const flying = (event.in_flight || []).map((one) => link(one.name, () => this.timeline.choose(one.track, one.index, false)));
      return S.make("section", { class: "ss-block", "aria-label": "Selected operation" },
        this.title(event.name, event.category, () => this.timeline.clearSelection()),
        S.make("table", { class: "ss-facts" }, S.make("tbody", {}, rows)),
        event.event ? null : S.make("p", { class: "ss-definition" }, category.definition),
        flying.length ? S.make("p", { class: "ss-definition" }, "In flight meanwhile: ", ...flying) : null);
    }
    partsBlock(event) {
      const first = Math.min(...event.parts.map((p) => p.start)), last = Math.max(...event.parts.map((p) => p.end));
      const span = Math.max(1, last - first);
      const listed = [...event.parts].sort((a, b) => b.start - a.start).slice(0, MAX_PARTS);
      const rows = listed.map((p) => S.make("tr", { class: p.rank === event.last_rank ? "ss-last" : "" },
        S.make("th", { scope: "row" }, link(`rank ${p.rank}`, () => this.timeline.revealRank(p.rank)), S.make("small", {}, ` ${p.label}`)),
        S.make("td", {}, p.wait), S.make("td", {}, p.transfer),
        bar(p.pieces.map(([code, from, to]) => piece(code, (from - first) / span, (to - from) / span))),
        S.make("td", {}, p.rank === event.last_rank ? "last" : "")));
      const more = event.parts.length - listed.length;
      return S.make("section", { class: "ss-block ss-grow", "aria-label": "Parts on all ranks" },
        this.title(`On ${S.counted(event.parts.length, "rank")}: ${event.note}`, null, null),
        S.make("div", { class: "ss-scroll" }, S.make("table", { class: "ss-parts" },
          head("Rank, latest first", "Waits", "Transfers", "", ""), S.make("tbody", {}, rows))),
        more > 0 ? S.make("p", { class: "ss-definition" }, `and ${more} more, which came earlier`) : null);
    }
    sumsBlock(sums) {
      const length = sums.end - sums.start, many = sums.ranks.length > 1;
      const rows = sums.terms.map((code, i) => {
        const share = sums.mean_ns[i] / length, values = sums.ns.map((of) => of[i]), category = S.theme.categories[code];
        return S.make("tr", { title: category.definition },
          S.make("th", { scope: "row" }, S.swatch(code), category.label),
          S.make("td", {}, sums.text[i]), S.make("td", {}, S.percent(share)), bar([piece(code, 0, share)]),
          S.make("td", {}, many ? `${S.duration(Math.min(...values), 3)} – ${S.duration(Math.max(...values), 3)}` : ""));
      });
      const of = `mean over ${S.counted(sums.ranks.length, "rank")}`;
      return S.make("section", { class: "ss-block ss-grow", "aria-label": "Sums of the selected range" },
        this.title(`Range of ${sums.range}: ${of}`, null, () => this.timeline.setRange(null)),
        S.make("table", { class: "ss-parts" }, head("Term", "Mean", "Share", "", "Over ranks"), S.make("tbody", {}, rows)));
    }
  };
})();
