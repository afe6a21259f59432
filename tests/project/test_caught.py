"""Faults that the tests must catch: each is put into a copy of the tree, where the tests named beside it must fail (``make test-all``).

The faults were chosen, over all rooms, before it was known what catches them; then the cheapest tests were named.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from structure import ROOT


class Fault(NamedTuple):
    name: str
    file: str
    right: str
    wrong: str
    tests: str
    """Files or tests, below tests/."""


FAULTS = (
    # attention, noise, verification, KV
    Fault("tree mask off by one", "heads/layers/ragged_cache.py", "torch.arange(1, slots + 1,",
          "torch.arange(slots,", "inference/test_cache.py"),
    Fault("a sibling's child is accepted", "inference/engine/tree.py",
          "parents[node] == path[-1] and", "parents[node] <= path[-1] and", "inference/test_tree.py"),
    Fault("noise of another position", "inference/engine/noise.py",
          "return self.block_BPV[:, offsets[0] : offsets[0] + count]", "return self.block_BPV[:, :count]", "inference/test_law.py"),
    Fault("noise is subtracted", "inference/engine/tree.py", "else scores + noise", "else scores - noise", "inference/test_law.py"),
    Fault("paths move as the first does", "heads/layers/ragged_cache.py", "if any(path != list(range(len(path))) for path in paths):",
          "if paths[0] != [*range(len(paths[0]))]:", "inference/test_cache.py"),
    Fault("lengths of the wrong rows", "heads/layers/ragged_cache.py",
          "[self._lengths[row] for row in rows], [self.offsets", "self._lengths[: len(rows)], [self.offsets", "inference/test_cache.py"),
    Fault("a ring forgets its sink", "heads/layers/draft_cache.py",
          "return torch.where(slots_S < sink, slots_S, positions_BS)", "return positions_BS", "heads/test_window.py"),
    # the objective, data, the run
    Fault("the teacher is a token late", "training/objective/loss_rows.py",
          "LossRows(features.hidden_BTD[at]", "LossRows(features.hidden_BTD[at[0], at[1] + 1]", "training/test_objective.py"),
    Fault("the loss mask is a token late", "training/objective/loss_rows.py",
          "(document_BT >= 0))[:, 1:]", "(document_BT >= 0))[:, :-1]", "training/test_objective.py"),
    Fault("micro-batches divide by the first one's labels", "training/loop.py",
          "torch.stack(by_batch).sum()", "by_batch[0]", "training/test_loop.py"),
    Fault("packed documents see each other", "heads/layers/causal_attention.py",
          "(document_BT[:, :, None] == document_BT[:, None, :]) & (distance_TT >= 0)",
          "(distance_TT >= 0).expand(len(document_BT), -1, -1)", "training/data/test_packing.py"),
    Fault("each epoch in the same order", "training/data/batches.py",
          'Random(f"{seed}/{epoch}")', 'Random(f"{seed}")', "training/data/test_data.py"),
    Fault("moments are lost on resuming", "training/run/checkpoint.py",
          '{"state": state, "param_groups"', '{"state": {}, "param_groups"', "training/test_resume.py"),
    Fault("warm-up a step late", "training/run/optimizer.py",
          "train.peak_lr * step / warmup", "train.peak_lr * (step - 1) / warmup", "training/test_optimizer.py"),
    Fault("cached states in half as many steps", "training/features/codec.py", "amax(1) / 127)", "amax(1) / 63)", "training/test_codec.py"),
    Fault("all turns have one seed", "training/regenerate/items.py",
          "_hashed(seed, self.key, self.turns) >> 1", "_hashed(seed, self.key) >> 1", "training/data/test_regenerate.py"),
    Fault("the end of an answer is no label", "headstart/chat/answer.py",
          "return None if end is None else end + 1", "return end", "training/data/test_conversation.py"),
    # checkpoints and layouts
    Fault("tensors of a checkpoint renamed", "heads/medusa.py",
          'name.removeprefix("heads."): tensor', "name: tensor", "heads/test_checkpoint.py"),
    Fault("draft tokens off by one", "heads/own_readout.py", "self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))",
          "self.d2t.copy_(tokens - torch.arange(1, 1 + len(tokens), device=tokens.device))", "heads/test_checkpoint.py"),
    Fault("exported taps counted from 1", "heads/block.py",
          '"target_layer_ids": [tap - 1 for tap in self.taps]', '"target_layer_ids": list(self.taps)', "serving/test_export.py"),
    Fault("imported taps counted the other way", "headstart/serving/layouts/eagle3.py",
          '(way == "layer") for i', '(way == "hs") for i', "serving/test_import.py"),
    Fault("verify compares tokens alone", "headstart/serving/export.py",
          "return self.equal == self.drafts and self.distance <= TOLERANCE", "return self.equal == self.drafts", "serving/test_verify.py"),
    Fault("GGUF's pattern of layers shifted", "heads/backbone/gguf_config.py",
          "(layer + 1) % value != 0", "layer % value != 0", "heads/test_gguf_config.py"),
    Fault("another adapter is taken", "heads/backbone/backbone.py",
          "!= digest and not allow_other", "!= digest and digest is None", "training/test_adapter.py"),
    Fault("the probe's neighbours are quiet", "heads/backbone/hooks.py",
          "ROWS, LOUD = 8, 1000.0", "ROWS, LOUD = 8, 0.0", "heads/test_dependence.py"),
    # what is drafted, captures, other ways to decode
    Fault("acceptance learned a depth too deep", "inference/engine/acceptance.py",
          "depth, table = pool.levels[parent],", "depth, table = pool.levels[node],", "inference/test_adaptive.py"),
    Fault("a tree's last node is not counted", "inference/engine/acceptance.py",
          "row[min(nodes, len(row)) - 1]", "row[max(min(nodes, len(row)) - 2, 0)]", "inference/test_speculation.py"),
    Fault("the last time, not a low one", "inference/latency.py",
          "sorted(self.times)[len(self.times) // LOW]", "self.times[-1]", "inference/test_speculation.py"),
    Fault("a suffix is not split", "inference/engine/suffix.py",
          "known = self._clone(state, token, known)", "pass", "inference/test_suffix.py"),
    Fault("captures are not compared", "inference/capture/cuda_graph.py",
          "if not all_nearly_equal(self.results, expected):", "if not expected:", "inference/test_cuda_graph.py"),
    Fault("a row's own criteria are not asked", "inference/engine/texts.py", "if not self.request.in_steps and self.request.criteria:",
          "if self.request.in_steps and self.request.criteria:", "inference/test_users_objects.py inference/test_generate.py"),
    Fault("a beam's length penalty", "inference/beam/search.py",
          "*(rules.beams, self.length, self.prompt, penalty, early)", "*(rules.beams, self.length + 1, self.prompt, penalty, early)",
          "inference/test_beam.py"),
    # what users read
    Fault("a bound of recipes is not said", "headstart/support/config.py",
          "if isinstance(rule, Le)]", "if isinstance(rule, Lt)]", "headstart/test_config.py"),
    Fault("a full disk is unforeseen", "headstart/cli/main.py",
          "FULL = (errno.ENOSPC,", "FULL = (errno.EIO,", "headstart/test_failures.py"),
    Fault("a user's mistake ends as another", "headstart/cli/main.py",
          "self.status = report(str(error), USER)", "self.status = report(str(error), UNFORESEEN)", "headstart/test_failures.py"),
)  # fmt: skip


def test_the_faults_can_be_put_in() -> None:
    for fault in FAULTS:
        assert (ROOT / fault.file).read_text().count(fault.right) == 1, fault.name
        assert all((ROOT / "tests" / test.partition("::")[0]).is_file() for test in fault.tests.split()), fault.name


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("copy") / "tree"
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(ROOT / name):
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    return copy


@pytest.fixture
def faulty(copy: Path, fault: Fault) -> Iterator[Path]:
    file = copy / fault.file
    right = file.read_text()
    file.write_text(right.replace(fault.right, fault.wrong))
    yield copy
    file.write_text(right)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: re.sub(r"\W+", "-", fault.name))
def test_faults_are_caught(faulty: Path, fault: Fault) -> None:
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider"]
    command += [f"tests/{test}" for test in fault.tests.split()]
    done = subprocess.run(command, cwd=faulty, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout[-2000:]  # 1: tests ran, and some failed
