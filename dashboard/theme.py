"""Colours and words: one colour, one meaning, everywhere; the definition of every term in a sentence.

A category is what one piece of the timeline is; a term is one of the six parts of a step. The colours of marks are
chosen so that they stand 3:1 against the lane they lie on and carry near-black labels at 4.5:1; a test computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.analysis.records import TERMS
from stepscope.analysis.report import view as report_words
from stepscope.analysis.report.view import LABELS


@dataclass(frozen=True)
class Category:
    """One meaning: its key, what a person reads, its colour in each theme, its texture and its definition.

    `texture`: solid, diagonal (a wait), stripes (hidden under compute) or outline; colour is never the only sign.
    """

    key: str
    label: str
    light: str
    dark: str
    texture: str
    definition: str


_WORDS = {
    **LABELS,
    "bubble": "bubble",
    "memcpy": "memory copy",
    "hidden_comm": "hidden communication",
    "hidden_wait": "hidden wait",
    "outside": "outside steps",
    "host": "host",
}

DEFINITIONS = {
    **report_words.DEFINITIONS,
    "step": "From the start of one step to the start of the next, of one rank: the six terms add up to it exactly.",
    "outside": "In flight outside every step's window: in no term.",
    "host": "Annotations, CPU operators and runtime calls: in no term.",
}
"""Of every term, figure and category, one sentence; the same words as in the terminal and the HTML report."""


def _category(key: str, light: str, dark: str, texture: str) -> Category:
    return Category(key, _WORDS[key], light, dark, texture, DEFINITIONS[key])


CATEGORIES = (
    _category("forward", "#3b82f6", "#5b9df8", "solid"),
    _category("backward", "#0f9d8f", "#2bc4b0", "solid"),
    _category("weight_grad", "#4f9a3f", "#7cc66a", "solid"),
    _category("recompute", "#1592c2", "#45b8e6", "solid"),
    _category("optimizer", "#9b6cf0", "#b18cf5", "solid"),
    _category("compute", "#6584cf", "#8ea7e6", "solid"),
    _category("visible_comm", "#c47a00", "#f2b134", "solid"),
    _category("hidden_comm", "#c47a00", "#f2b134", "stripes"),
    _category("bubble", "#74808f", "#9aa5b5", "diagonal"),
    _category("imbalance", "#e5484d", "#f2676b", "diagonal"),
    _category("hidden_wait", "#8c7a52", "#b9a675", "outline"),
    _category("memcpy", "#a8733d", "#c8935a", "solid"),
    _category("idle", "#74808f", "#9aa5b5", "outline"),
    _category("outside", "#74808f", "#9aa5b5", "outline"),
    _category("host", "#6f8776", "#9db3a3", "solid"),
)
CODE = {category.key: code for code, category in enumerate(CATEGORIES)}
BY_KEY = {category.key: category for category in CATEGORIES}

STACK_ORDER = (
    "forward",
    "recompute",
    "backward",
    "weight_grad",
    "optimizer",
    "compute",
    "host",
    "memcpy",
    "visible_comm",
    "hidden_comm",
    "imbalance",
    "bubble",
    "hidden_wait",
    "outside",
)
"""From the bottom of a bin upwards."""

TERM_LABEL = {term: BY_KEY[term].label for term in TERMS}


@dataclass(frozen=True)
class Surface:
    """The colours of one theme that carry no meaning of their own."""

    page: str
    card: str
    lane: str
    line: str
    text: str
    muted: str
    accent: str
    label: str  # text on a mark


SURFACES = {
    "light": Surface("#f5f6f8", "#ffffff", "#f4f6f9", "#dfe3ea", "#131a24", "#5a6576", "#1d5fd0", "#0a1019"),
    "dark": Surface("#0e1116", "#161a21", "#1b2029", "#2b323d", "#e7ebf1", "#98a3b3", "#79b0ff", "#0a1019"),
}


def colour(key: str, theme: str) -> str:
    """Colour of a category in a theme (`light` or `dark`)."""
    category = BY_KEY[key]
    return category.dark if theme == "dark" else category.light


def luminance(hexadecimal: str) -> float:
    """Relative luminance of `#rrggbb` (WCAG 2.2)."""
    channels = [int(hexadecimal[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2.2)."""
    a, b = sorted((luminance(one), luminance(other)))
    return (b + 0.05) / (a + 0.05)


def for_browser() -> dict[str, object]:
    """What the timeline needs to know of categories, in the order of their codes."""
    return {
        "categories": [
            {
                "key": c.key,
                "label": c.label,
                "light": c.light,
                "dark": c.dark,
                "texture": c.texture,
                "definition": c.definition,
            }
            for c in CATEGORIES
        ],
        "stack": [CODE[key] for key in STACK_ORDER],
        "terms": [CODE[term] for term in TERMS],
    }
