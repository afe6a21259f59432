"""`headstart push`: the model card states what is known and measured, names no path of this machine, and every fault is one line."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from errors import error_of, output_of
from families import random_drafter, tiny
from huggingface_hub import repocard
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, LocalTokenNotFoundError, OfflineModeIsEnabled
from ruamel.yaml import YAML
from safetensors.torch import load_file

import headstart.support.hub as hub
from headstart.cli.main import main
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.checkpoint import read_metadata
from headstart.serving import model_card
from headstart.serving.model_card import last_part
from headstart.support.files import file_hash

SECRET = "/home/someone/secret"
EVAL = {"prompts": 8, "max_new_tokens": 64, "temperature": 0.7, "nodes": 24, "width": 8}


def provenance(**changes: Any) -> dict[str, Any]:
    data = {"train": f"{SECRET}/answers.jsonl", "chat_template": None}
    recipe = {"data": data, "eval": EVAL, "save": {"dir": f"{SECRET}/out"}, "regenerate": {"endpoint": "http://host.internal:8000/v1"}}
    command = f"train_heads.py {SECRET}/eagle3.yaml data.train={SECRET}/answers.jsonl"
    return {"recipe": recipe, "command": command, "steps": 50, "tokens": 1000, "tau": None, "versions": {"headstart": "0.1.0"}} | changes


def save(folder: Path, kind: str = "eagle3", **changes: Any) -> Path:
    on = Backbone(tiny("llama"))
    on.model.config.name_or_path = f"{SECRET}/tiny-llama"
    random_drafter(kind, on).save_pretrained(folder, extra=provenance(**changes))
    (folder / "state").mkdir()
    (folder / "state" / "huge.bin").write_text("state")
    (folder / "report.html").write_text(SECRET)
    return folder


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("run") / "eagle3")


def card(folder: Path) -> tuple[dict[str, Any], str]:
    _, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    return YAML(typ="safe").load(metadata), text


def bench_report(head: str, **changes: Any) -> dict[str, Any]:
    one = {"tau": 2.356, "acceptance_per_depth": [0.8, 0.5], "mean_acceptance_length": 2.41, "speedup_vs_ar": 1.62}
    row = one | {"head": head, "temperature": 0.0, "batch": 1, "nodes": None, "width": None, "depth": 4, "prompts_differing": 0}
    fixed = row | {"head": f"{head}, fixed trees", "temperature": 1.0, "nodes": 5, "width": 1, "tasks": {"math": one}}
    report = {
        "versions": {"headstart": "0.1.0"}, "backbone": f"{SECRET}/tiny-llama", "dtype": "fp32", "device": "cpu (x86_64)", "threads": 2,
        "prompts": 9, "max_new_tokens": 64, "seed": 0, "tasks": {"math": 4, "code": 5},
        "results": [row | {"tasks": {"math": one, "code": one | {"tau": 3.0}}}, fixed, fixed | {"head": f"{head}, alone"}],
    }  # fmt: skip
    return report | changes


def test_a_dry_run_writes_what_would_be_uploaded(heads, tmp_path, capsys):
    out = tmp_path / "card"
    assert "not uploaded" in output_of(capsys, "push", str(heads), "me/tiny-eagle3", "--dry-run", str(out))
    names = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert {"README.md", "config.json", "headstart.json", "model.safetensors"} <= names and not any("state" in name for name in names)
    for file in out.rglob("*"):
        if file.suffix in (".json", ".md"):
            assert "secret" not in file.read_text() and "host.internal" not in file.read_text(), file
    metadata, text = card(out)
    assert metadata == {"library_name": "headstart", "tags": ["speculative-decoding", "eagle3", "headstart"]}
    assert text.startswith("\n# EAGLE-3 heads for tiny-llama") and "## Acceptance\n\nNot measured." in text
    assert "vllm serve tiny-llama --speculative-config" in text and '"model": "me/tiny-eagle3"' in text
    assert 'custom_generate="me/tiny-eagle3", trust_remote_code=True' in text and "custom_generate/generate.py" in names
    assert 'headstart.load("me/tiny-eagle3", backbone=model)' in text and "| data | answers.jsonl |" in text
    before, after = read_metadata(heads)[1], read_metadata(out)[1]
    assert after["weights"] == before["weights"] and after["backbone"] == "tiny-llama" and after["contract"] == before["contract"]


def test_the_weights_are_published_in_half_the_bytes(heads, tmp_path):
    assert main(["push", str(heads), "me/x", "--dry-run", str(tmp_path / "bf16"), "--dtype", "bf16"]) == 0
    whole, half = load_file(heads / "model.safetensors"), load_file(tmp_path / "bf16" / "model.safetensors")
    assert all(torch.equal(half[name], whole[name].bfloat16()) for name in whole if whole[name].is_floating_point())
    config, file = json.loads((tmp_path / "bf16" / "config.json").read_text()), tmp_path / "bf16" / "model.safetensors"
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert file.stat().st_mode == (tmp_path / "bf16" / "config.json").stat().st_mode
    assert read_metadata(tmp_path / "bf16")[1]["weights"]["sha256"] == file_hash(file)


def test_figures_are_those_that_were_measured(heads, tmp_path):
    log = [{"step": 20, "tau": 1.5, "acceptance_per_depth": [0.4]}, {"step": 40, "tau": 2.125, "acceptance_per_depth": [0.7, 0.425]}]
    run = save(tmp_path / "run", tau=2.125)
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*log, {"step": 60, "tau": 9.0}]) + '{"step": 6')
    (report := tmp_path / "report.json").write_text(json.dumps(bench_report(f"{SECRET}/run")))
    assert main(["push", str(run), "me/x", "--dry-run", str(tmp_path / "a"), "--bench", str(report), "--base-model", "org/tiny-llama"]) == 0
    metadata, text = card(tmp_path / "a")
    assert metadata["base_model"] == "org/tiny-llama" and "vllm serve org/tiny-llama" in text
    assert 'from_pretrained("org/tiny-llama")' in text
    rows = re.findall(r"^\| (.+) \|$", text, re.MULTILINE)
    assert "math | 4 | 0 | 1 | adaptive | 2.36 | 0.80 0.50 | 2.41 | 1.62" in rows
    assert any(row.startswith("code | 5 | 0 | 1 | adaptive | 3.00") for row in rows) and any(row.startswith("all | 9 | 0") for row in rows)
    assert any(row.startswith("math | 4 | 1 | 1 | 5 nodes, width 1, depth 4") for row in rows)
    assert "held out from training | 8 | 0.7 | 1 | 24 nodes, width 8 | 2.12 | 0.70 0.42 | not measured | not measured" in rows
    assert "at step 40 of 50" in text and "its own token included" in text and "Every token is that of autoregressive" in text
    (run / "log.jsonl").unlink()
    assert main(["push", str(run), "me/x", "--dry-run", str(tmp_path / "b")]) == 0
    assert "Not measured." in card(tmp_path / "b")[1] and "2.12" not in card(tmp_path / "b")[1]


@pytest.mark.parametrize(("file", "text", "license"), [
    ("README.md", "---\nlicense: llama3.1\n---\n# A model", "llama3.1"), ("README.md", "no metadata", None),
    ("README.md", "---\nlicense: [a, b]\n---\n# A model", None), ("README.md", "---\nlicense: [\n---\n# A model", None),
    ("LICENSE", "All mine", None),
])  # fmt: skip
def test_the_backbones_licence(heads, tmp_path, file, text, license):
    (backbone := tmp_path / "tiny-llama").mkdir()
    (backbone / file).write_text(text)
    copied = tmp_path / "heads"
    main(["push", str(heads), "me/x", "--dry-run", str(copied)])
    (copied / "README.md").unlink()
    stated = json.loads((copied / "headstart.json").read_text())
    (copied / "headstart.json").write_text(json.dumps(stated | {"backbone": str(backbone)}))
    assert main(["push", str(copied), "me/x", "--dry-run", str(tmp_path / "out")]) == 0
    metadata, shown = card(tmp_path / "out")
    assert metadata.get("license") == license and ("was not found" in shown) == (license is None)
    main(["push", str(copied), "me/x", "--dry-run", str(tmp_path / "b"), "--base-model", "org/tiny-llama"])  # which is not reached
    assert card(tmp_path / "b")[0].get("license") == license, "the local copy's"


def test_a_hub_that_is_not_reached_is_asked_once_and_for_no_folders_name(heads, tmp_path, monkeypatch):
    asked = []

    def fetch(repo: str, name: str, **options: Any) -> str:
        asked.append(repo)
        raise LocalEntryNotFoundError("no connection")  # after tries that take half a minute

    monkeypatch.setattr(repocard, "hf_hub_download", fetch)
    main(["push", str(heads), "me/x", "--dry-run", str(tmp_path / "a")])
    assert "tiny-llama" not in asked, "a folder's name is no repository's"
    asked.clear()
    assert model_card.license_of("org/tiny-llama") is None and asked == ["org/tiny-llama"]


def test_engines_that_would_draft_other_tokens_are_left_out(tmp_path):
    on = Backbone(tiny("llama"))
    random_drafter("eagle3", on, norm_before_residual=True).save_pretrained(tmp_path / "run", extra=provenance())
    assert main(["push", str(tmp_path / "run"), "me/x", "--dry-run", str(tmp_path / "out")]) == 0
    assert "vllm serve" in card(tmp_path / "out")[1] and "SGLang" not in card(tmp_path / "out")[1]


def test_methods_that_engines_read_in_another_layout_are_exported_first(tmp_path):
    for kind, expected in (("medusa", "--to medusa --backbone tiny-llama --out heads"), ("hydra", "No serving engine reads these")):
        assert main(["push", str(save(tmp_path / kind, kind)), "me/x", "--dry-run", str(tmp_path / f"{kind}-card")]) == 0
        assert expected in card(tmp_path / f"{kind}-card")[1]


def test_an_exported_folder(tmp_path, capsys):
    tiny("llama").save_pretrained(tmp_path / "tiny-llama")
    on = Backbone(type(tiny("llama")).from_pretrained(tmp_path / "tiny-llama"))
    random_drafter("eagle3", on).save_pretrained(tmp_path / "run", extra=provenance(tau=1.5))
    (tmp_path / "run" / "log.jsonl").write_text(json.dumps({"step": 50, "tau": 1.5, "acceptance_per_depth": [0.5]}))
    exported = tmp_path / "exported"
    assert main(["export", "--heads", str(tmp_path / "run"), "--to", "vllm", "--out", str(exported)]) == 0
    assert main(["push", str(exported), "me/x", "--dry-run", str(tmp_path / "out")]) == 0
    metadata, text = card(tmp_path / "out")
    assert metadata["tags"] == ["speculative-decoding", "eagle3", "headstart"] and "vllm serve tiny-llama" in text
    assert "headstart import me/x --backbone tiny-llama" in text and "| layout | eagle3 |" in text and "24 nodes, width 8 | 1.50" in text
    assert "SGLang" not in text  # exported for vLLM
    error = error_of(capsys, "push", exported, "me/x", "--dtype", "bf16")
    assert "whose dtype is that of headstart export --dtype; leave --dtype bf16 out" in error
    files = {file.name: file for file in (tmp_path / "out").iterdir()}
    assert files.keys() == {"README.md", "config.json", "headstart_export.json", "model.safetensors"}
    assert str(tmp_path) not in files["headstart_export.json"].read_text() + files["config.json"].read_text()
    (exported / "model.safetensors").unlink()
    assert "lacks its weights" in error_of(capsys, "push", exported, "me/x")
    (exported / "headstart_export.json").write_text("{}")
    assert "is damaged (KeyError: 'heads'); export the heads again" in error_of(capsys, "push", exported, "me/x")


class Hub:
    """A hub that notes what it is given, or raises."""

    def __init__(self) -> None:
        self.error, self.files, self.created = None, {}, {}

    def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> str:
        if self.error is not None:
            raise self.error
        self.created = {"repo": repo, "private": private}
        return f"https://hub/{repo}"

    def upload_folder(self, *, repo_id: str, folder_path: Path) -> None:
        self.files = {str(file.relative_to(folder_path)): file.read_bytes() for file in folder_path.rglob("*") if file.is_file()}


@pytest.fixture
def to(monkeypatch) -> Hub:
    to = Hub()
    monkeypatch.setattr(hub, "HfApi", lambda: to)
    return to


def test_an_upload_is_the_dry_run(heads, to, tmp_path, capsys):
    assert main(["push", str(heads), "me/x", "--private"]) == 0 and to.created == {"repo": "me/x", "private": True}
    assert "uploaded to https://hub/me/x" in capsys.readouterr().out
    main(["push", str(heads), "me/x", "--dry-run", str(tmp_path / "out")])
    out = tmp_path / "out"
    assert to.files == {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*") if file.is_file()}


def response(status: int) -> HfHubHTTPError:
    return HfHubHTTPError("Unauthorized", response=SimpleNamespace(status_code=status, headers={}, request=None))


@pytest.mark.parametrize(("error", "message"), [
    (LocalTokenNotFoundError("no token"), "not logged in to the hub; run `hf auth login`"),
    (response(401), "status 401: Unauthorized); log in with a token that may write there"),
    (response(500), r"status 500: Unauthorized\); try again".replace("\\", "")),
    (OfflineModeIsEnabled("offline"), "no connection to the hub (offline); go online, or use --dry-run OUT"),
    (ConnectionError("no route"), "no connection to the hub (no route)"),
])  # fmt: skip
def test_what_the_hub_refuses(heads, to, capsys, error, message):
    to.error = error
    assert message in error_of(capsys, "push", heads, "me/x")


def test_what_cannot_be_published(heads, tmp_path, capsys):
    for repo in ("me/x/y", ""):
        assert f"repository {repo!r} is not a repository's name" in error_of(capsys, "push", heads, repo)
    assert "--base-model 'a b' is not" in error_of(capsys, "push", heads, "me/x", "--base-model", "a b")
    assert "no folder at" in error_of(capsys, "push", tmp_path / "none", "me/x")
    assert "is not a checkpoint" in error_of(capsys, "push", tmp_path, "me/x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    assert "not an empty folder" in error_of(capsys, "push", heads, "me/x", "--dry-run", tmp_path / "full")
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["file"]
    report = tmp_path / "report.json"
    assert "there is no such file" in error_of(capsys, "push", heads, "me/x", "--bench", report)
    for content, message in (("{}", "is no report of this version's headstart bench --json (KeyError: 'results')"),
                             ("[", "is damaged (not valid JSON"),
                             (json.dumps(bench_report("out/other")), "has figures of other, not of eagle3")):  # fmt: skip
        report.write_text(content)
        assert message in error_of(capsys, "push", heads, "me/x", "--bench", report, "--dry-run", tmp_path / "new")
    broken = save(tmp_path / "broken")
    stated = json.loads((broken / "headstart.json").read_text())
    stated["contract"]["adapter"] = "abc"
    (broken / "headstart.json").write_text(json.dumps(stated))
    assert "adapter lacks adapter_config.json of the adapter that the heads were trained with" in error_of(capsys, "push", broken, "me/x")
    with (broken / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert "is truncated or changed" in error_of(capsys, "push", broken, "me/x")
    assert not (tmp_path / "new").exists()


def test_paths_are_reduced_to_their_last_part():
    assert last_part("/home/a b/model-x/") == "model-x" and last_part("org/model") == "org/model" and last_part("out/heads") == "out/heads"
    assert last_part("run /a/b/x.yaml data.train=/c/d.jsonl,'/e f' --n 3/4") == "run x.yaml data.train=d.jsonl,'e f' --n 3/4"
    assert last_part("C:\\Users\\me\\model") == "model" and last_part("~/models/llama") == "llama"
