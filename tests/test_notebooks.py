"""The notebooks: valid, kept without results, and run to their end on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import nbformat
import pytest
from mlx.utils import tree_flatten
from nbclient import NotebookClient
from tiny import BASE, build

from mlx_specstream import Target, load, load_folder, stream_generate
from mlx_specstream.conversion import gguf

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
STORED = 4_000  # most characters of a notebook's stored outputs
SECONDS = 300  # of a cell at most, on a machine that has other work; alone all of it takes ten

REPORT = """
import json
print(json.dumps({
    "blank": blank.accuracy, "fitted": fitted.accuracy, "trained": quality.accuracy,
    "losses": losses, "prompts": prompts, "texts": texts, "table": table_accuracy,
    "rates": [[*key, value] for key, value in tokens_per_pass.items()],
}))
"""


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, write_tiny_gguf) -> Path:
    """A tiny model's folder: one that says what a stream can learn.

    Its blocks add little to the hidden state and its head is not its embedding, so that the next
    token follows mostly from the newest one.
    """
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_gguf(folder / "tiny.gguf")
    gguf.repack(folder / "tiny.gguf", folder)  # for its tokenizer
    theirs = json.loads((folder / "config.json").read_text())
    changes = {
        "vocab_size": theirs["vocab_size"],
        "num_hidden_layers": 5,
        "tie_word_embeddings": False,
    }
    weights = dict(tree_flatten(build(**changes).parameters()))
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = weights[name] * 0.1
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    config = BASE | changes | {"eos_token_id": theirs["eos_token_id"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, dict]:
    """The notebook after its run, the folder it wrote to, and what its variables were."""
    place = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(FOLDER / "train_streams.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(REPORT))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECSTREAM_NOTEBOOK_MODEL", str(tiny_model))
        patch.setenv("SPECSTREAM_NOTEBOOK_TINY", "1")
        patch.setenv("SPECSTREAM_NOTEBOOK_OUT", str(place / "out"))
        patch.setenv("IPYTHONDIR", str(place / "ipython"))
        patch.delenv("MPLBACKEND", raising=False)  # the kernel's own, whose plots are outputs
        (place / "work").mkdir()
        resources = {"metadata": {"path": str(place / "work")}}
        client = NotebookClient(
            notebook, timeout=SECONDS, kernel_name="python3", resources=resources
        )
        client.execute()  # raises at the first cell that fails
    printed = "".join(output["text"] for output in notebook.cells[-1].outputs)
    return notebook, place, json.loads(printed)


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def test_the_training_notebook_plots_and_writes_only_where_it_was_told(run):
    notebook, place, _ = run
    plots = [output for output in outputs(notebook) if "image/png" in output.get("data", {})]
    assert len(plots) == 3
    assert list((place / "work").iterdir()) == []
    assert {path.name for path in (place / "out").iterdir()} == {
        "answers.journal",
        "streams",
        "trunk",
    }


def test_its_streams_learn_and_their_folder_can_be_used(run, tiny_model):
    _, place, said = run
    streams = load_folder(place / "out" / "streams", *target_of(tiny_model))
    assert streams.heads is not None
    assert streams.heads.config.gamma == len(said["trained"])
    assert streams.table is not None
    assert said["losses"][-1] < said["losses"][0] - 0.3
    assert said["fitted"][0] > said["blank"][0] + 0.1
    assert said["trained"][0] > said["blank"][0] + 0.1
    assert said["table"] > 0.1


def test_its_texts_are_plain_decodings_and_proposals_are_accepted(run, tiny_model):
    _, _, said = run
    model, tokenizer = load(tiny_model)
    for how, sampling in {"greedy": {}, "sampled": {"temp": 0.7, "seed": 1}}.items():
        plain = [
            "".join(r.text for r in stream_generate(
                model, tokenizer, prompt, 64, speculation=False, **sampling
            ))
            for prompt in said["prompts"]
        ]  # fmt: skip
        assert said["texts"][how] == plain
        assert all(plain)
    rates = {(name, how): rate for name, how, rate in said["rates"]}
    assert len(rates) == 10
    for (name, _), rate in rates.items():
        assert rate == 1 if name == "plain" else rate > 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_valid_and_stores_next_to_nothing(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert notebook.nbformat == 4
    stored = outputs(notebook)
    assert not [output for output in stored if output.output_type == "error"]
    assert len(json.dumps(stored)) < STORED


def test_there_is_a_notebook_to_check():
    assert "train_streams.ipynb" in {path.name for path in NOTEBOOKS}


def target_of(folder: Path) -> tuple[Target, Any]:
    model, tokenizer = load(folder)
    return Target.of(model), tokenizer
