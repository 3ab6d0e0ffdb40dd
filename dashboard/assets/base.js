/* Shared by every script of the dashboard: units, text-only DOM, theme, the address bar. No dependency. */
(function () {
  "use strict";
  const S = (window.stepscope = window.stepscope || {});

  // ---- numbers: the same rules as analysis/units.py -----------------------------------------------------------------
  function significant(value, digits) {
    if (value === 0) return "0";
    const decimals = digits - 1 - Math.floor(Math.log10(Math.abs(value)));
    const unit = 10 ** -decimals;
    let text = decimals >= 0 ? value.toFixed(Math.min(decimals, 12)) : String(Math.round(value / unit) * unit);
    if (text.includes(".")) text = text.replace(/0+$/, "").replace(/\.$/, "");
    return text;
  }
  const TIME = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
  S.significant = significant;
  S.duration = function (ns, digits = 4) {
    if (ns === null || ns === undefined || !Number.isFinite(ns)) return "–";
    const shown = Math.abs(Number(significant(ns, digits)));
    const [size, unit] = TIME.find(([s]) => shown >= s) || TIME[3];
    return `${significant(ns / size, digits)} ${unit}`;
  };
  S.percent = function (share) {
    if (!Number.isFinite(share)) return "–";
    const text = (100 * share).toFixed(1);
    return share > 0 && text === "0.0" ? "<0.1 %" : `${text} %`;
  };
  S.counted = (n, one) => `${n} ${one}${n === 1 ? "" : "s"}`;
  S.count = (n) => n.toLocaleString("en-US").replace(/,/g, "\u202f");

  // ---- DOM: text is only ever set as text ---------------------------------------------------------------------------
  S.make = function (tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "class") element.className = value;
      else if (key === "click") element.addEventListener("click", value);
      else if (key === "style") Object.entries(value).forEach(([name, v]) => element.style.setProperty(name, v));
      else if (value !== null && value !== undefined) element.setAttribute(key, value);
    }
    for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
    return element;
  };
  S.isTyping = () => /^(INPUT|TEXTAREA|SELECT)$/.test((document.activeElement || {}).tagName || "");

  // ---- theme --------------------------------------------------------------------------------------------------------
  S.isDark = () => document.documentElement.getAttribute("data-mantine-color-scheme") === "dark";
  S.cssColour = function (name) {
    const value = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    return value.length === 4 ? "#" + [...value.slice(1)].map((c) => c + c).join("") : value; // '#fff' + '99' is no colour
  };
  S.mix = function (over, under, share) {
    const part = (hex, i) => parseInt(hex.slice(i, i + 2), 16);
    const one = (i) => Math.round(part(over, i) * share + part(under, i) * (1 - share));
    return "#" + [1, 3, 5].map((i) => one(i).toString(16).padStart(2, "0")).join("");
  };
  S.rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  S.themed = new Set(); // functions called when the colours change
  new MutationObserver(() => S.themed.forEach((f) => f())).observe(document.documentElement, {
    attributes: true, attributeFilter: ["data-mantine-color-scheme"],
  });

  // ---- address bar: the fragment holds the view ---------------------------------------------------------------------
  S.url = {
    read() {
      const state = {};
      for (const part of location.hash.replace(/^#/, "").split("&")) {
        const at = part.indexOf("=");
        if (at > 0) {
          try { state[part.slice(0, at)] = decodeURIComponent(part.slice(at + 1)); } catch (error) { /* a broken escape */ }
        }
      }
      return state;
    },
    write(state, push) {
      const parts = Object.entries(state).filter(([, v]) => v !== "" && v !== null && v !== undefined)
        .map(([k, v]) => `${k}=${encodeURIComponent(v).replace(/%2C/g, ",")}`);
      const hash = parts.length ? "#" + parts.join("&") : "";
      if (hash === location.hash) return;
      const address = location.pathname + location.search + hash;
      history[push ? "pushState" : "replaceState"](history.state, "", address);
    },
  };

  S.json = async function (path) {
    const response = await fetch(path, { credentials: "same-origin" });
    if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
    return response.json();
  };
  S.runPath = (id) => id.split("/").map(encodeURIComponent).join("/");
  S.theme = null; // categories, asked once
  S.ready = S.json("/api/theme").then((theme) => (S.theme = theme));
})();
