"""vLLM serves heads trained here: the text of vLLM without policy, and the drafts of Headstart, token by token (fp32, greedy)."""

from __future__ import annotations

import pytest
from engines_alone import headstart
from trained import HEADS, trained

from headstart.serving.verify import vllm
from headstart.serving.verify.drafts import EngineSettings, acceptance
from headstart.support.errors import UserError

NEW_TOKENS = 24
REFUSED = {"mlp": r"'MLPSpeculatorPreTrainedModel'\] are not supported", "dspark": "dspark speculative decoding"}
"""Heads that vLLM 0.32's CPU build does not serve -> its words."""


@pytest.fixture(scope="session")
def plain(prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """What vLLM writes without policy."""
    return [one.written for one in vllm.serve(None, "embedded", prompts, EngineSettings(0, NEW_TOKENS))[0]]


@pytest.mark.parametrize("name", [name for name in HEADS if name not in REFUSED])
def test_vllm_drafts_what_headstart_drafts(name: str, prompts: list[list[int]], plain: list[tuple[int, ...]]) -> None:
    folder, settings = trained(name), EngineSettings(HEADS[name].depth, NEW_TOKENS)
    served, result = vllm.serve(folder, "embedded", prompts, settings)
    counters = result["counters"]
    assert result["version"].startswith("0.32.0")
    assert [one.written for one in served] == plain
    assert served == headstart(folder, "embedded", prompts, settings)
    accepted = acceptance(served)
    kept, rounds = [round(rate * counters["num_drafts"]) for rate in accepted["acceptance_rate_per_pos"]], accepted["rounds"]
    assert counters["num_drafts"] == rounds and counters["num_accepted_tokens_per_pos"] == kept
    print(f"{name}: {len(prompts)} prompts, {rounds} rounds of {settings.depth}, accepted {kept}, "
          f"mean acceptance length {accepted['mean_acceptance_length']:.3f}")  # fmt: skip
    assert kept[0], "no draft was accepted: this test compares heads that have learnt nothing"


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_refuses(name: str, prompts: list[list[int]]) -> None:
    with pytest.raises(UserError, match=REFUSED[name]):
        vllm.draft(trained(name), "embedded", prompts[:1], EngineSettings(HEADS[name].depth, 4))
