/* Above a timeline: legend that switches categories, rank filter, search, steps, export, help. */
(function () {
  "use strict";
  const S = (window.stepscope = window.stepscope || {});
  const ALWAYS = ["forward", "backward", "optimizer", "visible_comm", "hidden_comm", "bubble", "imbalance"];

  const button = (label, title, click, pressed) => S.make("button", { type: "button", class: "ss-button", title, "aria-label": title, "aria-pressed": pressed === undefined ? null : String(pressed), click }, label);

  S.Toolbar = class {
    constructor(element, timeline) {
      this.timeline = timeline;
      this.legend = S.make("div", { class: "ss-legend", role: "group", "aria-label": "Categories: click one to hide it" });
      this.status = S.make("span", { class: "ss-status", role: "status" });
      this.filter = S.make("input", { class: "ss-input ss-filter", type: "text", placeholder: "Ranks: 0-3, pp1 dp0", maxlength: "200", autocomplete: "off", spellcheck: "false", "aria-label": "Show only these ranks, for example 0-3 or pp1 dp0" });
      this.find = S.make("input", { class: "ss-input ss-search", type: "search", placeholder: "Find in the whole run   /", maxlength: "200", autocomplete: "off", spellcheck: "false", "aria-label": "Find operations by name in the whole run" });
      this.host = button("Host", "Show the host's rows: annotations and operators", () => { timeline.layout.host = !timeline.layout.host; timeline.relayout(); this.mark(); }, false);
      this.fold = button("Fold", "Fold every rank to its first lane", () => { timeline.layout.allCollapsed = !timeline.layout.allCollapsed; timeline.layout.collapsed.clear(); timeline.relayout(); this.mark(); }, false);
      const steps = S.make("span", { class: "ss-group" }, button("‹", "Previous step", () => moveStep(timeline, -1)), button("›", "Next step", () => moveStep(timeline, 1)));
      element.replaceChildren(
        S.make("div", { class: "ss-tools-row" }, S.make("h2", {}, "Timeline"), this.legend),
        S.make("div", { class: "ss-tools-row" }, this.find, this.filter, steps, button("Fit", "Show the whole run (Home)", () => timeline.view.fit()), this.fold, this.host, button("PNG", "Save what is shown as a picture", () => timeline.png()), button("?", "Keys of the timeline", () => S.toggleHelp()), this.status));
      this.listen();
    }
    listen() {
      const T = this.timeline;
      T.on("arrived", () => { this.describe(); this.drawLegend(); }).on("found", () => this.describe()).on("flash", (text) => { this.status.textContent = text; });
      T.on("restored", () => { this.filter.value = T.layout.filter; this.find.value = T.query; this.legendKey = ""; this.drawLegend(); this.mark(); });
      this.filter.addEventListener("input", () => { T.layout.filter = this.filter.value; T.relayout(); if (T.range) T.tell("range", T.range); });
      let timer;
      this.find.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => T.search(this.find.value), 180); });
      this.find.addEventListener("keydown", (e) => {
        if (e.key === "Enter") { e.preventDefault(); clearTimeout(timer); T.search(this.find.value, true); }
        if (e.key === "Escape") { this.find.value = ""; T.search(""); T.element.focus(); }
      });
      this.filter.value = T.layout.filter; this.find.value = T.query;
      this.mark(); this.describe(); this.drawLegend();
    }
    mark() {
      this.host.setAttribute("aria-pressed", String(this.timeline.layout.host));
      this.fold.setAttribute("aria-pressed", String(this.timeline.layout.allCollapsed));
    }
    describe() {
      const T = this.timeline, D = T.feed.data;
      if (T.found) { this.status.textContent = `${S.count(T.found.count)} found · Enter or N shows the next`; return; }
      if (!D) return;
      const merged = D.merged ? `, ${S.count(D.merged)} merged into shares of ${S.duration(D.binNs)}` : "";
      this.status.textContent = `showing ${S.count(D.single)} one by one${merged}`;
    }
    drawLegend() {
      const T = this.timeline, D = T.feed.data, present = new Set(ALWAYS);
      for (const key of this.seen || []) present.add(key);
      if (D) for (const lane of D.lanes.values()) for (const code of lane.single ? new Set(lane.category) : lane.shares.map(([c]) => c)) present.add(S.theme.categories[code].key);
      T.hidden.forEach((code) => present.add(S.theme.categories[code].key));
      present.delete("idle");
      this.seen = present;
      const key = [...present].sort().join() + [...T.hidden].join();
      if (key === this.legendKey) return;
      this.legendKey = key;
      this.legend.replaceChildren(...S.theme.categories.map((category, code) => (present.has(category.key) ? S.make("button", {
        type: "button", class: "ss-key", "aria-pressed": String(!T.hidden.has(code)), title: category.definition,
        click: (e) => { T.toggle(code); e.currentTarget.setAttribute("aria-pressed", String(!T.hidden.has(code))); },
      }, S.swatch(code), category.label) : null)).filter(Boolean));
    }
  };

  /** The step before or after the one in view fills the view; from a wider view, the one at its centre. */
  function moveStep(T, direction) {
    const steps = T.meta.steps, centre = (T.view.start + T.view.end) / 2 + T.shift;
    if (!steps.length) return;
    let at = 0;
    steps.forEach((step, i) => { if (step.start <= centre) at = i; });
    const wide = T.view.span > (steps[at].end - steps[at].start) * 1.5;
    T.showStep(steps[Math.min(steps.length - 1, Math.max(0, wide ? at : at + direction))]);
  }
})();
