/* The list of keys, as a dialog. */
(function () {
  "use strict";
  const S = (window.stepscope = window.stepscope || {});
  const KEYS = [
    ["Ctrl + wheel, W, S", "zoom at the cursor"],
    ["Drag, A, D, Shift + wheel", "pan"],
    ["Wheel, ↑, ↓", "scroll ranks"],
    ["Shift + drag, drag on the ruler", "select a range: sums of every term"],
    ["Click", "an operation: its parts on all ranks; a dense area: zoom in; a step's number: that step"],
    ["Click on a rank, its star", "fold it, pin it on top"],
    ["←, →", "previous, next operation on the lane (pan when none is selected)"],
    ["[, ]", "previous, next of the same name"],
    ["/", "search the whole run; Enter or N: next hit"],
    ["F, Home", "fit the selection (everything without one), the whole run"],
    ["Double click", "fit the selected operation"],
    ["Enter", "select the first operation in view"],
    ["Esc", "clear"],
  ];

  S.toggleHelp = function () {
    const open = document.querySelector("dialog.ss-help");
    if (open) { open.close(); return; }
    const rows = KEYS.map(([keys, what]) => S.make("tr", {}, S.make("th", { scope: "row" }, keys), S.make("td", {}, what)));
    const dialog = S.make("dialog", { class: "ss-help", "aria-label": "Keys" },
      S.make("h2", {}, "Keys of the timeline"), S.make("table", {}, S.make("tbody", {}, rows)),
      S.make("button", { type: "button", class: "ss-button", click: () => dialog.close() }, "Close"));
    dialog.addEventListener("close", () => dialog.remove());
    dialog.addEventListener("click", (e) => { if (e.target === dialog) dialog.close(); });
    document.body.append(dialog);
    dialog.showModal();
  };
})();
