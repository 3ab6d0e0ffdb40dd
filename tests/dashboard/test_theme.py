"""Colours that can be told from their ground, labels that can be read, one meaning a colour."""

from __future__ import annotations

import itertools

import pytest

from stepscope.dashboard import theme
from stepscope.dashboard.app import theme_css


def test_contrast_by_hand():
    assert theme.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert theme.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_marks_and_text_stand_out(mode: str):
    surface = theme.SURFACES[mode]
    for category in theme.CATEGORIES:
        mark = theme.colour(category.key, mode)
        for ground in (surface.lane, surface.card):
            assert theme.contrast(mark, ground) >= 3, (category.key, ground)
        assert theme.contrast(surface.label, mark) >= 4.5, category.key
    for ground in (surface.page, surface.card, surface.lane):
        for text in (surface.text, surface.muted, surface.accent):
            assert theme.contrast(text, ground) >= 4.5, (text, ground)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_a_colour_means_one_thing_unless_its_texture_differs(mode: str):
    for one, other in itertools.combinations(theme.CATEGORIES, 2):
        same = theme.colour(one.key, mode) == theme.colour(other.key, mode)
        assert not same or one.texture != other.texture or {one.key, other.key} == {"idle", "outside"}


def test_waits_are_hatched_and_hidden_is_told_from_visible():
    texture = {c.key: c.texture for c in theme.CATEGORIES}
    assert texture["bubble"] == texture["imbalance"] == "diagonal"
    assert texture["hidden_comm"] != texture["visible_comm"]


def test_every_category_is_stacked_and_defined():
    assert set(theme.STACK_ORDER) | {"idle"} == {c.key for c in theme.CATEGORIES}
    assert all(c.definition.endswith(".") for c in theme.CATEGORIES)
    assert all(f"--ss-c-{c.key}:" in theme_css() for c in theme.CATEGORIES)
