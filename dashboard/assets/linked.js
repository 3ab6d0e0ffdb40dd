/* Compare: several timelines on one transform, each run shifted to the start of the chosen step. */
(function () {
  "use strict";
  const S = (window.stepscope = window.stepscope || {});

  S.Linked = class {
    constructor(element) { Object.assign(this, { element, view: new S.View(), timelines: null, remembered: undefined }); }

    /** Called as each timeline is ready; begins when all are. */
    join() {
      const all = [...this.element.querySelectorAll(".ss-timeline")].map((el) => el.timeline);
      if (this.timelines || all.length < 2 || all.some((t) => !t || !t.meta)) return;
      this.timelines = all;
      this.select = S.make("select", { class: "ss-input ss-align", "aria-label": "Align both runs at the start of" });
      this.element.querySelector(".ss-tools").replaceChildren(this.tools());
      const named = (t) => t.meta.steps.map((s) => s.step);
      const shared = named(all[0]).filter((step) => all.every((t) => named(t).includes(step)));
      const choices = shared.length ? shared : named(all[0]);
      const label = (step) => (step === "all" ? "whole trace" : `step ${step}`);
      this.select.replaceChildren(...choices.map((step) => S.make("option", { value: String(step) }, label(step))));
      this.select.value = String(choices[Math.min(1, choices.length - 1)]); // the first step is often a slow one
      this.select.addEventListener("change", () => this.align(true));
      const gutter = Math.max(...all.map((t) => t.gutter)); // one transform needs one left edge
      for (const t of all) { t.gutter = gutter; t.layout.allCollapsed = true; t.resize(); t.on("settled", () => this.remember()); }
      this.align(true);
      this.restore();
    }
    tools() {
      const button = (label, title, click, pressed) => S.make("button", {
        type: "button", class: "ss-button", title, "aria-label": title, "aria-pressed": pressed, click,
      }, label);
      return S.make("div", { class: "ss-tools-row" }, S.make("h2", {}, "Timelines"),
        S.make("label", { class: "ss-of" }, "aligned at the start of ", this.select),
        button("Fit", "Show the step", () => this.align(true)),
        button("Fold", "Fold every rank to its first lane", (e) => this.fold(e.currentTarget), "true"),
        button("?", "Keys of the timelines", () => S.toggleHelp()));
    }
    align(fit) {
      const whole = (t) => ({ start: 0, end: t.meta.span_ns });
      const chosen = (t) => t.meta.steps.find((s) => String(s.step) === this.select.value) || t.meta.steps[0] || whole(t);
      const steps = this.timelines.map(chosen);
      this.timelines.forEach((t, i) => { t.shift = steps[i].start; });
      this.view.limits = [
        Math.min(...this.timelines.map((t) => -t.shift)),
        Math.max(...this.timelines.map((t) => t.meta.span_ns - t.shift)),
      ];
      if (fit) {
        const longest = Math.max(...steps.map((s) => s.end - s.start));
        this.view.set(-longest * 0.03, longest * 1.05);
      }
      this.timelines.forEach((t) => t.changed());
    }
    fold(button) {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      for (const t of this.timelines) { t.layout.allCollapsed = on; t.layout.collapsed.clear(); t.relayout(); }
    }
    remember() {
      const t = `${Math.round(this.view.start)}-${Math.round(this.view.end)}`, state = `${t}|${this.select.value}`;
      if (this.remembered === state || !this.element.isConnected) return;
      const first = this.remembered === undefined;
      this.remembered = state;
      S.url.write({ ...S.url.read(), t, align: this.select.value }, !first);
    }
    restore() {
      if (!this.timelines) return;
      const state = S.url.read(), range = /^(-?\d+)-(-?\d+)$/.exec(state.t || "");
      if (state.align && [...this.select.options].some((o) => o.value === state.align)) {
        this.select.value = state.align;
        this.align(!range);
      }
      if (range && Number(range[2]) > Number(range[1])) this.view.set(Number(range[1]), Number(range[2]));
      if (range) this.remembered = `${state.t}|${this.select.value}`;
    }
  };
})();
