/* Joins the page that Dash draws with the timelines: mounting, toolbar, findings, theme, linked timelines of Compare. */
(function () {
  "use strict";
  const S = (window.stepscope = window.stepscope || {});
  S.timelines = () => [...document.querySelectorAll(".ss-timeline")].map((el) => el.timeline).filter(Boolean);
  S.primary = () => S.timelines().find((t) => t.primary) || null;

  // ---- mounting: Dash puts the elements there late, and replaces them when the page changes -------------------------
  function mount() {
    if (!S.Timeline || !S.View) return;
    for (const element of document.querySelectorAll(".ss-timeline:not([data-mounted])")) {
      element.dataset.mounted = "true";
      const linked = element.closest("[data-linked]");
      const timeline = new S.Timeline(element, { run: element.dataset.run, view: linked ? sharedView(linked) : new S.View(), primary: !linked });
      element.timeline = timeline;
      const panel = element.closest(".ss-panel"), inspector = panel && panel.querySelector(".ss-inspector");
      timeline.loading.then(() => {
        if (inspector) new S.Inspector(inspector, timeline);
        const tools = !linked && panel && panel.querySelector(".ss-tools");
        if (tools) new S.Toolbar(tools, timeline);
        if (linked) align(linked); else timeline.restore(S.url.read());
      }).catch((error) => fail(element, error));
    }
  }
  function fail(element, error) {
    element.classList.add("ss-failed");
    element.textContent = `The timeline could not be loaded (${error.message}).`;
  }
  const sharedView = (linked) => linked.view || (linked.view = new S.View());

  // ---- help, findings, rows of tables -------------------------------------------------------------------------------
  const KEYS = [["Ctrl + wheel, W, S", "zoom at the cursor"], ["Drag, A, D, Shift + wheel", "pan"], ["Wheel, ↑, ↓", "scroll ranks"], ["Shift + drag, drag on the ruler", "select a range: sums of every term"],
    ["Click", "an operation: its parts on all ranks; a dense area: zoom in; a step's number: that step"], ["←, →", "previous, next operation on the lane (pan when none is selected)"], ["[, ]", "previous, next of the same name"],
    ["/", "search the whole run; Enter or N: next hit"], ["F", "fit the selection; everything when there is none"], ["Double click", "fit the selected operation"], ["Enter", "select the first operation in view"], ["Esc", "clear"]];
  S.toggleHelp = function () {
    const open = document.querySelector("dialog.ss-help");
    if (open) { open.close(); return; }
    const dialog = S.make("dialog", { class: "ss-help", "aria-label": "Keys" }, S.make("h2", {}, "Keys of the timeline"),
      S.make("table", {}, S.make("tbody", {}, KEYS.map(([k, what]) => S.make("tr", {}, S.make("th", { scope: "row" }, k), S.make("td", {}, what))))),
      S.make("button", { type: "button", class: "ss-button", click: () => dialog.close() }, "Close"));
    dialog.addEventListener("close", () => dialog.remove());
    dialog.addEventListener("click", (e) => { if (e.target === dialog) dialog.close(); });
    document.body.append(dialog);
    dialog.showModal();
  };
  const integer = (text) => (text === undefined || text === "" || text === "None" ? null : Number(text));
  document.addEventListener("click", (e) => {
    const finding = e.target.closest && e.target.closest("[data-finding]");
    if (!finding) return;
    const T = S.primary();
    if (!T || !T.meta) return;
    const { rank, start, end, op } = finding.dataset;
    document.querySelectorAll("[data-finding]").forEach((f) => f.setAttribute("aria-pressed", String(f === finding)));
    T.show({ rank: integer(rank), start: integer(start), end: integer(end), op: integer(op) });
    T.element.scrollIntoView({ block: "nearest", behavior: "smooth" });
  });
  document.addEventListener("keydown", (e) => {
    if (S.isTyping() || e.ctrlKey || e.metaKey || e.altKey) return;
    const T = S.primary() || S.timelines()[0];
    if (!T) return;
    if (e.key === "/") { const box = document.querySelector(".ss-search"); if (box) { e.preventDefault(); box.focus(); box.select(); } }
    if (e.key === "?") { e.preventDefault(); S.toggleHelp(); }
  });
  window.addEventListener("popstate", () => { const T = S.primary(); if (T && T.meta) T.restore(S.url.read()); else document.querySelectorAll("[data-linked]").forEach(restoreLinked); });

  // ---- Compare: one transform, each run shifted to the start of the chosen step -------------------------------------
  function align(linked) {
    const all = [...linked.querySelectorAll(".ss-timeline")].map((el) => el.timeline);
    if (all.length < 2 || all.some((t) => !t || !t.meta) || linked.aligned) return;
    linked.aligned = true;
    const select = S.make("select", { class: "ss-input ss-align", "aria-label": "Align both runs at the start of" });
    const row = S.make("div", { class: "ss-tools-row" }, S.make("h2", {}, "Timelines"), S.make("label", { class: "ss-of" }, "aligned at the start of ", select),
      S.make("button", { type: "button", class: "ss-button", title: "Show the step", click: () => linked.apply(true) }, "Fit"),
      S.make("button", { type: "button", class: "ss-button", "aria-pressed": "true", title: "Fold every rank to its first lane", click: (e) => fold(all, e.currentTarget) }, "Fold"), S.make("button", { type: "button", class: "ss-button", "aria-label": "Keys", click: () => S.toggleHelp() }, "?"));
    linked.querySelector(".ss-tools").replaceChildren(row);
    const shared = all[0].meta.steps.map((s) => s.step).filter((step) => all.every((t) => t.meta.steps.some((s) => s.step === step)));
    const choices = shared.length ? shared : all[0].meta.steps.map((s) => s.step);
    select.replaceChildren(...choices.map((step) => S.make("option", { value: String(step) }, step === "all" ? "whole trace" : `step ${step}`)));
    const wanted = S.url.read().align;
    select.value = choices.map(String).includes(wanted) ? wanted : String(choices[Math.min(1, choices.length - 1)]);
    select.addEventListener("change", () => apply(true));
    const view = linked.view;
    for (const t of all) { t.layout.allCollapsed = true; t.resize(); }
    const apply = (fit) => {
      const found = all.map((t) => t.meta.steps.find((s) => String(s.step) === select.value) || t.meta.steps[0] || { start: 0, end: t.meta.span_ns });
      all.forEach((t, i) => { t.shift = found[i].start; });
      view.limits = [Math.min(...all.map((t) => -t.shift)), Math.max(...all.map((t) => t.meta.span_ns - t.shift))];
      if (fit) { const longest = Math.max(...found.map((s) => s.end - s.start)); view.set(-longest * 0.03, longest * 1.05); }
      all.forEach((t) => t.changed());
    };
    linked.apply = apply;
    apply(true);
    restoreLinked(linked);
    all.forEach((t) => t.on("settled", () => rememberLinked(linked)));
  }
  function fold(all, button) {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    for (const t of all) { t.layout.allCollapsed = on; t.layout.collapsed.clear(); t.relayout(); }
  }
  function rememberLinked(linked) {
    const view = linked.view, t = `${Math.round(view.start)}-${Math.round(view.end)}`, select = linked.querySelector("select.ss-align");
    const first = linked.remembered === undefined, state = `${t}|${select.value}`;
    if (linked.remembered === state) return;
    linked.remembered = state;
    S.url.write({ ...S.url.read(), t, align: select.value }, !first);
  }
  function restoreLinked(linked) {
    if (!linked.apply) return;
    const state = S.url.read(), select = linked.querySelector("select.ss-align"), m = /^(-?\d+)-(-?\d+)$/.exec(state.t || "");
    if (state.align && [...select.options].some((o) => o.value === state.align)) { select.value = state.align; linked.apply(!m); }
    if (m && Number(m[2]) > Number(m[1])) linked.view.set(Number(m[1]), Number(m[2]));
  }

  // ---- Dash's own callbacks in the browser --------------------------------------------------------------------------
  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.stepscope = {
    theme(clicks) {
      const now = clicks ? (S.isDark() ? "light" : "dark") : S.chosenTheme || "light";
      if (clicks) { try { localStorage.setItem("stepscope-theme", now); } catch (error) { /* not kept: storage is blocked */ } }
      document.documentElement.setAttribute("data-mantine-color-scheme", now);
      return [now, now];
    },
    /** The interval that the events table is of: the selected range, else what is in view. */
    range() {
      const T = S.primary();
      if (!T || !T.meta) return null;
      const clip = (t) => Math.round(Math.min(Math.max(t, 0), T.meta.span_ns));
      const [start, end] = T.range || [T.view.start + T.shift, T.view.end + T.shift];
      return { start: clip(start), end: clip(end), at: Date.now() };
    },
    row(rows) {
      const T = S.primary(), row = rows && rows[0];
      if (T && T.meta && row && row.track !== undefined) T.choose(row.track, row.index, true);
      return window.dash_clientside.no_update;
    },
  };

  new MutationObserver(mount).observe(document.documentElement, { childList: true, subtree: true });
  document.addEventListener("DOMContentLoaded", mount);
})();
