"""Published models and layouts: their sizes are those published, and this machine is not asked to run them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stepscope.__main__ import status_of
from stepscope.exit_codes import ExitCode
from stepscope.parallel_runtime.config import ModelConfig, ParallelConfig, TrainConfig, check, global_batch
from stepscope.parallel_runtime.estimate import available_bytes, state_bytes, too_large, words
from stepscope.parallel_runtime.model.initial import parameter_count
from stepscope.parallel_runtime.published import APPROXIMATED, LAYOUTS, PUBLISHED, laid_out, layout, preset

PAGE = Path(__file__).resolve().parents[2] / "docs/presets.md"

TOTALS = {"llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496, "llama-3-405b": 405_853_388_800}
"""Elements of the published weights, as their index files count them."""
DEEPSEEK_TOTAL = 671_026_419_200
"""Of DeepSeek-V3's main model, 671 B, without the module for multi-token prediction."""


@pytest.mark.parametrize("name", TOTALS)
def test_llama_has_exactly_the_published_parameters(name: str) -> None:
    assert parameter_count(preset(name).model) == TOTALS[name] and name not in APPROXIMATED


def test_deepseek_differs_from_the_published_total_by_what_the_note_says_and_nothing_else() -> None:
    model = preset("deepseek-v3").model
    hidden, heads, expert = 7168, 128, 3 * 7168 * 2048
    queries = hidden * 1536 + 1536 + 1536 * heads * (128 + 64)
    keys_and_values = hidden * (512 + 64) + 512 + 512 * heads * (128 + 128)
    latent = queries + keys_and_values + heads * 128 * hidden
    plain, mixtures = 4 * hidden * hidden, 61 - 3
    offsets = mixtures * 256  # of the router's scores: a state here, a parameter there
    assert parameter_count(model) == DEEPSEEK_TOTAL + 61 * (plain - latent) - mixtures * expert - offsets
    assert abs(parameter_count(model) / DEEPSEEK_TOTAL - 1) < 0.003
    for figure in (plain, latent, expert):
        assert f"{figure / 1e6:.1f} M" in APPROXIMATED["deepseek-v3"]


GPUS_AND_SEQUENCES = {
    "nemo-8b-8": (8, 128),
    "nemo-70b-64": (64, 256),
    "nemo-405b-1024": (1024, 512),
    "meta-405b-8192": (8192, 32 * 64),
    "meta-405b-16384": (16384, 16 * 128),
    "meta-405b-128k": (16384, 16 * 8),
    "deepseek-v3-2048": (2048, 15360),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_legal_and_has_the_published_gpus_and_batch(name: str) -> None:
    chosen = layout(name)
    model, parallel, train = laid_out(
        chosen, preset(chosen.preset).model, ParallelConfig(), TrainConfig(microbatch_size=1), set()
    )
    check(model, parallel, train)
    assert (parallel.world_size, global_batch(parallel, train)) == GPUS_AND_SEQUENCES[name]
    assert state_bytes(model, parallel, train) < 80e9  # of an H100


def test_what_a_person_writes_beside_a_layout_wins() -> None:
    chosen = layout("nemo-70b-64")
    mine = laid_out(chosen, preset("tiny").model, ParallelConfig(dp=8), TrainConfig(), {"dp", "dtype"})
    assert (mine[1].dp, mine[1].tp, mine[2].dtype, mine[2].microbatches) == (8, 4, "float32", 128)


def test_the_page_shows_every_preset_and_layout_with_its_source() -> None:
    page = PAGE.read_text(encoding="utf-8")
    plain = re.sub(r"\s+", " ", page)
    for name in PUBLISHED:
        assert f"`{name}`" in page and f"{parameter_count(preset(name).model):,}" in page
    for name, chosen in LAYOUTS.items():
        assert f"`{name}`" in page and chosen.source in plain and chosen.note in plain
    assert all(words in plain for words in APPROXIMATED.values())


# -- memory ------------------------------------------------------------------------------------------------------------

TINY = ModelConfig(layers=2, hidden=8, heads=2, kv_heads=2, ffn=16, vocab=32, seq=8)


def test_model_state_by_hand() -> None:
    elements = parameter_count(TINY)
    assert elements == 2 * 32 * 8 + 2 * (4 * 64 + 3 * 128 + 16) + 8
    train = TrainConfig(dtype="bfloat16")
    assert state_bytes(TINY, ParallelConfig(), train) == elements * 16  # 2 + 2 + 8 + 4
    assert state_bytes(TINY, ParallelConfig(), replace(train, dtype="float32")) == elements * 16  # 4 + 4 + 8
    assert state_bytes(TINY, ParallelConfig(dp=2, zero=1), train) == elements * 10
    assert state_bytes(TINY, ParallelConfig(offload="cpu"), replace(train, dtype="float32")) == elements * 20
    assert state_bytes(TINY, ParallelConfig(dp=2, zero=3), train) == elements * 8
    one_stage = 32 * 8 + 4 * 64 + 3 * 128 + 16
    assert state_bytes(TINY, ParallelConfig(pp=2), train) == (one_stage + 8) * 16  # the last has a norm more
    cut, whole = elements - 5 * 8, 5 * 8
    assert state_bytes(TINY, ParallelConfig(tp=2), train) == (cut // 2 + whole) * 16


def test_experts_are_cut_over_ep_and_their_state_over_expert_dp() -> None:
    model = replace(TINY, experts=4, expert_ffn=8)
    experts, train = 2 * 4 * 3 * 64, TrainConfig(dtype="bfloat16")
    rest = parameter_count(model) - experts
    assert state_bytes(model, ParallelConfig(dp=4, ep=2), train) == (rest + experts // 2) * 16
    assert state_bytes(model, ParallelConfig(dp=4, ep=2, zero=1), train) == rest * 7 + experts // 2 * 10


def test_refused_only_beyond_what_is_free() -> None:
    assert too_large(100, 4, 400, "cpu") is None and too_large(100, 4, None, "cpu") is None
    assert too_large(10**9, 4, 10**9, "cuda") is None  # a GPU holds one rank
    said = too_large(2 * 10**9, 4, 10**9, "cpu")
    assert said is not None and "2.0 GB a rank; 4 ranks on this host that is 8.0 GB, and it has 1.0 GB free" in said
    said = too_large(2 * 10**9, 4, 10**9, "cuda")
    assert said is not None and "2.0 GB a rank; this GPU has 1.0 GB: plan with" in said
    assert words(1_500_000_000_000) == "1.5 TB" and words(12) == "12 bytes"


def test_asking_for_a_gpus_memory_opens_nothing_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mem_get_info` would open a context on GPU 0, in every rank of a node."""
    asked: list[int] = []
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: asked.append(index) or SimpleNamespace(total_memory=7)
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", None)
    assert available_bytes("cuda") == 7 and asked == [0]


def test_a_published_layout_is_refused_here_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert status_of(["run", "--layout", "meta-405b-8192", "--device", "cpu"]) == ExitCode.FAILED
    said = capsys.readouterr()
    assert "405,853,388,800 parameters" in said.out and "8192 ranks (pp 16 x dp 64" in said.out
    assert "the model state alone takes" in said.err and "--force" in said.err
    assert not list(tmp_path.iterdir())
    assert status_of(["run", "--layout", "nemo-8b-8", "--preset", "tiny"]) == ExitCode.USAGE
    assert "is one of llama-3-8b, not of tiny" in capsys.readouterr().err
