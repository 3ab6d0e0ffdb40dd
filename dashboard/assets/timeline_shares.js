/* Dense lanes: one pixel column a bin, stacked shares of the categories from the bottom, idle left empty on top. */
(function () {
  "use strict";
  const S = (window.stepscope = window.stepscope || {});

  /** Rows of each category in a column of `height`: at least one for any share above nothing, `height` at most. */
  S.stackColumn = function (parts, height, out) {
    let sum = 0, used = 0, largest = 0;
    for (let i = 0; i < parts.length; i++) {
      const share = parts[i];
      sum += share;
      out[i] = share ? Math.max(1, Math.round(share * height / 255)) : 0;
      used += out[i];
      if (share > parts[largest]) largest = i;
    }
    const wanted = Math.min(height, Math.max(Math.round(sum * height / 255), sum ? 1 : 0));
    let excess = used - Math.max(wanted, parts.reduce((n, p) => n + (p ? 1 : 0), 0));
    if (used > height) excess = Math.max(excess, used - height);
    if (excess > 0) out[largest] = Math.max(1, out[largest] - excess);
    else if (sum && used < wanted) out[largest] += wanted - used;
    return out;
  };

  const pack = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0;

  /** Per category its full and its tint colour over the lane, as little-endian RGBA words. */
  S.inks = function (theme, dark, lane) {
    return theme.categories.map((c) => {
      const full = dark ? c.dark : c.light;
      const tint = c.texture === "stripes" ? 0.35 : 0.26;
      return { texture: c.texture, full: pack(S.rgb(full)), tint: pack(S.rgb(S.mix(full, lane, tint))) };
    });
  };

  function inkAt(ink, column, y) {
    switch (ink.texture) {
      case "diagonal": return (column + y) % 6 < 2 ? ink.full : ink.tint;
      case "stripes": return y % 4 < 2 ? ink.full : ink.tint;
      case "outline": return ink.tint;
      default: return ink.full;
    }
  }

  /** One image of all dense lanes of a view, each at its row's height; fills `lane.imageY`. */
  S.sharesImage = function (D, rowOf, inks, order, hidden) {
    const lanes = [...D.lanes.values()].filter((lane) => !lane.single && rowOf(lane.id));
    let height = 0;
    for (const lane of lanes) { lane.imageY = height; lane.imageH = Math.max(2, rowOf(lane.id).h); height += lane.imageH; }
    if (!height) return null;
    const image = new ImageData(D.bins, height), pixels = new Uint32Array(image.data.buffer);
    const phase = ((D.firstBin % 6) + 6) % 6;
    for (const lane of lanes) {
      const shares = order.map((code) => lane.shares.find(([c]) => c === code)).filter(Boolean)
        .filter(([code]) => !hidden.has(code));
      const codes = shares.map(([code]) => inks[code]), parts = new Uint8Array(shares.length);
      const tall = new Array(shares.length).fill(0), H = lane.imageH, bottom = lane.imageY + H - 1;
      for (let p = 0; p < D.bins; p++) {
        let any = false;
        for (let i = 0; i < shares.length; i++) { parts[i] = shares[i][1][p]; any = any || parts[i] > 0; }
        if (!any) continue;
        S.stackColumn(parts, H, tall);
        let y = 0;
        for (let i = 0; i < shares.length; i++) {
          const until = Math.min(H, y + tall[i]);
          for (; y < until; y++) pixels[(bottom - y) * D.bins + p] = inkAt(codes[i], p + phase, y);
        }
      }
    }
    const canvas = document.createElement("canvas");
    canvas.width = D.bins; canvas.height = height;
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  };

  /** The overview: a row a rank (or a few ranks), each bin the blend of its shares: nothing is drawn as dominant. */
  S.overviewImage = function (O, theme, dark, lane) {
    const colours = theme.categories.map((c) => S.rgb(dark ? c.dark : c.light));
    const [r0, g0, b0] = S.rgb(lane);
    const image = new ImageData(O.bins, Math.max(1, O.rows.length));
    O.rows.forEach((row, y) => {
      for (let p = 0; p < O.bins; p++) {
        let r = 0, g = 0, b = 0, sum = 0;
        for (const [code, shares] of row) {
          const weight = theme.categories[code].key === "bubble" ? shares[p] * 0.45 : shares[p];
          if (!weight) continue;
          const [cr, cg, cb] = colours[code];
          r += cr * weight; g += cg * weight; b += cb * weight; sum += weight;
        }
        const rest = Math.max(0, 255 - sum), total = sum + rest, at = 4 * (y * O.bins + p);
        image.data[at] = (r + r0 * rest) / total; image.data[at + 1] = (g + g0 * rest) / total;
        image.data[at + 2] = (b + b0 * rest) / total; image.data[at + 3] = 255;
      }
    });
    const canvas = document.createElement("canvas");
    canvas.width = O.bins; canvas.height = Math.max(1, O.rows.length);
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  };
})();
