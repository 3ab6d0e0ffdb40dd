/* Which lanes are shown, where, and under which names: ranks filtered, collapsed, pinned; host rows on demand. */
(function () {
  "use strict";
  const S = (window.stepscope = window.stepscope || {});
  const HEIGHT = { account: 22, compute: 16, comm: 14, memcpy: 12, host: 13 };
  const BETWEEN_LANES = 2, BETWEEN_RANKS = 9, PAD = 6;

  /** Whether a rank matches a filter such as `0-3, 7, pp1 dp0`: commas are "or", spaces are "and". */
  S.rankMatches = function (rank, label, filter) {
    const wanted = filter.trim().toLowerCase();
    if (!wanted) return true;
    const words = new Set(label.toLowerCase().split(/\s+/));
    return wanted.split(",").filter((p) => p.trim()).some((part) => part.trim().split(/\s+/).every((word) => {
      const span = /^(?:rank)?(\d+)(?:-(\d+))?$/.exec(word);
      if (span) return rank >= Number(span[1]) && rank <= Number(span[2] === undefined ? span[1] : span[2]);
      return words.has(word) || word === "rank";
    }));
  };

  S.Layout = class {
    constructor(meta) {
      this.meta = meta;
      this.collapsed = new Set(); this.pinned = new Set();
      this.filter = ""; this.host = false; this.allCollapsed = false;
      this.rows = []; this.pinRows = []; this.height = 0; this.pinHeight = 0; this.byTrack = new Map();
    }
    isCollapsed(rank) { return this.collapsed.has(rank) !== this.allCollapsed; }
    shownRanks() {
      return this.meta.ranks.filter((r) => this.pinned.has(r.rank) || S.rankMatches(r.rank, r.label, this.filter));
    }
    /** Rows of all shown ranks; stretched up to `most` times when there is room in `available` pixels. */
    arrange(available, most = 1.5) {
      const shown = this.shownRanks();
      const plain = this._place(shown.filter((r) => !this.pinned.has(r.rank)), 1);
      const pins = this._place(shown.filter((r) => this.pinned.has(r.rank)), 1);
      const natural = plain.height + pins.height;
      const factor = Math.min(most, Math.max(1, available / Math.max(natural, 1)));
      const final = factor > 1.02 ? [this._place(shown.filter((r) => !this.pinned.has(r.rank)), factor),
        this._place(shown.filter((r) => this.pinned.has(r.rank)), factor)] : [plain, pins];
      this.natural = natural;
      this.rows = final[0].rows; this.height = final[0].height;
      this.pinRows = final[1].rows; this.pinHeight = final[1].height;
      this.byTrack = new Map([...this.rows, ...this.pinRows].map((row) => [row.track, row]));
      this.count = shown.length;
    }
    _place(ranks, factor) {
      const rows = [];
      let y = ranks.length ? PAD : 0;
      ranks.forEach((rank, i) => {
        if (i) y += BETWEEN_RANKS;
        const top = y, folded = this.isCollapsed(rank.rank);
        for (const [track, role, label] of rank.tracks) {
          if (role === "host" && !this.host) continue;
          if (folded && role !== "account") continue;
          const h = Math.floor((HEIGHT[role] || 13) * factor);
          rows.push({ track, role, label, y, h, rank: rank.rank, rankLabel: rank.label, folded, head: role === "account", top });
          y += h + BETWEEN_LANES;
        }
      });
      return { rows, height: ranks.length ? y + PAD - BETWEEN_LANES : 0 };
    }
    rowsBetween(low, high) { return this.rows.filter((row) => row.y + row.h > low && row.y < high); }
  };
})();
