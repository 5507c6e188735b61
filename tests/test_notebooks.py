"""The notebooks: valid, kept without results, and run to their end on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from mlx_specstream import Target, load, load_folder, stream_generate

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


SPEED = """
import json
print(json.dumps({
    "rows": [[row.bits, row.method, row.figures is not None] for row in rows],
    "limits": limits,
    "costs": {bits: [c.seconds(n, 100) / c.seconds(1, 100) for n in (1, 8)]
              for bits, c in curves.items()},
    "trees": last.trees, "passes": last.passes, "why": last.why,
}))
"""


def executed(name: str, report: str, model: Path, place: Path) -> tuple[Any, dict]:
    """A notebook after its run on a tiny model, and what its variables were.

    Args:
        name: Of the notebook.
        report: A last cell, which prints a JSON object.
        model: The model's folder.
        place: A folder to run it in: ``work``, ``out`` for its results, and what it caches.
    """
    notebook = nbformat.read(FOLDER / name, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(report))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECSTREAM_NOTEBOOK_MODEL", str(model))
        patch.setenv("SPECSTREAM_NOTEBOOK_TINY", "1")
        patch.setenv("SPECSTREAM_NOTEBOOK_OUT", str(place / "out"))
        patch.setenv("MLX_SPECSTREAM_CACHE", str(place / "cache"))
        patch.setenv("IPYTHONDIR", str(place / "ipython"))
        patch.delenv("MPLBACKEND", raising=False)  # the kernel's own, whose plots are outputs
        (place / "work").mkdir()
        resources = {"metadata": {"path": str(place / "work")}}
        client = NotebookClient(
            notebook, timeout=SECONDS, kernel_name="python3", resources=resources
        )
        client.execute()  # raises at the first cell that fails
    printed = "".join(output["text"] for output in notebook.cells[-1].outputs)
    return notebook, json.loads(printed)


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, dict]:
    """The training notebook after its run, its folder, and what its variables were."""
    place = tmp_path_factory.mktemp("notebook")
    notebook, said = executed("train_streams.ipynb", REPORT, tiny_model, place)
    return notebook, place, said


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


def test_the_speed_notebook_measures_every_form_and_keeps_the_text(tiny_model, tmp_path):
    notebook, said = executed("memory_and_speed.ipynb", SPEED, tiny_model, tmp_path)
    plots = [output for output in outputs(notebook) if "image/png" in output.get("data", {})]
    assert len(plots) == 3
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["memory_speed.png"]
    assert list((tmp_path / "work").iterdir()) == []
    assert [tuple(row) for row in said["rows"]] == [
        (bits, method, True) for bits in (8, 32) for method in ("plain", "speculative", "mlx-lm")
    ]
    assert said["limits"]["8"] > said["limits"]["32"] > 0
    assert all(costs[0] == 1 and min(costs) > 0 for costs in said["costs"].values())
    assert sum(said["trees"].values()) == said["passes"]
    assert said["why"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_valid_and_stores_next_to_nothing(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert notebook.nbformat == 4
    stored = outputs(notebook)
    assert not [output for output in stored if output.output_type == "error"]
    assert len(json.dumps(stored)) < STORED


def test_the_notebooks_are_those_that_are_run():
    found = {path.name for path in NOTEBOOKS}
    assert found == {"memory_and_speed.ipynb", "train_streams.ipynb"}


def target_of(folder: Path) -> tuple[Target, Any]:
    model, tokenizer = load(folder)
    return Target.of(model), tokenizer
