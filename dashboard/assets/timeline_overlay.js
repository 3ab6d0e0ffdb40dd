/* What lies over the picture: the selected operation joined across its ranks, the selected range, hits, the cursor. */
(function () {
  "use strict";
  const S = (window.stepscope = window.stepscope || {});

  S.paintOverlay = function (T) {
    const o = T.over, { width: W, height: H, gutter: G, colours: K } = T;
    o.clearRect(0, 0, W, H);
    if (!T.meta || !K.card) return;
    o.save();
    o.beginPath(); o.rect(G, S.TOP, W - G, H - S.TOP); o.clip(); // partners off the screen are reached by their lines
    hits(T);
    if (T.selected) selection(T);
    o.restore();
    o.save();
    o.beginPath(); o.rect(G, S.OVERVIEW_HEIGHT, W - G, H); o.clip();
    if (T.range) range(T);
    if (T.cursor !== null && T.cursor > G) { o.fillStyle = K.accent + "99"; o.fillRect(Math.round(T.cursor), S.OVERVIEW_HEIGHT + 1, 1, H); }
    o.restore();
  };

  /** Screen y of a lane's row, null where it is not on the screen; pinned rows do not scroll. */
  S.rowTop = function (T, row) {
    const pinned = T.layout.pinned.has(row.rank);
    const body = S.TOP + T.layout.pinHeight;
    const y = pinned ? S.TOP + row.y : body + row.y - T.scroll;
    return !pinned && (y + row.h < body || y > T.height) ? null : y;
  };
  /** The same for a row that may lie above or below what is shown. */
  function anywhere(T, row) {
    const y = S.rowTop(T, row), body = S.TOP + T.layout.pinHeight;
    return y === null ? body + row.y - T.scroll : y;
  }

  function hits(T) {
    const D = T.feed.data, o = T.over;
    if (!T.found || !D || !T.foundLabels.size) return;
    const origin = T.x(D.start), scale = D.binNs * T.pixelsPerNs;
    o.strokeStyle = T.colours.hit; o.lineWidth = 1.6;
    for (const row of [...T.layout.pinRows, ...T.layout.rows]) {
      const lane = D.lanes.get(row.track), y = S.rowTop(T, row);
      if (!lane || !lane.single || y === null) continue;
      for (let j = 0; j < lane.n; j++) {
        if (!T.foundLabels.has(lane.name[j])) continue;
        const x = origin + lane.x[j] * scale;
        if (x > T.width) break;
        if (x + lane.w[j] * scale > T.gutter) o.strokeRect(x, y + 0.8, Math.max(2, lane.w[j] * scale - 0.8), row.h - 1.6);
      }
    }
  }

  function selection(T) {
    const o = T.over, K = T.colours, chosen = T.selected;
    const marks = chosen.parts.map((part) => mark(T, part)).filter(Boolean);
    if (marks.length > 1) joined(T, marks, chosen.last_rank);
    const own = T.layout.byTrack.get(chosen.track), y = own && S.rowTop(T, own);
    if (own && y !== null) {
      o.strokeStyle = K.accent; o.lineWidth = 2.2;
      o.strokeRect(T.x(chosen.start) - 1, y - 1.5, Math.max(4, T.x(chosen.end) - T.x(chosen.start) + 1.5), own.h + 3);
    }
    if (marks.length > 1) caption(T, marks, chosen);
  }

  function mark(T, part) {
    let row = T.layout.byTrack.get(part.track);
    if (!row) row = [...T.layout.rows, ...T.layout.pinRows].find((r) => r.rank === part.rank && r.head); // its rank is folded
    if (!row) return null;
    return { part, row, y: anywhere(T, row), from: clamp(T, part.start), turn: clamp(T, part.turn), to: clamp(T, part.end) };
  }
  const clamp = (T, t) => Math.max(T.gutter - 60, Math.min(T.width + 60, T.x(t)));

  /** Everything but the parts goes pale; arrivals and ends are joined, and a line marks the last arrival. */
  function joined(T, marks, lastRank) {
    const o = T.over, K = T.colours;
    marks.sort((a, b) => a.y - b.y);
    o.beginPath();
    o.rect(T.gutter, S.TOP, T.width - T.gutter, T.height - S.TOP);
    for (const m of marks) o.rect(m.from, m.y, Math.max(3, m.to - m.from), m.row.h);
    o.fillStyle = K.dim; o.fill("evenodd");
    for (const m of marks) {
      o.strokeStyle = K.text; o.lineWidth = m.part.rank === lastRank ? 2 : 1;
      o.strokeRect(m.from - 0.5, m.y - 0.5, Math.max(4, m.to - m.from + 1), m.row.h + 1);
      if (m.turn > m.from + 2 && m.turn < m.to - 2) { o.fillStyle = K.text; o.fillRect(m.turn - 0.5, m.y, 1, m.row.h); }
    }
    o.strokeStyle = K.text; o.lineWidth = 1.2; o.setLineDash([3, 3]);
    for (const key of ["from", "to"]) {
      o.beginPath();
      marks.forEach((m, i) => { if (i) o.lineTo(m[key], m.y + m.row.h / 2); else o.moveTo(m[key], m.y + m.row.h / 2); });
      o.stroke();
    }
    o.setLineDash([]);
  }

  function caption(T, marks, chosen) {
    const o = T.over, K = T.colours, last = marks.find((m) => m.part.rank === chosen.last_rank) || marks[0];
    o.font = `600 12px ${S.FONT}`;
    const w = o.measureText(chosen.note).width + 16;
    let x = last.to + 10;
    if (x + w > T.width - 8) x = Math.max(T.gutter + 6, last.from - w - 10);
    const y = Math.min(Math.max(last.y + last.row.h / 2 - 11, S.TOP + 4), T.height - 28);
    o.fillStyle = K.text; o.beginPath(); o.roundRect(x, y, w, 22, 5); o.fill();
    o.fillStyle = K.card; o.textBaseline = "middle"; o.fillText(chosen.note, x + 8, y + 11.5);
  }

  function range(T) {
    const o = T.over, K = T.colours;
    const [a, b] = [T.x(T.range[0]), T.x(T.range[1])].sort((p, q) => p - q);
    o.fillStyle = K.accent + "14"; o.fillRect(a, S.OVERVIEW_HEIGHT + 1, b - a, T.height);
    o.fillStyle = K.accent;
    o.fillRect(a, S.OVERVIEW_HEIGHT + 1, 1.5, T.height); o.fillRect(b - 1.5, S.OVERVIEW_HEIGHT + 1, 1.5, T.height);
    const text = S.duration(Math.abs(T.range[1] - T.range[0]));
    o.font = `600 11px ${S.FONT}`; o.textBaseline = "middle";
    const w = o.measureText(text).width + 10, x = Math.min(Math.max((a + b) / 2 - w / 2, T.gutter + 2), T.width - w - 2);
    o.beginPath(); o.roundRect(x, S.TOP - 19, w, 17, 4); o.fill();
    o.fillStyle = K.card; o.fillText(text, x + 5, S.TOP - 10);
  }
})();
