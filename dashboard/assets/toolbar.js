/* Above a timeline: legend that switches categories, search, rank filter, steps, export, help. */
(function () {
  "use strict";
  const S = (window.stepscope = window.stepscope || {});

  function button(label, title, click, pressed) {
    const state = pressed === undefined ? null : String(pressed);
    return S.make("button", { type: "button", class: "ss-button", title, "aria-label": title, "aria-pressed": state, click }, label);
  }
  function input(name, type, placeholder, label) {
    return S.make("input", {
      class: `ss-input ${name}`, type, placeholder, maxlength: "200", autocomplete: "off", spellcheck: "false", "aria-label": label,
    });
  }

  S.Toolbar = class {
    constructor(element, timeline) {
      const T = (this.timeline = timeline);
      this.legend = S.make("div", { class: "ss-legend", role: "group", "aria-label": "Categories: click one to hide it" });
      this.status = S.make("span", { class: "ss-status", role: "status" });
      this.filter = input("ss-filter", "text", "Ranks: 0-3, pp1 dp0", "Show only these ranks, for example 0-3 or pp1 dp0");
      this.find = input("ss-search", "search", "Find in the whole run   /", "Find operations by name in the whole run");
      this.host = button("Host", "Show the host's rows: annotations and operators", () => this.toggleHost(), false);
      this.fold = button("Fold", "Fold every rank to its first lane", () => this.toggleFold(), false);
      const steps = S.make("span", { class: "ss-group" },
        button("‹", "Previous step", () => moveStep(T, -1)), button("›", "Next step", () => moveStep(T, 1)));
      element.replaceChildren(
        S.make("div", { class: "ss-tools-row" }, S.make("h2", {}, "Timeline"), this.legend),
        S.make("div", { class: "ss-tools-row" }, this.find, this.filter, steps,
          button("Fit", "Show the whole run (Home)", () => T.view.fit()), this.fold, this.host,
          button("PNG", "Save what is shown as a picture", () => T.png()),
          button("?", "Keys of the timeline", () => S.toggleHelp()), this.status));
      this.listen();
    }
    toggleHost() { this.timeline.layout.host = !this.timeline.layout.host; this.timeline.relayout(); this.mark(); }
    toggleFold() {
      const { layout } = this.timeline;
      layout.allCollapsed = !layout.allCollapsed;
      layout.collapsed.clear();
      this.timeline.relayout();
      this.mark();
    }
    listen() {
      const T = this.timeline;
      T.on("arrived", () => this.describe());
      T.on("found", () => this.describe());
      T.on("flash", (text) => { this.status.textContent = text; });
      T.on("restored", () => this.follow());
      this.filter.addEventListener("input", () => {
        T.layout.filter = this.filter.value;
        T.relayout();
        if (T.range) T.tell("range", T.range);
      });
      let timer;
      this.find.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => T.search(this.find.value), 180); });
      this.find.addEventListener("keydown", (e) => {
        if (e.key === "Enter") { e.preventDefault(); clearTimeout(timer); T.search(this.find.value, true); }
        if (e.key === "Escape") { this.find.value = ""; T.search(""); T.element.focus(); }
      });
      this.follow();
      this.describe();
    }
    /** Show what the timeline's state says, after the address bar or a finding has changed it. */
    follow() {
      this.filter.value = this.timeline.layout.filter;
      this.find.value = this.timeline.query;
      this.mark();
    }
    mark() {
      this.drawLegend();
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
    /** The categories that the run has; the host's only while its rows are shown. */
    drawLegend() {
      const T = this.timeline, shown = T.meta.categories.filter((code) => T.layout.host || S.theme.categories[code].key !== "host");
      this.legend.replaceChildren(...shown.map((code) => this.legendButton(S.theme.categories[code], code)));
    }
    legendButton(category, code) {
      const T = this.timeline, shown = () => String(!T.hidden.has(code));
      const click = (e) => { T.toggle(code); e.currentTarget.setAttribute("aria-pressed", shown()); };
      return S.make("button", { type: "button", class: "ss-key", "aria-pressed": shown(), title: category.definition, click },
        S.swatch(code), category.label);
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
