"""The heads that ship for SmolLM2, on the weights of their training and on others of the same model: as published in bf16, and rounded to
8 bits. Each text is that of the model alone, and in each drafts are accepted."""

import pytest
from command import Folder
from fetch import NAME

CODE = """
import json, torch, headstart
backbone, tokenizer = headstart.load_backbone("FILE", dtype="bf16"), headstart.load_tokenizer("FILE")
model = backbone.model
for linear in (part for part in model.model.layers.modules() if isinstance(part, torch.nn.Linear)):
    weight = linear.weight.data.float().unflatten(1, (-1, 32))  # blocks of a scale
    if "HOW" == "rounded":
        step = weight.abs().amax(2, keepdim=True) / 127
        weight = (weight / step).round() * step
    if "HOW" == "as published":  # whose rounding to 4 bits these are, as far as any
        weight += (torch.rand_like(weight) - 0.5) * (weight.amax(2, keepdim=True) - weight.amin(2, keepdim=True)) / 15
    linear.weight.data = weight.flatten(1).bfloat16()
on = backbone if "HOW" == "of the training" else headstart.Backbone(model)
heads = headstart.load("smollm2", on, tokenizer=tokenizer)
asked = torch.tensor([heads.chat.prompt([{"role": "user", "content": "List the planets, and say one sentence about each."}])])
how = {"max_new_tokens": 96, "do_sample": False, "return_dict_in_generate": True}
alone = model.generate(asked, custom_generate=heads.generate, speculate=False, **how)
drafted = model.generate(asked, custom_generate=heads.generate, tree=headstart.TreeShape(8, 2, 4), **how)
print(json.dumps({"same": torch.equal(alone.sequences, drafted.sequences), "tau": drafted.tau, "trees": on.no_trees is None}))
"""


@pytest.mark.parametrize("how", ["of the training", "as published", "rounded"])
def test_they_draft(at: Folder, how: str) -> None:
    found = at.python(CODE.replace("FILE", NAME).replace("HOW", how))
    assert found["same"] and found["trees"] and found["tau"] > 1.3
